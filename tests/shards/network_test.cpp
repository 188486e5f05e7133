// SPDX-License-Identifier: Apache-2.0
//
// Messages of the network model against sums that were worked out by hand from NCCL's constants.
#include <cstddef>

#include <doctest/doctest.h>

#include "bench/shards/network.hpp"
#include "support/compare.hpp"

using namespace kvpolicy;
using namespace kvpolicy::bench;
using test::contains;
using test::thrown;

namespace {

Network in_nodes_of(std::size_t node) {
  Network network;
  network.node = node;
  return network;
}

// In microseconds.
double sum(std::size_t node, std::size_t ranks, double bytes) {
  return 1e6 * seconds_to_sum(in_nodes_of(node), ranks, bytes);
}
double gather(std::size_t node, std::size_t ranks, double bytes) {
  return 1e6 * seconds_to_gather(in_nodes_of(node), ranks, bytes);
}

}  // namespace

TEST_CASE("one rank says nothing") {
  CHECK(sum(8, 1, 1e9) == 0);
  CHECK(gather(8, 1, 1e9) == 0);
}

TEST_CASE("short sums: a ring in a node, the switch in a large one, a tree between nodes") {
  // 6.6 + 2 steps of 0.6, and 16 KiB at 87.7 GB/s.
  CHECK(sum(8, 2, 16384) == doctest::Approx(7.8 + 0.186819).epsilon(1e-5));
  // 6.6 + 14 * 0.6, and 14 eighths of 16 KiB.
  CHECK(sum(8, 8, 16384) == doctest::Approx(15.0 + 0.326933).epsilon(1e-5));
  // 23, and 16 KiB at 5/6 of 450 GB/s.
  CHECK(sum(64, 64, 16384) == doctest::Approx(23.0 + 0.043691).epsilon(1e-5));
  // 6.8 + 2 * (7 * 0.6 + 3 * 5.0), and 2 * 16 KiB at 22.5 GB/s.
  CHECK(sum(8, 64, 16384) == doctest::Approx(45.2 + 1.456356).epsilon(1e-5));
  // Two nodes: 6.8 + 2 * (7 * 0.6 + 5.0) against a ring's 6.6 + 26 * 1.0 + 4 * 2.7.
  CHECK(sum(8, 16, 0) == doctest::Approx(25.2));
}

TEST_CASE("long sums take their bytes") {
  // The switch: 23, and 10^9 bytes at 375 GB/s.
  CHECK(sum(8, 8, 1e9) == doctest::Approx(23 + 2666.6667));
  // A ring over two nodes: 8.4 + 26 * 3.4 + 4 * 14, and 30 sixteenths at 400 GB/s, eight cards' worth.
  CHECK(sum(8, 16, 1e9) == doctest::Approx(152.8 + 4687.5));
}

TEST_CASE("gathering: a ring of half as many steps, or a sum between nodes") {
  // 6.6 + 7 * 0.6, and seven others' 256 bytes.
  CHECK(gather(8, 8, 256) == doctest::Approx(10.8 + 0.020434).epsilon(1e-5));
  // A ring would take 6.6 + 56 * 1.0 + 7 * 2.7 = 81.5; the sum of 64 * 256 bytes is that above.
  CHECK(gather(8, 64, 256) == doctest::Approx(46.656356).epsilon(1e-5));
}

TEST_CASE("more bytes never take less time, and ranks have to fill nodes") {
  for (const std::size_t node : {1U, 8U, 64U}) {
    for (const std::size_t ranks : {1U, 2U, 4U, 8U, 16U, 32U, 64U}) {
      if (ranks > node && ranks % node != 0) continue;
      double before = 0;
      for (double bytes = 1; bytes < 1e10; bytes *= 3) {
        const double now = sum(node, ranks, bytes);
        CHECK(now >= before);
        before = now;
      }
    }
  }
  const auto error = [](std::size_t node, std::size_t ranks) {
    return thrown<ConfigError>([&] { (void)seconds_to_sum(in_nodes_of(node), ranks, 1); });
  };
  CHECK(contains(error(8, 12), "12 ranks in nodes of 8, must be at most one node or fill all"));
  CHECK(contains(error(6, 2), "a node of 6 ranks, must be a power of two"));
  CHECK(contains(error(8, 0), "0 ranks"));
}
