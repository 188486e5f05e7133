// SPDX-License-Identifier: Apache-2.0
//
// Decides which heads must see the whole text. The input are DuoAttention's trained gates (Xiao et al.,
// arXiv:2410.10819), one number for each KV head; the result says which heads are retrieval heads and which
// are streaming heads.
//
// Published gates have many ties (94 distinct numbers for 256 heads), which the published code breaks with
// random noise. `GateCut::exact_count` spreads ties evenly over the layers, as the noise does on average,
// so a sparsity always gives the same heads and the same number of them. `GateCut::threshold` is the
// published arithmetic without the noise, which keeps every head of a tie.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/head_table.hpp>
#include <kvpolicy/plan/highest.hpp>
#include <kvpolicy/plan/rounding.hpp>

namespace kvpolicy {

/// The gate of each KV head [layers, kv_heads]: about 0 for a head that does not need the middle of the
/// text, 1 for a head that does. Training leaves some gates a little outside of [0, 1]; they are clipped to
/// it.
using HeadGates = HeadTable<double>;

/// The kind of a head: what its queries read.
enum class HeadKind : std::uint8_t {
  streaming,  ///< reads the sinks and the latest rows
  retrieval   ///< reads every row
};
using HeadKinds = HeadTable<HeadKind>;  ///< [layers, kv_heads]

/// The rule by which gates decide the kinds of heads.
enum class GateCut : std::uint8_t {
  /// The round((1 - sparsity) * heads) largest gates, halves to even, belong to retrieval heads. If the cut
  /// falls into a tie, the chosen heads are spread evenly over its layers (`highest_gates` returns the size
  /// of the tie).
  exact_count,
  /// Every gate that is at least the `sparsity` quantile of all gates belongs to a retrieval head.
  threshold
};

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(GateCut) {
  return {"exact_count", "threshold"};
}

/// Checks that gates are usable.
/// @throws ConfigError for a gate that is not finite, or no gates.
inline void check_gates(const HeadGates& gates) {
  require(!gates.values().empty(), "HeadGates: there are none");
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    for (std::size_t head = 0; head < gates.heads(); ++head) {
      require(std::isfinite(gates(layer, head)), "HeadGates: the gate of layer ", layer, ", head ", head,
              " is ", gates(layer, head), ", must be a number");
    }
  }
}

/// The smallest gate of a retrieval head under `GateCut::threshold`: the linear quantile of the clipped
/// gates (numpy's default). It is below every gate for sparsity <= 0 and above every gate for sparsity >=
/// 1.
/// @throws ConfigError for a sparsity or a gate that is not a number.
[[nodiscard]] inline double gate_threshold(const HeadGates& gates, double sparsity) {
  require(!std::isnan(sparsity), "gate_threshold: sparsity is NaN, must be a number, 0 to 1");
  check_gates(gates);
  if (sparsity <= 0.0) return -1.0;
  if (sparsity >= 1.0) return 2.0;
  std::vector<double> sorted(gates.values().begin(), gates.values().end());
  for (double& gate : sorted) gate = std::clamp(gate, 0.0, 1.0);
  std::ranges::sort(sorted);
  const double place = sparsity * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = place - static_cast<double>(below);
  const double step = sorted[above] - sorted[below];
  // Computed from the nearer end, as numpy does it, so that a quantile that falls on a gate equals that
  // gate.
  return share < 0.5 ? sorted[below] + step * share : sorted[above] - step * (1.0 - share);
}

/// How many of `heads` heads are retrieval heads at `sparsity`, the share of streaming heads.
/// @throws ConfigError for a NaN.
[[nodiscard]] inline std::size_t retrieval_head_count(std::size_t heads, double sparsity) {
  require(!std::isnan(sparsity), "retrieval_head_count: sparsity is NaN, must be a number, 0 to 1");
  return round_half_even((1.0 - std::clamp(sparsity, 0.0, 1.0)) * static_cast<double>(heads));
}

/// The heads that `GateCut::exact_count` keeps at a sparsity, numbered layer by layer, and the tie that the
/// cut falls into.
/// @throws ConfigError for a sparsity or a gate that is not a number.
[[nodiscard]] inline Highest highest_gates(const HeadGates& gates, double sparsity) {
  check_gates(gates);
  std::vector<double> clipped(gates.values().begin(), gates.values().end());
  for (double& gate : clipped) gate = std::clamp(gate, 0.0, 1.0);
  return highest(clipped, retrieval_head_count(clipped.size(), sparsity));
}

/// The kind of each head at a sparsity.
/// @throws ConfigError for a sparsity or a gate that is not a number.
[[nodiscard]] inline HeadKinds head_kinds(const HeadGates& gates, double sparsity,
                                          GateCut cut = GateCut::exact_count) {
  check_gates(gates);
  HeadKinds kinds{gates.layers(), gates.heads(), HeadKind::streaming};
  if (cut == GateCut::threshold) {
    const double threshold = gate_threshold(gates, sparsity);
    for (std::size_t i = 0; i < gates.values().size(); ++i) {
      if (std::clamp(gates.values()[i], 0.0, 1.0) >= threshold) kinds.values()[i] = HeadKind::retrieval;
    }
    return kinds;
  }
  for (const std::size_t i : highest_gates(gates, sparsity).indices) {
    kinds.values()[i] = HeadKind::retrieval;
  }
  return kinds;
}

}  // namespace kvpolicy
