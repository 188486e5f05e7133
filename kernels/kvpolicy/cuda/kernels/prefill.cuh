// SPDX-License-Identifier: Apache-2.0
//
// Attention of many queries over the segments of every KV head, in one launch: for prompts, prefill
// chunks, and all calls with too many query rows for decode.cuh.
//
// A block takes a tile of query rows of one KV head and reads only tiles of keys that some of its
// queries see: the causal end, the window and the gap after the sinks are loop bounds, not tests.
// The online softmax is that of FlashAttention-2 (Dao, arXiv:2307.08691): keys and values stream
// through shared memory, and logits and probabilities stay in registers. The longest work comes
// first. With `splits` several blocks share a tile of queries, and the last of them to finish
// merges.
//
// Rows of q, k, v and out must be aligned to 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/prefill_item.cuh>
#include <kvpolicy/cuda/kernels/prefill_output.cuh>
#include <kvpolicy/cuda/kernels/prefill_packed.cuh>
#include <kvpolicy/cuda/kernels/prefill_queries.cuh>
#include <kvpolicy/cuda/kernels/prefill_softmax.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Dynamic shared memory of a block.
template <int HeadDim>
constexpr std::size_t prefill_shared_bytes() {
  constexpr std::size_t bytes = PrefillShape<HeadDim>::tiles_bytes + sizeof(PrefillNotes);
  // Two blocks on a multiprocessor of an A100, each with 1 KiB of the system's.
  static_assert(2 * (bytes + 1024) <= 164 * 1024);
  return bytes;
}

/// Rotates the warp's queries for keys that were rotated before they were quantised.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void rotate_queries_hadamard(int tile) {
  using Shape = PrefillShape<HeadDim>;
  constexpr int rows_at_once = warp_lanes / Shape::chunks;
  KVPOLICY_NO_UNROLL
  for (int i = 0; i < Shape::warp_rows; i += rows_at_once) {
    const int row = warp_index() * Shape::warp_rows + i + lane_index() / Shape::chunks;
    auto* place = reinterpret_cast<Words4*>(tile_chunk<Shape>(tile, row, lane_index() % Shape::chunks));
    Words4 words = *place;
    float x[8];
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) {
      x[j] = to_float<E>(static_cast<std::uint16_t>(words.word[j / 2] >> j % 2 * 16));
    }
    rotate_vectors<HeadDim>(x);
    KVPOLICY_UNROLL
    for (int j = 0; j < 4; ++j) words.word[j] = pack<E>(x[2 * j], x[2 * j + 1]);
    *place = words;
  }
}

/// Computes the unscaled logits of the warp's query rows with a tile of keys.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void multiply_keys(LogitTile<PrefillShape<HeadDim>>& logits, int queries, int keys) {
  using Shape = PrefillShape<HeadDim>;
  // Channels of one iteration of the outer loop, which is not unrolled: with changing addresses the
  // compiler keeps few of them in registers; with constant ones it would keep all of them and
  // spill.
  constexpr int channels = Shape::swizzled ? 64 : HeadDim;
  const int lane = lane_index();
  ChunkRow<HeadDim> query{queries, warp_index() * Shape::warp_rows + lane % 16, lane / 16};
  ChunkRow<HeadDim> key{keys, lane / 16 * 8 + lane % 8, lane / 8 % 2};
  logits.clear();
  KVPOLICY_NO_UNROLL
  for (int channel = 0; channel < HeadDim; channel += channels) {
    KVPOLICY_UNROLL
    for (int step = 0; step < channels / 16; ++step) {
      std::uint32_t q[Shape::row_tiles][4];
      KVPOLICY_UNROLL
      for (int m = 0; m < Shape::row_tiles; ++m) load_matrix_x4(q[m], query.plus(m * 16, step * 2));
      KVPOLICY_UNROLL
      for (int n = 0; n < Shape::key_rows / 8; n += 2) {
        std::uint32_t k[4];
        load_matrix_x4(k, key.plus(n * 8, step * 2));
        KVPOLICY_UNROLL
        for (int m = 0; m < Shape::row_tiles; ++m) {
          multiply_add<E>(logits.at[m][n], q[m], k[0], k[1]);
          multiply_add<E>(logits.at[m][n + 1], q[m], k[2], k[3]);
        }
      }
    }
    query.offset += channels * 2;
    key.offset += channels * 2;
  }
}

/// Adds a tile of values, multiplied by their weights.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void multiply_values(OutputTile<PrefillShape<HeadDim>>& output,
                                     const WeightTile<PrefillShape<HeadDim>>& weights, int values) {
  using Shape = PrefillShape<HeadDim>;
  const int lane = lane_index();
  const ChunkRow<HeadDim> value{values, lane % 16, lane / 16};
  KVPOLICY_UNROLL
  for (int step = 0; step < Shape::key_rows / 16; ++step) {
    KVPOLICY_UNROLL
    for (int n = 0; n < HeadDim / 8; n += 2) {
      std::uint32_t v[4];
      load_matrix_x4_transposed(v, value.plus(step * 16, n));
      KVPOLICY_UNROLL
      for (int m = 0; m < Shape::row_tiles; ++m) {
        multiply_add<E>(output.at[m][n], weights.at[m][step], v[0], v[1]);
        multiply_add<E>(output.at[m][n + 1], weights.at[m][step], v[2], v[3]);
      }
    }
  }
}

/// Grid: prefill_items<PrefillShape<HeadDim>>(params) * params.splits blocks, of a ragged call as many as all its
/// sequences have, of prefill_threads threads. `Packed`: some head may have quantised rows.
template <Element E, int HeadDim, bool Packed>
KVPOLICY_KERNEL(prefill_threads, 2)
prefill_kernel(const KVPOLICY_GRID_CONSTANT AttendParams params) {
  wait_for_kernel_before();
  using Shape = PrefillShape<HeadDim>;
  constexpr int query_memory = 0;  // offset of the queries' tile in shared memory
  auto& notes = *reinterpret_cast<PrefillNotes*>(shared_memory() + Shape::tiles_bytes);
  if (!find_item<Shape>(params, shared_memory(), notes.item, notes.queries, notes.live)) return;
  const PrefillItem& item = notes.item;
  const QueryTile& queries = notes.queries;
  const LiveTiles& live = notes.live;

  // This block's share of the item's tiles.
  const long long all = live.tiles;
  const int first = static_cast<int>(all * item.split / params.splits);
  int left = static_cast<int>(all * (item.split + 1) / params.splits) - first;

  OutputTile<Shape> output;
  output.clear();
  RowStates<Shape> states;
  const LogitScale scale{params};

  if (left > 0) {
    TileCursor cursor{live, first};
    TileRing<HeadDim> ring;
    TileLoader<E, HeadDim, Packed> loader{params, item, live};
    QueryForm form = QueryForm::plain;
    // Whether the output is that of rotated values. It is rotated where rows of the other kind come.
    bool rotated_output = live.segment[cursor.segment].rotated_values;
    // One group of copies for each tile of keys and of values, even if it is empty, so that waiting
    // for all groups but the latest always waits for the tile that is needed next.
    loader.find(cursor);
    copy_queries<Shape>(query_memory, params.q, item, queries);
    loader.load_keys(ring.keys(), cursor);
    cp_async_commit();
    loader.load_values(ring.values(), cursor);
    cp_async_commit();
    loader.find(cursor.next(live));

    KVPOLICY_NO_UNROLL
    for (; left > 0; --left) {
      cp_async_wait<1>();
      sync_block();  // the keys have arrived, and no thread reads the spare tile any more
      if (left > 1) loader.load_keys(ring.spare(), cursor.next(live));
      cp_async_commit();

      const LiveSegment& segment = live.segment[cursor.segment];
      if (const QueryForm needed = segment.queries; needed != form) {
        if (form != QueryForm::plain) {
          copy_queries<Shape>(query_memory, params.q, item, queries);
          cp_async_commit();
          cp_async_wait<0>();
          sync_warp();
        }
        if (needed == QueryForm::turned) rotate_queries<E, Shape>(query_memory, item.head, queries);
        if constexpr (Packed) {
          if (needed == QueryForm::hadamard) rotate_queries_hadamard<E, HeadDim>(query_memory);
        }
        form = needed;
        sync_warp();
      }
      LogitTile<Shape> logits;
      multiply_keys<E, HeadDim>(logits, query_memory, ring.keys());
      scale.prepare(logits);
      if (segment.cuts(cursor.tile)) {
        hide<Shape>(logits, segment, cursor.tile, queries, item.request);
      }
      WeightTile<Shape> weights;
      soften<E, Shape>(logits, states, output, weights, scale.factor);

      cp_async_wait<1>();
      sync_block();  // the values have arrived, and no thread reads these keys any more
      if (left > 1) {
        cursor = cursor.next(live);
        loader.load_values(ring.keys(), cursor);
        loader.find(cursor.next(live));
      }
      cp_async_commit();
      multiply_values<E, HeadDim>(output, weights, ring.values());
      if constexpr (Packed) {
        const bool next = left > 1 && live.segment[cursor.segment].rotated_values;
        if (next != rotated_output) rotate_output<Shape>(output);
        rotated_output = next;
      }
      ring.advance();
    }
    sync_warp();  // the output is staged in the warp's part of the queries' tile
  }

  states.gather(scale.factor);
  if (params.splits == 1) {
    write_rows<E, Shape>(output, states, params, item, queries, query_memory);
  } else {
    share_rows<Shape>(output, states, params, item, queries);
    if (is_last_block(params.workspace.tickets + item.index, params.splits, notes.arrived)) {
      merge_rows<E, Shape>(params, item, queries);
    }
  }
}

}  // namespace kvpolicy::gpu
