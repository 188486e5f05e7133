// SPDX-License-Identifier: Apache-2.0
//
// Writes the results of the prefill kernel: directly to the caller's tensor or, if several blocks
// share a tile of queries, as partial states, which the last block to finish merges in the order of
// the text.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/partials.cuh>
#include <kvpolicy/cuda/kernels/prefill_item.cuh>
#include <kvpolicy/cuda/kernels/prefill_softmax.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>

namespace kvpolicy::gpu {

/// The destination of one query row's results.
struct RowTarget {
  int token;
  int head;

  KVPOLICY_DEVICE RowTarget(const PrefillItem& item, const QueryTile& queries, int row)
      : token{queries.token(row)}, head{item.kv_head * queries.group + queries.head(row)} {}

  KVPOLICY_DEVICE void write_log_sum_exp(const AttendParams& params, float* log_sum_exp, float value) const {
    log_sum_exp[static_cast<long long>(token) * params.state_heads() + head] = value;
  }
};

/// Normalises the warp's rows and writes them through its part of `staging`, 16 bytes at a time.
template <Element E, class Shape>
KVPOLICY_DEVICE void write_rows(const OutputTile<Shape>& output, const RowStates<Shape>& states,
                                const AttendParams& params, const PrefillItem& item, const QueryTile& queries,
                                int staging) {
  constexpr int HeadDim = Shape::head_dim;
  constexpr int rows = Shape::row_tiles * 2;  // of a lane
  float factor[rows] = {};
  KVPOLICY_NO_UNROLL
  for (int i = 0; i < rows; ++i) {  // one by one, because what finishes a row is long
    PartialState state = states.of(0, 0);
    KVPOLICY_UNROLL
    for (int j = 1; j < rows; ++j) state = i == j ? states.of(j / 2, j % 2) : state;
    const int row = query_row<Shape>(i / 2, i % 2);
    const RowTarget target{item, queries, row};
    const FinishedRow finished = finish_row(
        state, params.attention_sink_bias == nullptr ? nullptr : params.attention_sink_bias + target.head);
    if (item.log_sum_exp != nullptr && lane_index() % 4 == 0 && row < queries.rows) {
      target.write_log_sum_exp(params, item.log_sum_exp, finished.log_sum_exp);
    }
    KVPOLICY_UNROLL
    for (int j = 0; j < rows; ++j) factor[j] = i == j ? finished.factor : factor[j];
  }
  KVPOLICY_UNROLL
  for (int i = 0; i < rows; ++i) {
    const typename Shape::Chunk place{staging, query_row<Shape>(i / 2, i % 2), 0};
    KVPOLICY_UNROLL
    for (int n = 0; n < HeadDim / 8; ++n) {
      const float* pair = output.at[i / 2][n] + i % 2 * 2;
      auto* chunk = reinterpret_cast<std::uint32_t*>(place.plus(0, n));
      chunk[lane_index() % 4] = pack<E>(pair[0] * factor[i], pair[1] * factor[i]);
    }
  }
  sync_warp();
  KVPOLICY_NO_UNROLL
  for (int i = lane_index(); i < Shape::warp_rows * Shape::chunks; i += warp_lanes) {
    const int row = warp_index() * Shape::warp_rows + i / Shape::chunks;
    const int chunk = i % Shape::chunks;
    if (row >= queries.rows) break;
    const RowTarget target{item, queries, row};
    *reinterpret_cast<Words4*>(
        params.out.row(item.tokens.sequence, item.tokens.first + target.token, target.head) + chunk * 8) =
        *reinterpret_cast<const Words4*>(tile_chunk<Shape>(staging, row, chunk));
  }
}

/// Stores the warp's rows, not normalised, in the block's slot of the workspace.
template <class Shape>
KVPOLICY_DEVICE void share_rows(const OutputTile<Shape>& output, const RowStates<Shape>& states,
                                const AttendParams& params, const PrefillItem& item,
                                const QueryTile& queries) {
  constexpr int HeadDim = Shape::head_dim;
  const long long slot = static_cast<long long>(item.index) * params.splits + item.split;
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = query_row<Shape>(m, half);
      if (row >= queries.rows) continue;
      const long long column = slot * Shape::query_rows + row;
      if (lane_index() % 4 == 0) params.workspace.states[column] = states.of(m, half);
      float* values = params.workspace.values + column * HeadDim + lane_index() % 4 * 2;
      KVPOLICY_UNROLL
      for (int n = 0; n < HeadDim / 8; ++n) {
        const float* pair = output.at[m][n] + half * 2;
        *reinterpret_cast<Words2*>(values + n * 8) = Words2{{bits_of_float(pair[0]), bits_of_float(pair[1])}};
      }
    }
  }
}

/// Merges the partial states of the item's blocks, when the last of them has stored its rows.
template <Element E, class Shape>
KVPOLICY_DEVICE void merge_rows(const AttendParams& params, const PrefillItem& item,
                                const QueryTile& queries) {
  constexpr int HeadDim = Shape::head_dim;
  constexpr int parts_of_row = HeadDim / 4;
  const TilePartials partials{params.workspace, static_cast<long long>(item.index) * params.splits,
                              params.splits};
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < queries.rows * parts_of_row; i += Shape::multiplying_threads) {
    const int row = i / parts_of_row;
    const int channel = i % parts_of_row * 4;
    const MergedValues all = merge_partials<Shape::query_rows, HeadDim>(partials, row, channel);
    const RowTarget target{item, queries, row};
    const FinishedRow finished = finish_row(all.state, params.attention_sink_bias == nullptr
                                                           ? nullptr
                                                           : params.attention_sink_bias + target.head);
    if (item.log_sum_exp != nullptr && channel == 0) {
      target.write_log_sum_exp(params, item.log_sum_exp, finished.log_sum_exp);
    }
    *reinterpret_cast<Words2*>(
        params.out.row(item.tokens.sequence, item.tokens.first + target.token, target.head) + channel) =
        Words2{{pack<E>(all.value[0] * finished.factor, all.value[1] * finished.factor),
                pack<E>(all.value[2] * finished.factor, all.value[3] * finished.factor)}};
  }
}

}  // namespace kvpolicy::gpu
