// SPDX-License-Identifier: Apache-2.0
//
// How far a logit can be from what the upper half of its key says (Read::bounded). A key's upper half stands for the
// middle of the 16 codes that begin with it (PageLayout), so a channel is off by at most 7.5 of the key's own steps,
// and a logit by at most the sum of these times the query's channels. Boxes or balls around chunks of keys bound a
// logit as surely, but so loosely that nearly every row would have to be read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvpolicy/core/attention.hpp>

namespace kvpolicy::detail {

/// What some channels of a key add to the width of a logit; the channels of a key in any order and any parts.
struct KeyWidth {
  float reach = 0;    ///< sum of |query| times what a lower half can change, at most
  float square = 0;   ///< sum of its squares
  float largest = 0;  ///< largest |query| times the step of an upper half
  float size = 0;     ///< sum of |query| times the largest number that the channel's grid has

  /// Half the range of a lower half, in steps of the upper one.
  static constexpr float half_range = 7.5F / 16.0F;
  /// The zero of an upper grid is that of the whole one, moved and rounded to half (AffineGrid::upper_half).
  static constexpr float zero_error = 0x1.01p-11F;
  static constexpr float smallest_error = 0x1p-24F;  // where half has subnormal numbers

  /// One channel. `scale` and `zero` are those of the upper half's grid.
  void add(float query, float scale, float zero) {
    const float magnitude = std::abs(query);
    const float change = magnitude * (half_range * scale + zero_error * std::abs(zero) + smallest_error);
    reach += change;
    square += change * change;
    largest = std::max(largest, magnitude * scale);
    size += magnitude * (std::abs(zero) + 15.0F * scale);
  }

  /// What arithmetic may add. Engines may round a query, times the scales of keys, to 16 bits, or to as many as keep
  /// sums within 32 (cpu/integer_keys-inl.hpp); a code counts from the middle, so half a step of the query costs 8
  /// steps of an upper half at most, and as much for the whole code, whose steps are 16 times smaller. Otherwise
  /// a product is off by `rounding` of its size: numbers are floats, or two terms in bfloat16.
  [[nodiscard]] float slack(std::size_t head_dim, float rounding = 0x1p-13F) const {
    const auto channels = static_cast<float>(head_dim);
    const float steps = std::min(32767.0F, 2147483647.0F / (255.0F * channels));
    return channels * largest * 8.0F / (2.0F * steps) + rounding * size;
  }

  /// What lower halves and arithmetic can add.
  [[nodiscard]] float width(Certainty certainty, float arithmetic) const {
    switch (certainty) {
      case Certainty::sure: return reach + arithmetic;
      // A lower half that may be any of 16 has 255 / 12 of its squared steps as its variance, and reaches 7.5.
      case Certainty::four_sigma:
        return std::min(reach, 4.0F * std::sqrt(square * (255.0F / 12.0F / (7.5F * 7.5F)))) + arithmetic;
      case Certainty::none: break;
    }
    return 0.0F;
  }
};

/// What an engine's tanh may be off by: a bound that is capped has this much of the cap on top. A cap brings logits
/// no further apart, so widths hold for capped logits as well.
inline constexpr float cap_error = 0x1p-18F;

/// Two parts of a unit, of which either may be unknown.
[[nodiscard]] inline UnitBound joined(const UnitBound& a, const UnitBound& b) {
  if (!is_finite(a.mass) || !is_finite(b.mass)) return is_finite(a.mass) ? b : a;
  const float highest = std::max(a.highest, b.highest);
  return {highest, a.mass * std::exp(a.highest - highest) + b.mass * std::exp(b.highest - highest),
          std::max(a.width, b.width), std::max(a.slack, b.slack)};
}

/// Adds a row whose logit is at most `bound` to a unit that has rows or none (`mass` 0).
inline void add_bound(UnitBound& unit, float bound, float width, float slack) {
  constexpr float unknown = std::numeric_limits<float>::quiet_NaN();
  const UnitBound row =
      is_finite(bound) ? UnitBound{bound, 1.0F, width, slack} : UnitBound{unknown, unknown, unknown, unknown};
  unit = unit.mass == 0.0F ? row : joined(unit, row);
}

}  // namespace kvpolicy::detail
