// SPDX-License-Identifier: Apache-2.0
//
// Rounding as Python, numpy and torch do it, whatever the floating-point environment says; and
// rounding of parts that must sum to a whole.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/plan/ranking.hpp>

namespace kvpolicy {

/// To the nearest whole number, halves to the even one. `value` is not negative.
[[nodiscard]] inline std::size_t round_half_even(double value) {
  const double floor = std::floor(value);
  const auto whole = static_cast<std::size_t>(floor);
  const double rest = value - floor;
  return rest > 0.5 || (rest == 0.5 && whole % 2 == 1) ? whole + 1 : whole;
}

/// Whole numbers near `parts` that sum to `total` exactly: each is rounded down, then the largest
/// remainders are rounded up; of equal remainders the first. The parts, not negative but for
/// rounding, sum to about `total`.
[[nodiscard]] inline std::vector<std::size_t> round_to_sum(std::span<const double> parts,
                                                           std::size_t total) {
  std::vector<std::size_t> whole(parts.size());
  if (parts.empty()) return whole;
  std::vector<double> remainders(parts.size());
  std::size_t sum = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const double floor = std::floor(std::max(parts[i], 0.0));
    whole[i] = static_cast<std::size_t>(floor);
    remainders[i] = parts[i] - floor;
    sum += whole[i];
  }
  const std::vector<std::size_t> ranked = detail::ranked_places(remainders);
  for (std::size_t i = 0; sum < total; i = (i + 1) % ranked.size(), ++sum) ++whole[ranked[i]];
  // The sum above may have gone too far by rounding: back, from the smallest remainder on.
  for (std::size_t i = ranked.size(); sum > total; i = i == 0 ? ranked.size() : i) {
    std::size_t& one = whole[ranked[--i]];
    if (one == 0) continue;
    --one;
    --sum;
  }
  return whole;
}

}  // namespace kvpolicy
