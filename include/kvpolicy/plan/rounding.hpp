// SPDX-License-Identifier: Apache-2.0
//
// Rounding as in Python, numpy and torch, independent of the floating-point environment; and rounding of
// parts that must sum to a given total.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include <kvpolicy/plan/highest.hpp>

namespace kvpolicy {

/// Rounds to the nearest whole number, halves to the even one. `value` is not negative.
[[nodiscard]] inline std::size_t round_half_even(double value) {
  const double floor = std::floor(value);
  const auto whole = static_cast<std::size_t>(floor);
  const double rest = value - floor;
  return rest > 0.5 || (rest == 0.5 && whole % 2 == 1) ? whole + 1 : whole;
}

/// Whole numbers near `parts` that sum to exactly `total`. Each part is rounded down, then those with the
/// largest remainders are rounded up; a tie is spread evenly (plan/highest.hpp). The parts sum to about
/// `total` and, but for rounding errors, are not negative.
[[nodiscard]] inline std::vector<std::size_t> round_to_sum(std::span<const double> parts, std::size_t total) {
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
  if (sum <= total) {
    const std::size_t missing = total - sum;
    for (std::size_t& one : whole) one += missing / whole.size();
    for (const std::size_t i : highest(remainders, missing % whole.size()).indices) ++whole[i];
    return whole;
  }
  // Rounding errors made the sum too large: lower the numbers with the smallest remainders.
  std::vector<std::size_t> ranked(parts.size());
  std::iota(ranked.begin(), ranked.end(), std::size_t{0});
  std::ranges::sort(ranked, [&](std::size_t a, std::size_t b) {
    return remainders[a] < remainders[b] || (remainders[a] == remainders[b] && a > b);
  });
  for (std::size_t i = 0; sum > total; i = (i + 1) % ranked.size()) {
    std::size_t& one = whole[ranked[i]];
    if (one == 0) continue;
    --one;
    --sum;
  }
  return whole;
}

}  // namespace kvpolicy
