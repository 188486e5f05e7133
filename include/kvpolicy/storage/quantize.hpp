// SPDX-License-Identifier: Apache-2.0
//
// Affine quantisation of a group of numbers to 2, 4 or 8 bits: x ~ scale * code + zero, with scale
// and zero in half, as KIVI (arXiv:2402.02750) has it. One difference: zero is the group's minimum
// rounded down and scale is rounded up, so that every number of the group lies inside the grid and
// none is off by more than scale / 2.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/dtype.hpp>

namespace kvpolicy {

/// Numbers beyond this may need a scale or zero that half cannot hold.
inline constexpr float largest_quantizable = half::largest;

namespace detail {

/// The next half towards -infinity (`up` false) or +infinity.
[[nodiscard]] inline half neighbour(half value, bool up) {
  const bool negative = (value.bits & 0x8000U) != 0;
  half next;
  if ((value.bits & 0x7fffU) == 0) {
    next.bits = up ? 0x0001U : 0x8001U;
  } else {
    next.bits = static_cast<std::uint16_t>(negative == up ? value.bits - 1U : value.bits + 1U);
  }
  return next;
}

/// The largest half that is not above `value`.
[[nodiscard]] inline half half_at_most(float value) {
  const half nearest{value};
  return static_cast<float>(nearest) > value ? neighbour(nearest, false) : nearest;
}

/// The smallest half that is not below `value`.
[[nodiscard]] inline half half_at_least(float value) {
  const half nearest{value};
  return static_cast<float>(nearest) < value ? neighbour(nearest, true) : nearest;
}

}  // namespace detail

/// The scale and the zero of one group of numbers.
struct AffineGrid {
  half scale;
  half zero;

  [[nodiscard]] static AffineGrid covering(float min, float max, Encoding encoding) {
    const auto levels = static_cast<float>((1U << bits_of(encoding)) - 1U);
    const half zero = detail::half_at_most(min);
    return {detail::half_at_least((max - static_cast<float>(zero)) / levels), zero};
  }

  /// The code nearest to `value`; 0 where that is no number. No caller's number gets here that is not
  /// finite, but a file's may (cache/saved_cache.hpp).
  [[nodiscard]] std::uint8_t encode(float value, Encoding encoding) const {
    const auto levels = static_cast<float>((1U << bits_of(encoding)) - 1U);
    const auto step = static_cast<float>(scale);
    if (step == 0.0F) return 0;  // every number of the group is `zero`
    const float code = std::nearbyint((value - static_cast<float>(zero)) / step);
    // Not std::clamp, which passes NaN on.
    return static_cast<std::uint8_t>(code > 0.0F ? std::min(code, levels) : 0.0F);
  }
};

}  // namespace kvpolicy
