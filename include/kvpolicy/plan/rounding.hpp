// SPDX-License-Identifier: Apache-2.0
//
// Rounding as Python, numpy and torch do it, whatever the floating-point environment says.
#pragma once

#include <cmath>
#include <cstddef>

namespace kvpolicy {

/// To the nearest whole number, halves to the even one. `value` is not negative.
[[nodiscard]] inline std::size_t round_half_even(double value) {
  const double floor = std::floor(value);
  const auto whole = static_cast<std::size_t>(floor);
  const double rest = value - floor;
  return rest > 0.5 || (rest == 0.5 && whole % 2 == 1) ? whole + 1 : whole;
}

}  // namespace kvpolicy
