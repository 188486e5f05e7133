// SPDX-License-Identifier: Apache-2.0
//
// How long ranks take to add up numbers and to gather them: the latency-bandwidth model by which NCCL chooses between
// its algorithms, with the constants that it has for Hopper (src/graph/tuning.cc at b6475625), and the bandwidths
// that NVIDIA publishes: 900 GB/s of NVLink in both directions of an H100, 400 Gb/s of a ConnectX-7, one for each GPU.
//
// A call takes a start, a latency for each step that a message makes in turn, and its bytes over the bandwidth. Its
// algorithms are a ring, which moves little and takes many steps, a tree, which takes few steps between nodes, and
// inside one node sums in the switch (NVLS). A protocol trades bandwidth for latency. NCCL takes the fastest; so does
// this. What it leaves out: other messages on the same links, ranks that arrive late, and messages that computation
// hides.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::bench {

/// What connects ranks. Times are in seconds, bandwidths in bytes a second and direction.
struct Network {
  std::size_t node = 8;         ///< ranks that share NVLink; a power of two
  double inside = 450e9;        ///< of a rank's NVLink
  double between = 50e9;        ///< of a rank's network card
  double post_overhead = 1e-6;  ///< that posting a message to a card takes
  // Bandwidth that the protocol of short messages reaches at most, inside a node and between nodes.
  double most_short_inside = 87.7e9;
  double most_short_between = 22.5e9;

  void validate(std::size_t ranks) const {
    const bool power = node > 0 && (node & (node - 1)) == 0;
    require(power, "Network: a node of ", node, " ranks, must be a power of two");
    require(ranks >= 1 && (ranks <= node || ranks % node == 0), "Network: ", ranks, " ranks in nodes of ",
            node, ", must be at most one node or fill all");
  }
  [[nodiscard]] std::size_t nodes(std::size_t ranks) const { return ranks <= node ? 1 : ranks / node; }
  /// A ring crosses from node to node once for each network card, so all cards of a node carry it.
  [[nodiscard]] double bandwidth(std::size_t ranks) const {
    return nodes(ranks) == 1 ? inside : std::min(inside, between * static_cast<double>(node));
  }
};

namespace detail {

constexpr double us = 1e-6;

// A protocol of NCCL: LL sends a flag with every 4 bytes, LL128 with every 120, Simple none and waits.
struct Protocol {
  double ring_start, ring_inside, ring_between;
  double tree_start, tree_inside, tree_between;
  double ring_share, tree_share;  // of the bandwidth
  double posts;                   // a step of a ring between nodes
  bool is_short;
};
inline constexpr std::array<Protocol, 3> protocols{{
    {6.6 * us, 0.6 * us, 2.7 * us, 6.8 * us, 0.6 * us, 5.0 * us, 1.0 / 4.0, 0.92 / 3.8, 1, true},
    {14.0 * us, 1.9 * us, 4.0 * us, 14.0 * us, 1.25 * us, 8.5 * us, 0.92, 0.92 * 7.0 / 9.0, 1, false},
    {8.4 * us, 3.4 * us, 14.0 * us, 0.0, 28 * us, 28 * us, 1.0, 0.92, 3, false},
}};
inline constexpr double switch_seconds = 23 * us;

// Bytes a second of a protocol.
[[nodiscard]] inline double speed(const Network& network, std::size_t ranks, double share, bool is_short) {
  const double own = network.bandwidth(ranks) * share;
  if (!is_short) return own;
  return std::min(own, network.nodes(ranks) == 1 ? network.most_short_inside : network.most_short_between);
}

// Of `steps` steps of a ring, `crossing` ones between nodes.
[[nodiscard]] inline double ring_latency(const Network& network, const Protocol& by, std::size_t ranks,
                                         std::size_t steps, std::size_t crossing) {
  const double overhead = network.nodes(ranks) == 1 ? 0.0 : network.post_overhead * by.posts;
  return by.ring_start + static_cast<double>(steps - crossing) * std::max(by.ring_inside, overhead) +
         static_cast<double>(crossing) * by.ring_between;
}

}  // namespace detail

/// Seconds in which `ranks` ranks add up `bytes` bytes each, so that all have the sums; 0 for one rank.
/// @throws ConfigError for ranks that do not fill nodes
[[nodiscard]] inline double seconds_to_sum(const Network& network, std::size_t ranks, double bytes) {
  network.validate(ranks);
  if (ranks == 1) return 0;
  const std::size_t nodes = network.nodes(ranks);
  const auto p = static_cast<double>(ranks);
  double best = std::numeric_limits<double>::infinity();
  for (const detail::Protocol& by : detail::protocols) {
    const double ring_speed = detail::speed(network, ranks, by.ring_share, by.is_short);
    const double ring = detail::ring_latency(network, by, ranks, 2 * (ranks - 1), nodes > 1 ? 2 * nodes : 0) +
                        bytes * 2 * (p - 1) / p / ring_speed;
    const double tree_speed = detail::speed(network, ranks, by.tree_share, by.is_short);
    const double depth = std::floor(std::log2(static_cast<double>(nodes)));
    const double tree =
        by.tree_start +
        2 * (static_cast<double>(ranks / nodes - 1) * by.tree_inside + depth * by.tree_between) +
        2 * bytes / tree_speed;
    best = std::min({best, ring, tree});
  }
  if (nodes == 1) {
    best = std::min(best, detail::switch_seconds + bytes / (network.bandwidth(ranks) * 5.0 / 6.0));
  }
  return best;
}

/// Seconds in which each of `ranks` ranks gets the `bytes` bytes that every other has: by a ring, or by a sum in which
/// each rank's numbers have a place of their own. 0 for one rank.
/// @throws as `seconds_to_sum`
[[nodiscard]] inline double seconds_to_gather(const Network& network, std::size_t ranks, double bytes) {
  if (ranks == 1) return 0;
  double best = seconds_to_sum(network, ranks, bytes * static_cast<double>(ranks));
  for (const detail::Protocol& by : detail::protocols) {
    const double latency = detail::ring_latency(network, by, ranks, ranks - 1, network.nodes(ranks) - 1);
    const double speed = detail::speed(network, ranks, by.ring_share, by.is_short);
    best = std::min(best, latency + bytes * static_cast<double>(ranks - 1) / speed);
  }
  return best;
}

}  // namespace kvpolicy::bench
