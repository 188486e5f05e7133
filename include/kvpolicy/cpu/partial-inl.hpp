// SPDX-License-Identifier: Apache-2.0
//
// Attention of a query tile over some of the rows: one SoftmaxState and unnormalised values per query,
// stored in arrays that kernels fill.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/cpu/hadamard-inl.hpp>
#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/query_tile-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// The arrays of a tile's queries; `rows` includes padding that kernels may write to.
struct Partial {
  float* max;     // [rows]
  float* sum;     // [rows]
  float* values;  // [rows, width]: padded channels

  [[nodiscard]] static std::size_t floats(std::size_t rows, std::size_t width) { return rows * (2 + width); }
  Partial(float* memory, std::size_t rows) : max{memory}, sum{memory + rows}, values{memory + 2 * rows} {}

  void clear(std::size_t rows, std::size_t width) const {
    std::fill_n(max, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, rows, 0.0F);
    std::fill_n(values, rows * width, 0.0F);
  }
  [[nodiscard]] SoftmaxState state(std::size_t m) const { return {max[m], sum[m]}; }

  /// Rotates the values of each query, or rotates them back (core/hadamard.hpp).
  void rotate_values(std::size_t rows, std::size_t channels) const {
    rotate_rows(values, rows, padded_channels(channels), channels);
  }

  /// Merges another partial result of the same tile into this one.
  void merge_with(const Partial& part, std::size_t rows, std::size_t width) const {
    for (std::size_t m = 0; m < rows; ++m) {
      SoftmaxState total = state(m);
      merge(total, {values + m * width, width}, part.state(m), {part.values + m * width, width});
      max[m] = total.max;
      sum[m] = total.sum;
    }
  }

  /// Writes the tile's outputs; the values are normalised in place.
  void finish(const LayerAttention& work, const QueryTile& tile) const {
    const std::size_t width = tile.width().values;
    const AttendOptions& options = work.options;
    for (std::size_t m = 0; m < tile.rows; ++m) {
      const std::span<float> own{values + m * width, tile.value_dim};
      const std::size_t token = tile.token(m);
      const std::size_t head = tile.head(m);
      SoftmaxState total = state(m);
      if (!options.attention_sink_bias.empty()) {
        const SoftmaxState sink{options.attention_sink_bias[head], 1.0F};
        const float top = std::max(total.max, sink.max);
        const float keep = rescale_factor(total.max, top);
        for (float& value : own) value *= keep;
        total = {top, total.sum * keep + rescale_factor(sink.max, top)};
      }
      normalize(total, own);
      store_dense(work.out.encoding, own, work.out.row(token, head));
      if (!options.log_sum_exp.empty()) {
        options.log_sum_exp[token * work.queries.heads + head] = total.log_sum_exp();
      }
    }
  }
};

/// exp(logit - max) if one of them is not finite: a logit of -infinity gives weight 0, infinite logits get
/// equal weights, and NaN stays NaN.
[[nodiscard]] inline float special_weight(float logit, float max) {
  if (logit == -std::numeric_limits<float>::infinity()) return 0.0F;
  return rescale_factor(logit, max);
}

/// values += weights x rows of the row tile, row by row, only for the queries that see the row. It is for
/// row tiles with infinite values or NaN: a weight of zero does not hide those, so no weight may be
/// multiplied with a row that its query does not see. `rows` is [rows of the row tile, width of values].
inline void add_seen_values(const QueryTile& tile, const RowTile& row_tile, const float* rows,
                            const float* weights, std::size_t query_stride, std::size_t row_stride,
                            float* values) {
  const std::size_t width = tile.width().values;
  for (std::size_t row = 0; row < row_tile.rows; ++row) {
    row_tile.for_each_seeing(tile, row, [&](const QueryTile::Range& seeing) {
      for (std::size_t m = seeing.begin; m < seeing.end; ++m) {
        const float weight = weights[m * query_stride + row * row_stride];
        for (std::size_t channel = 0; channel < width; ++channel) {
          values[m * width + channel] += weight * rows[row * width + channel];
        }
      }
    });
  }
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
