// SPDX-License-Identifier: Apache-2.0
//
// Affine quantisation of a group of numbers to 2 to 8 bits: x ~ scale * code + zero, with scale
// and zero in half, as KIVI (arXiv:2402.02750) has it. One difference: zero is the group's minimum
// rounded down and scale is rounded up, so that every number of the group lies inside the grid and
// none is off by more than scale / 2.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/quantizable.hpp>

namespace kvpolicy {

namespace detail {

/// The next half towards -infinity (`up` false) or +infinity.
[[nodiscard]] inline float16 neighbour(float16 value, bool up) {
  const bool negative = (value.bits & 0x8000U) != 0;
  float16 next;
  if ((value.bits & 0x7fffU) == 0) {
    next.bits = up ? 0x0001U : 0x8001U;
  } else {
    next.bits = static_cast<std::uint16_t>(negative == up ? value.bits - 1U : value.bits + 1U);
  }
  return next;
}

/// The multiple of `step` on `zero` that is nearest to `value`, from 0 to `levels`. Rounds by adding
/// a number whose sum has no room for fractions: nothing here depends on a mode, and all of it has
/// instructions for vectors.
[[nodiscard]] inline std::uint8_t nearest_code(float value, float step, float zero, float levels) {
  const float code = (value - zero) / step;
  // Neither std::clamp nor std::min: those pass NaN on. A step of 0: every number is `zero`.
  const float above = step > 0.0F && code > 0.0F ? code : 0.0F;
  const float bounded = above < levels ? above : levels;
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(bounded + 0x1p23F));
}

/// The largest half that is not above `value`.
[[nodiscard]] inline float16 half_at_most(float value) {
  const float16 nearest{value};
  return static_cast<float>(nearest) > value ? neighbour(nearest, false) : nearest;
}

/// The smallest half that is not below `value`.
[[nodiscard]] inline float16 half_at_least(float value) {
  const float16 nearest{value};
  return static_cast<float>(nearest) < value ? neighbour(nearest, true) : nearest;
}

/// The same number, but 0 for -0: what is stored must not depend on which of two equal numbers came
/// first.
[[nodiscard]] inline float16 without_negative_zero(float16 value) {
  return value.bits == 0x8000U ? float16{} : value;
}

}  // namespace detail

/// The scale and the zero of one group of numbers.
struct AffineGrid {
  float16 scale;
  float16 zero;

  [[nodiscard]] static AffineGrid covering(float min, float max, Encoding encoding) {
    const auto levels = static_cast<float>((1U << bits_of(encoding)) - 1U);
    const float16 zero = detail::without_negative_zero(detail::half_at_most(min));
    const float16 scale = detail::half_at_least((max - static_cast<float>(zero)) / levels);
    return {detail::without_negative_zero(scale), zero};
  }

  /// The grid of the upper 4 of this grid's 8 bits: each of its codes stands for the middle of the 16 that begin with
  /// it.
  [[nodiscard]] AffineGrid upper_half() const {
    const float step = static_cast<float>(scale);
    return {float16{16.0F * step},
            detail::without_negative_zero(float16{static_cast<float>(zero) + 7.5F * step})};
  }

  /// The code nearest to `value`, the even one where two are; 0 where that is no number. No caller's
  /// number gets here that is not finite, but a file's may (cache/saved_cache.hpp).
  [[nodiscard]] std::uint8_t encode(float value, Encoding encoding) const {
    const auto levels = static_cast<float>((1U << bits_of(encoding)) - 1U);
    return detail::nearest_code(value, static_cast<float>(scale), static_cast<float>(zero), levels);
  }
};

/// The grids of a row's numbers, one for each however many share it: rows are encoded in loops that
/// compilers turn into vectors.
class GridRow {
 public:
  /// @throws std::bad_alloc
  void resize(std::size_t numbers) {
    steps_.resize(numbers);
    zeros_.resize(numbers);
  }

  /// One for the numbers [first, first + group.size()): over their range. They are finite.
  AffineGrid cover(std::span<const float> group, std::size_t first, Encoding encoding) {
    constexpr std::size_t lanes = 16;
    float min[lanes];
    float max[lanes];
    std::fill_n(min, lanes, group[0]);
    std::fill_n(max, lanes, group[0]);
    std::size_t at = 0;
    for (; at + lanes <= group.size(); at += lanes) widen(group.subspan(at, lanes), min, max);
    widen(group.subspan(at), min, max);
    const auto grid = AffineGrid::covering(*std::min_element(min, min + lanes),
                                           *std::max_element(max, max + lanes), encoding);
    std::fill_n(steps_.begin() + static_cast<std::ptrdiff_t>(first), group.size(),
                static_cast<float>(grid.scale));
    std::fill_n(zeros_.begin() + static_cast<std::ptrdiff_t>(first), group.size(),
                static_cast<float>(grid.zero));
    return grid;
  }

  /// One for each column of `rows` [count, numbers], written to scales and zeros [numbers].
  void cover_columns(std::span<const float> rows, Encoding encoding, float16* scales, float16* zeros) {
    const std::size_t numbers = steps_.size();
    std::copy_n(rows.begin(), numbers, zeros_.begin());  // the least until now
    std::copy_n(rows.begin(), numbers, steps_.begin());  // the largest
    for (std::size_t at = numbers; at < rows.size(); at += numbers) {
      widen(rows.subspan(at, numbers), zeros_.data(), steps_.data());
    }
    for (std::size_t i = 0; i < numbers; ++i) {
      const auto grid = AffineGrid::covering(zeros_[i], steps_[i], encoding);
      steps_[i] = static_cast<float>(scales[i] = grid.scale);
      zeros_[i] = static_cast<float>(zeros[i] = grid.zero);
    }
  }

  /// Writes the codes of a row's numbers to `codes`, and their lower parts, if they have any, to `lower` (PageLayout).
  void encode(std::span<const float> numbers, Encoding encoding, std::byte* codes, std::byte* lower) const {
    const auto levels = static_cast<float>((1U << bits_of(encoding)) - 1U);
    // Writes the bits of each code from bit `dropped` on, `bits` of them.
    const auto write = [&](std::byte* to, std::size_t bits, std::size_t dropped) {
      const std::size_t bytes = numbers.size() * bits / 8;
      const auto mask = static_cast<unsigned>((1U << bits) - 1U);
      std::fill_n(to, bytes, std::byte{0});
      for (std::size_t first = 0; first < numbers.size(); first += bytes) {
        const float* values = numbers.data() + first;
        const float* steps = steps_.data() + first;
        const float* zeros = zeros_.data() + first;
        const std::size_t shift = first / bytes * bits;
        for (std::size_t i = 0; i < bytes; ++i) {
          const unsigned code = detail::nearest_code(values[i], steps[i], zeros[i], levels);
          to[i] |= static_cast<std::byte>((code >> dropped & mask) << shift);
        }
      }
    };
    const CodeParts parts = code_parts(encoding);
    write(codes, parts.upper, parts.lower);
    if (parts.lower > 0) write(lower, parts.lower, 0);
  }

 private:
  static void widen(std::span<const float> numbers, float* min, float* max) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      min[i] = numbers[i] < min[i] ? numbers[i] : min[i];
      max[i] = numbers[i] > max[i] ? numbers[i] : max[i];
    }
  }

  std::vector<float> steps_;  // scales, in float
  std::vector<float> zeros_;
};

}  // namespace kvpolicy
