// SPDX-License-Identifier: Apache-2.0
//
// The queries of a prefill kernel's tile, in shared memory: copied there, and turned for sinks that seem to stand
// before the window.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Loads the warp's rows of q to its part of the shared tile; rows after the last one become zeros.
template <class Shape>
KVPOLICY_DEVICE void copy_queries(int tile, const Tensor& q, const PrefillItem& item,
                                  const QueryTile& queries) {
  for (int i = lane_index(); i < Shape::warp_rows * Shape::chunks; i += warp_lanes) {
    const int row = warp_index() * Shape::warp_rows + i / Shape::chunks;
    const int chunk = i % Shape::chunks;
    const int head = item.kv_head * queries.group + queries.head(row);
    cp_async_16(tile_chunk<Shape>(tile, row, chunk),
                q.row(item.tokens.sequence, item.tokens.first + queries.token(row), head) + chunk * 8,
                row < queries.rows);
  }
}

/// Rotates the warp's queries for a rotated segment, to position min(t, limit).
template <Element E, class Shape>
KVPOLICY_DEVICE void rotate_queries(int tile, const HeadView& head, const QueryTile& queries) {
  constexpr int pairs = Shape::head_dim / 2;
  const int end = smaller((warp_index() + 1) * Shape::warp_rows, queries.rows);
  KVPOLICY_NO_UNROLL
  for (int row = warp_index() * Shape::warp_rows; row < end; ++row) {
    const int turn = head.rotation_limit - queries.position(row);
    if (turn >= 0) continue;
    KVPOLICY_NO_UNROLL
    for (int pair = lane_index(); pair < pairs; pair += warp_lanes) {
      float sine, cosine;
      sine_cosine(static_cast<double>(turn) * static_cast<double>(head.inverse_frequencies[pair]), sine,
                  cosine);
      auto* low = reinterpret_cast<std::uint16_t*>(tile_chunk<Shape>(tile, row, pair / 8)) + pair % 8;
      auto* high = reinterpret_cast<std::uint16_t*>(tile_chunk<Shape>(tile, row, (pair + pairs) / 8)) +
                   (pair + pairs) % 8;
      const float a = to_float<E>(*low);
      const float b = to_float<E>(*high);
      *low = from_float<E>(a * cosine - b * sine);
      *high = from_float<E>(b * cosine + a * sine);
    }
  }
}

}  // namespace kvpolicy::gpu
