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
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/query_tile-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/stream-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

using kvpolicy::detail::KeyWidth;

/// The widths of the logits of Q queries, `apart` floats from each other, with keys that share a grid along the text.
template <std::size_t Q>
HWY_INLINE void channel_widths(const float* queries, std::size_t apart, const float16* scales,
                               const float16* zeros, std::size_t head_dim, KeyWidth* widths) {
  FloatVector reach[Q];
  FloatVector square[Q];
  FloatVector largest[Q];
  FloatVector size[Q];
  KVPOLICY_CPU_UNROLL
  for (std::size_t q = 0; q < Q; ++q) reach[q] = square[q] = largest[q] = size[q] = zero_vector();
  std::size_t channel = 0;
  for (; channel + lanes <= head_dim; channel += lanes) {
    const auto scale = load_half(scales + channel);
    const auto zero = hn::Abs(load_half(zeros + channel));
    const auto rounding =
        hn::MulAdd(zero, hn::Set(floats, KeyWidth::zero_error), hn::Set(floats, KeyWidth::smallest_error));
    const auto step = hn::MulAdd(scale, hn::Set(floats, KeyWidth::half_range), rounding);
    const auto most = hn::MulAdd(scale, hn::Set(floats, 15.0F), zero);
    KVPOLICY_CPU_UNROLL
    for (std::size_t q = 0; q < Q; ++q) {
      const auto number = hn::Abs(hn::LoadU(floats, queries + q * apart + channel));
      const auto change = hn::Mul(number, step);
      reach[q] = hn::Add(reach[q], change);
      square[q] = hn::MulAdd(change, change, square[q]);
      largest[q] = hn::Max(largest[q], hn::Mul(number, scale));
      size[q] = hn::MulAdd(number, most, size[q]);
    }
  }
  KVPOLICY_CPU_UNROLL
  for (std::size_t q = 0; q < Q; ++q) {
    float sums[4];
    store_sums(reach[q], square[q], size[q], zero_vector(), sums);
    widths[q] = {sums[0], sums[1], hn::GetLane(hn::MaxOfLanes(floats, largest[q])), sums[2]};
    for (std::size_t c = channel; c < head_dim; ++c) {
      widths[q].add(queries[q * apart + c], static_cast<float>(scales[c]), static_cast<float>(zeros[c]));
    }
  }
}

/// The same for one key, whose groups of neighbouring channels have grids of their own.
[[nodiscard]] inline KeyWidth row_width(const float* query, const float16* scales, const float16* zeros,
                                        std::size_t group, std::size_t head_dim) {
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

/// Turns the logits of a tile of queries with upper halves into bounds of units, one row tile after another.
class TileBounds {
 public:
  /// `queries` [tile.rows, width().keys], at most `most_queries`. `rounding`: of KeyWidth::slack.
  TileBounds(const QueryTile& tile, const float* queries, Certainty certainty, float rounding)
      : tile_{tile},
        queries_{queries},
        apart_{tile.width().keys},
        certainty_{certainty},
        rounding_{rounding} {}

  static constexpr std::size_t most_queries = 64;

  /// Adds the rows of a row tile, whose first is row `first` of the units; query m's begin at out + m * units.
  /// `logits` [queries, stride] have room for a vector after a query's last row, and are overwritten. `next` is the
  /// row tile after it, whose scales are prefetched.
  void add(const RowTile& row_tile, const RowTile& next, std::size_t first, float* logits, std::size_t stride,
           UnitBound* out, std::size_t units) {
    fetch_params(next.keys, next.rows, tile_.key_dim());
    const bool per_channel = row_tile.keys.format.granularity == Granularity::per_channel;
    // Rows that share a grid, whole row tiles mostly.
    for (std::size_t row = 0; row < row_tile.rows;) {
      std::size_t end = row + 1;
      while (per_channel && end < row_tile.rows && row_tile.keys.scales[end] == row_tile.keys.scales[row])
        ++end;
      std::array<KeyWidth, most_queries> widths;
      find_widths(row_tile, row, widths.data());
      for (std::size_t m = 0; m < tile_.rows; ++m) {
        const float slack = widths[m].slack(tile_.key_dim(), rounding_);
        add_rows(logits + m * stride, row, end, first, widths[m].width(certainty_, slack), slack,
                 out + m * units);
      }
      row = end;
    }
  }

 private:
  void find_widths(const RowTile& row_tile, std::size_t row, KeyWidth* widths) const {
    const RowFormat& format = row_tile.keys.format;
    KVPOLICY_ASSERT(format.codebook == Codebook::even);
    const float16* scales = row_tile.keys.scales[row];
    const float16* zeros = row_tile.keys.zeros[row];
    if (format.granularity == Granularity::per_token) {
      for (std::size_t m = 0; m < tile_.rows; ++m) {
        widths[m] = row_width(queries_ + m * apart_, scales, zeros, format.group, tile_.key_dim());
      }
      return;
    }
    for_each_portion<query_portion>(tile_.rows, [&]<std::size_t Q>(std::size_t m) KVPOLICY_CPU_LAMBDA {
      channel_widths<Q>(queries_ + m * apart_, apart_, scales, zeros, tile_.key_dim(), widths + m);
    });
  }

  // One query's rows [row, end) of a row tile.
  void add_rows(float* logits, std::size_t row, std::size_t end, std::size_t first, float width, float slack,
                UnitBound* out) const {
    const float error = tile_.softcap * kvpolicy::detail::cap_error;
    for (std::size_t i = row; i < end; ++i) logits[i] += width;
    if (tile_.softcap > 0.0F) {
      for (std::size_t i = row; i < end; i += lanes)
        cap_logits(tile_.softcap, logits + i, std::min(lanes, end - i), error);
      width += error;
    }
    if constexpr (lanes % bounded_unit == 0) {
      if ((first + row) % bounded_unit == 0) {
        for (; row + lanes <= end; row += lanes) {
          add_vector(logits + row, width, slack, out + (first + row) / bounded_unit);
        }
      }
    }
    while (row < end) {
      const std::size_t unit = (first + row) / bounded_unit;
      const std::size_t last = std::min((unit + 1) * bounded_unit - first, end);
      for (; row < last; ++row) kvpolicy::detail::add_bound(out[unit], logits[row], width, slack);
    }
  }

  // softcap * tanh(logit / softcap), and what that may be off by.
  static void cap_logits(float softcap, float* logits, std::size_t count, float error) {
    alignas(64) float capped[lanes];
    std::copy_n(logits, count, capped);
    std::fill(capped + count, capped + lanes, 0.0F);
    HWY_NAMESPACE::cap_logits(softcap, capped, lanes);
    for (std::size_t i = 0; i < count; ++i) logits[i] = capped[i] + error;
  }

  // A vector of rows that are whole units.
  static HWY_INLINE void add_vector(const float* bounds, float width, float slack, UnitBound* out) {
    const auto bound = hn::LoadU(floats, bounds);
    const auto highest =
        in_units(bound, [](auto a, auto b) KVPOLICY_CPU_INLINE_LAMBDA { return hn::Max(a, b); });
    const auto mass = in_units(exp_nonpositive(hn::Sub(bound, highest)),
                               [](auto a, auto b) KVPOLICY_CPU_INLINE_LAMBDA { return hn::Add(a, b); });
    alignas(64) float highest_of[lanes];
    alignas(64) float mass_of[lanes];
    hn::Store(highest, floats, highest_of);
    hn::Store(mass, floats, mass_of);
    for (std::size_t at = 0; at < lanes; at += bounded_unit, ++out) {
      UnitBound own{highest_of[at], mass_of[at], width, slack};
      if (!is_finite(own.mass) || !is_finite(own.highest)) {
        constexpr float unknown = std::numeric_limits<float>::quiet_NaN();
        own = {unknown, unknown, unknown, unknown};
      }
      *out = out->mass == 0.0F ? own : kvpolicy::detail::joined(*out, own);
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

  const QueryTile& tile_;
  const float* queries_;
  std::size_t apart_;
  Certainty certainty_;
  float rounding_;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
