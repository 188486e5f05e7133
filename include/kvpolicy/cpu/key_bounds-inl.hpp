// SPDX-License-Identifier: Apache-2.0
//
// Bounds of logits by the upper halves of keys, one row tile at a time (core/key_width.hpp says what is added up).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include <kvpolicy/core/key_width.hpp>
#include <kvpolicy/cpu/query_tile-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/stream-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

using kvpolicy::detail::KeyWidth;

/// The width of a query's logits with keys that share this grid along the text.
[[nodiscard]] inline KeyWidth channel_widths(const float* query, const half* scales, const half* zeros,
                                             std::size_t head_dim) {
  auto reach = zero_vector();
  auto square = zero_vector();
  auto largest = zero_vector();
  auto size = zero_vector();
  std::size_t channel = 0;
  for (; channel + lanes <= head_dim; channel += lanes) {
    const auto number = hn::Abs(hn::LoadU(floats, query + channel));
    const auto scale = load_half(scales + channel);
    const auto zero = hn::Abs(load_half(zeros + channel));
    auto change = hn::MulAdd(zero, hn::Set(floats, KeyWidth::zero_error), hn::Set(floats, KeyWidth::smallest_error));
    change = hn::Mul(number, hn::MulAdd(scale, hn::Set(floats, KeyWidth::half_range), change));
    reach = hn::Add(reach, change);
    square = hn::MulAdd(change, change, square);
    largest = hn::Max(largest, hn::Mul(number, scale));
    size = hn::MulAdd(number, hn::MulAdd(scale, hn::Set(floats, 15.0F), zero), size);
  }
  KeyWidth sum{hn::GetLane(hn::SumOfLanes(floats, reach)), hn::GetLane(hn::SumOfLanes(floats, square)),
               hn::GetLane(hn::MaxOfLanes(floats, largest)), hn::GetLane(hn::SumOfLanes(floats, size))};
  for (; channel < head_dim; ++channel) {
    sum.add(query[channel], static_cast<float>(scales[channel]), static_cast<float>(zeros[channel]));
  }
  return sum;
}

/// The same for one key, whose groups of neighbouring channels have grids of their own.
[[nodiscard]] inline KeyWidth row_width(const float* query, const half* scales, const half* zeros, std::size_t group,
                                        std::size_t head_dim) {
  KeyWidth sum;
  float largest = 0.0F;
  float step = 0.0F;
  for (std::size_t first = 0; first < head_dim; first += group, ++scales, ++zeros) {
    const float scale = static_cast<float>(*scales);
    const float zero = static_cast<float>(*zeros);
    for (std::size_t c = first; c < first + group; ++c) {
      sum.add(query[c], scale, zero);
      largest = std::max(largest, std::abs(query[c]));
    }
    step = std::max(step, scale);
  }
  sum.largest = largest * step;  // one rounding may serve all groups
  return sum;
}

/// Bounds for one query, tile after tile: from its logits to units.
class QueryBounds {
 public:
  QueryBounds(Certainty certainty, float softcap, std::size_t head_dim)
      : certainty_{certainty}, softcap_{softcap}, head_dim_{head_dim} {}

  /// Adds the rows of a row tile, whose first is row `first` of the units `out`. `logits` has room for a vector behind
  /// the last row, and is overwritten.
  void add(const RowTile& row_tile, std::size_t first, const float* query, float* logits, UnitBound* out) {
    widen(row_tile, query, logits);
    if (softcap_ > 0.0F) cap(row_tile.rows, logits);
    std::size_t row = 0;
    if constexpr (lanes >= bounded_unit) {
      if (first % bounded_unit == 0) {
        for (; row + lanes <= row_tile.rows; row += lanes) add_vector(row, logits, out + (first + row) / bounded_unit);
      }
    }
    while (row < row_tile.rows) {
      const std::size_t unit = (first + row) / bounded_unit;
      const std::size_t end = std::min((unit + 1) * bounded_unit - first, row_tile.rows);
      add_rows(row, end, logits, out[unit]);
      row = end;
    }
  }

 private:
  // Logits become bounds; notes the width and the slack of each row.
  void widen(const RowTile& row_tile, const float* query, float* logits) {
    const RowFormat& format = row_tile.keys.format;
    const bool per_channel = format.granularity == Granularity::per_channel;
    widths_vary_ = !per_channel || format.group % bounded_unit != 0 || row_tile.segment->keys.first_row % bounded_unit != 0;
    for (std::size_t row = 0; row < row_tile.rows;) {
      const half* scales = row_tile.keys.scales[row];
      const half* zeros = row_tile.keys.zeros[row];
      const KeyWidth parts = per_channel ? channel_widths(query, scales, zeros, head_dim_)
                                         : row_width(query, scales, zeros, format.group, head_dim_);
      const float slack = parts.slack(head_dim_);
      const float width = parts.width(certainty_, slack);
      std::size_t end = row + 1;
      while (per_channel && end < row_tile.rows && row_tile.keys.scales[end] == scales) ++end;
      for (; row < end; ++row) {
        logits[row] += width;
        widths_[row] = width;
        slacks_[row] = slack;
      }
    }
  }

  void cap(std::size_t rows, float* logits) {
    cap_logits(softcap_, logits, rows);
    const float error = softcap_ * kvpolicy::detail::cap_error;
    for (std::size_t row = 0; row < rows; ++row) {
      logits[row] += error;
      widths_[row] += error;
    }
  }

  // A vector of rows that are whole units.
  void add_vector(std::size_t row, const float* bounds, UnitBound* out) {
    const auto bound = hn::LoadU(floats, bounds + row);
    const auto highest = in_units(bound, [](auto a, auto b) KVPOLICY_CPU_INLINE_LAMBDA { return hn::Max(a, b); });
    const auto mass = in_units(exp_nonpositive(hn::Sub(bound, highest)),
                               [](auto a, auto b) KVPOLICY_CPU_INLINE_LAMBDA { return hn::Add(a, b); });
    alignas(64) float highest_of[lanes];
    alignas(64) float mass_of[lanes];
    hn::Store(highest, floats, highest_of);
    hn::Store(mass, floats, mass_of);
    for (std::size_t at = 0; at < lanes; at += bounded_unit) {
      UnitBound own{highest_of[at], mass_of[at], widths_[row + at], slacks_[row + at]};
      for (std::size_t i = row + at + 1; i < row + at + bounded_unit && widths_vary_; ++i) widen_to(own, i);
      set(own, out[at / bounded_unit]);
    }
  }
  // In every lane, its unit's lanes joined.
  template <class Join>
  [[nodiscard]] static HWY_INLINE FloatVector in_units(FloatVector x, Join join) {
    static_assert(bounded_unit == 8);
    x = join(x, hn::Reverse2(floats, x));
    x = join(x, hn::Reverse4(floats, x));
    if constexpr (lanes >= 8) x = join(x, hn::Reverse8(floats, x));
    return x;
  }

  void add_rows(std::size_t row, std::size_t end, const float* bounds, UnitBound& unit) {
    UnitBound own{bounds[row], 0.0F, widths_[row], slacks_[row]};
    for (std::size_t i = row + 1; i < end; ++i) {
      own.highest = std::max(own.highest, bounds[i]);
      widen_to(own, i);
    }
    alignas(64) std::array<float, bounded_unit + lanes> away;
    for (std::size_t i = row; i < end; ++i) away[i - row] = bounds[i] - own.highest;
    std::fill(away.begin() + static_cast<std::ptrdiff_t>(end - row), away.end(),
              -std::numeric_limits<float>::infinity());
    auto sum = zero_vector();
    for (std::size_t i = 0; i < bounded_unit; i += lanes) {
      sum = hn::Add(sum, exp_nonpositive(hn::LoadU(floats, away.data() + i)));
    }
    own.mass = hn::GetLane(hn::SumOfLanes(floats, sum));
    set(own, unit);
  }

  void widen_to(UnitBound& unit, std::size_t row) const {
    unit.width = std::max(unit.width, widths_[row]);
    unit.slack = std::max(unit.slack, slacks_[row]);
  }
  static void set(UnitBound own, UnitBound& unit) {
    if (!is_finite(own.mass) || !is_finite(own.highest)) {
      constexpr float unknown = std::numeric_limits<float>::quiet_NaN();
      own = {unknown, unknown, unknown, unknown};
    }
    unit = unit.mass == 0.0F ? own : kvpolicy::detail::joined(unit, own);
  }

  Certainty certainty_;
  float softcap_;
  std::size_t head_dim_;
  bool widths_vary_ = true;
  alignas(64) std::array<float, max_tile_rows> widths_;
  alignas(64) std::array<float, max_tile_rows> slacks_;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
