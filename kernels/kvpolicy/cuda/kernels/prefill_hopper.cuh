// SPDX-License-Identifier: Apache-2.0
//
// prefill.cuh for Hopper (sm_90a), for heads whose rows are all exact: the same items, tiles of keys, masks and
// results, by products that read shared memory themselves (wgmma). The division of labour is FlashAttention-3's (Shah
// et al., arXiv:2407.08608): one warpgroup copies rows, two multiply, each 64 query rows of a tile of 128. A
// warpgroup starts the product of the next keys before the softmax of this tile's logits is in the outputs, and the
// two take turns, so that one's softmax hides beneath the other's products.
//
// Rows come by copies of 16 bytes (cp.async), and not by the copy engine: a tile's rows lie on any pages, at any
// stride, in rings that wrap inside a tile, and the call's own rows where the caller has them, while the engine's
// copies without a tensor map cannot swizzle and those with one take boxes of one size. A warpgroup that does nothing
// else issues the copies in a small part of the issue slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/partials.cuh>
#include <kvpolicy/cuda/kernels/prefill_item.cuh>
#include <kvpolicy/cuda/kernels/prefill_output.cuh>
#include <kvpolicy/cuda/kernels/prefill_queries.cuh>
#include <kvpolicy/cuda/kernels/prefill_softmax.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>
#include <kvpolicy/cuda/kernels/simt_hopper.cuh>

namespace kvpolicy::gpu {

/// Whether the kernel is written for a head_dim.
template <int HeadDim>
inline constexpr bool has_hopper_prefill = HeadDim == 64 || HeadDim == 128 || HeadDim == 256;

template <int HeadDim>
struct SwizzledChunk;

/// Sizes of a block's work (PrefillShape). Outputs, logits and weights of a thread are 32 + 64 + 32 registers at
/// head_dim 64, 64 + 64 + 32 at 128 and 128 + 48 + 24 at 256. Keys and values pass through one ring of tiles in the
/// order in which they are needed. Wide tiles of keys, because a product reads the queries' 64 rows as well as the
/// keys', and shared memory gives 128 bytes a clock: at 64 keys it would be the limit.
template <int HeadDim>
struct HopperShape {
  using Chunk = SwizzledChunk<HeadDim>;
  static constexpr int head_dim = HeadDim;
  static constexpr int multiplying_warpgroups = 2;
  static constexpr int multiplying_threads = multiplying_warpgroups * warpgroup_threads;
  static constexpr int threads = multiplying_threads + warpgroup_threads;
  static constexpr int first_loading_warp = multiplying_threads / warp_lanes;
  static constexpr int loading_warps = warpgroup_warps;
  static constexpr int row_tiles = 1;
  static constexpr int warp_rows = 16;
  static constexpr int query_rows = multiplying_warpgroups * warpgroup_warps * warp_rows;
  static constexpr int key_rows = HeadDim <= 128 ? 128 : 96;
  static constexpr int chunks = HeadDim / 8;
  static constexpr int query_bytes = query_rows * HeadDim * 2;
  static constexpr int key_bytes = key_rows * HeadDim * 2;
  static constexpr int stages = HeadDim <= 128 ? 6 : 3;
  static constexpr int tiles_bytes = query_bytes + stages * key_bytes;
  static_assert(has_hopper_prefill<HeadDim>);
};

/// Eight rows lie together, 64 channels of each in 1,024 bytes, swizzled as matrix_descriptor says. Added rows and
/// chunks must not carry into or out of the lowest three bits of the first ones (ChunkRow).
template <int HeadDim>
struct SwizzledChunk {
  static constexpr int eight_rows_bytes = 8 * HeadDim * 2;
  int offset;

  KVPOLICY_DEVICE SwizzledChunk(int tile, int row, int chunk)
      : offset{tile + row / 8 * eight_rows_bytes + chunk / 8 * 1024 + row % 8 * 128 +
               (chunk ^ row) % 8 * 16} {}

  KVPOLICY_DEVICE std::byte* plus(int rows, int chunks) const {
    return shared_memory() + (offset ^ (chunks ^ rows) % 8 * 16) + rows / 8 * eight_rows_bytes +
           rows % 8 * 128 + chunks / 8 * 1024;
  }
};

/// The barriers of the ring.
template <int Stages>
struct RingBarriers {
  SharedBarrier full[Stages];   ///< all threads that copy have arrived
  SharedBarrier empty[Stages];  ///< all warps that multiply have arrived
};

/// What a block keeps in shared memory after its tiles.
template <int HeadDim>
struct HopperNotes {
  PrefillNotes notes;
  RingBarriers<HopperShape<HeadDim>::stages> barriers;
};

template <int HeadDim>
constexpr std::size_t prefill_hopper_shared_bytes() {
  constexpr std::size_t bytes = HopperShape<HeadDim>::tiles_bytes + sizeof(HopperNotes<HeadDim>);
  static_assert(bytes <= 227 * 1024);
  return bytes;
}

/// Where a warp is in the ring: a stage, and the parity of the phase in which it is used.
template <int HeadDim>
struct RingCursor {
  using Shape = HopperShape<HeadDim>;
  int stage = 0;
  int parity = 0;

  KVPOLICY_DEVICE int tile() const { return Shape::query_bytes + stage * Shape::key_bytes; }
  KVPOLICY_DEVICE void advance() {
    if (++stage == Shape::stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- the warpgroup that copies -----------------------------------------------------------------
/// Fills the ring: the keys of the first two tiles, the first values, the third keys, the second values, and so on,
/// as they are needed.
template <int HeadDim>
struct HopperLoader {
  using Shape = HopperShape<HeadDim>;
  const LiveTiles& live;
  RingBarriers<Shape::stages>& barriers;
  RingCursor<HeadDim> ring = {};
  SharedBarrier* under_way = nullptr;  ///< the barrier of the tile whose copies were started last

  /// Waits for room, and starts the copies of a tile.
  template <class Copy>
  KVPOLICY_DEVICE void load(Copy copy) {
    mbarrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
    copy(ring.tile());
    cp_async_commit();
    if (under_way != nullptr) {
      cp_async_wait<1>();
      pass_on();
    }
    under_way = &barriers.full[ring.stage];
    ring.advance();
  }
  KVPOLICY_DEVICE void finish() {
    cp_async_wait<0>();
    pass_on();
  }

  KVPOLICY_DEVICE void run(const AttendParams& params, const PrefillItem& item, TileCursor cursor,
                           int tiles) {
    RowLoader<Shape> rows{params, item};
    rows.find(live.segment[cursor.segment], cursor.tile);
    load([&](int tile) { rows.load_keys(tile); });
    KVPOLICY_NO_UNROLL
    for (int left = tiles; left > 0; --left) {
      const RowLoader<Shape> found = rows;
      const TileCursor at = cursor;
      if (left > 1) {
        cursor = cursor.next(live);
        rows.find(live.segment[cursor.segment], cursor.tile);
        load([&](int tile) { rows.load_keys(tile); });
      }
      load([&](int tile) { found.load_values(tile, live.segment[at.segment], at.tile); });
    }
    finish();
  }

 private:
  KVPOLICY_DEVICE void pass_on() const {
    fence_shared_for_products();
    mbarrier_arrive(under_way);
  }
};

// ---- the warpgroups that multiply --------------------------------------------------------------
/// What a warpgroup multiplies: its 64 rows of the tile of queries.
template <Element E, int HeadDim>
struct HopperProducts {
  using Shape = HopperShape<HeadDim>;
  static constexpr int eight_rows_bytes = SwizzledChunk<HeadDim>::eight_rows_bytes;

  KVPOLICY_DEVICE static std::uint64_t descriptor(int offset) {
    return matrix_descriptor(shared_address(shared_memory() + offset), 1024, eight_rows_bytes);
  }

  /// Starts the unscaled logits of the queries at `queries` with a tile of keys.
  KVPOLICY_DEVICE static void multiply_keys(LogitTile<Shape>& logits, int queries, int keys) {
    const std::uint64_t q = descriptor(queries);
    const std::uint64_t k = descriptor(keys);
    wgmma<E, Shape::key_rows, false>(logits.at[0], q, k);
    KVPOLICY_UNROLL
    for (int step = 1; step < HeadDim / 16; ++step) {
      const int apart = (step / 4 * 1024 + step % 4 * 32) / 16;
      wgmma<E, Shape::key_rows, true>(logits.at[0], q + apart, k + apart);
    }
    wgmma_commit();
  }
  /// Starts adding a tile of values, multiplied by their weights.
  KVPOLICY_DEVICE static void multiply_values(OutputTile<Shape>& output, const WeightTile<Shape>& weights,
                                              int values) {
    constexpr int columns = HeadDim < 128 ? HeadDim : 128;
    const std::uint64_t v = descriptor(values);
    KVPOLICY_UNROLL
    for (int step = 0; step < Shape::key_rows / 16; ++step) {
      const int apart = step * 2 * eight_rows_bytes / 16;
      wgmma_transposed<E, columns, 0>(output.at[0], weights.at[0][step], v + apart);
      if constexpr (columns < HeadDim) {
        wgmma_transposed<E, columns, columns / 8>(output.at[0], weights.at[0][step],
                                                  v + apart + columns / 64 * 1024 / 16);
      }
    }
    wgmma_commit();
  }
};

/// Barriers of some of the block's warps.
enum NamedBarrier : int {
  turn_barrier = 1,       ///< and the next one: each warpgroup's turn to start products
  warpgroup_barrier = 3,  ///< and the next one: the warps of a warpgroup
  multiplying_barrier = 5
};

template <Element E, int HeadDim>
struct HopperAttention {
  using Shape = HopperShape<HeadDim>;
  using Products = HopperProducts<E, HeadDim>;
  const AttendParams& params;
  const PrefillItem& item;
  const QueryTile& queries;
  const LiveTiles& live;
  RingBarriers<Shape::stages>& barriers;
  int warpgroup;  ///< 0 or 1
  LogitScale scale{params};
  RingCursor<HeadDim> ring = {};
  QueryForm form = QueryForm::plain;

  /// This warpgroup's queries in shared memory. The compiler is not to know that it is the same for every tile, or the
  /// descriptors of all their parts would take registers.
  KVPOLICY_DEVICE int own_queries() const { return shuffle(warpgroup * 64 * HeadDim * 2, 0); }
  KVPOLICY_DEVICE void sync_warpgroup() const {
    named_barrier_sync(warpgroup_barrier + warpgroup, warpgroup_threads);
  }

  /// Waits for this warpgroup's turn to start products, and gives the other one its turn.
  KVPOLICY_DEVICE void await_turn() const {
    named_barrier_sync(turn_barrier + warpgroup, Shape::multiplying_threads);
  }
  KVPOLICY_DEVICE void give_turn() const {
    named_barrier_arrive(turn_barrier + (1 - warpgroup), Shape::multiplying_threads);
  }

  KVPOLICY_DEVICE int await_tile() const {
    mbarrier_wait(&barriers.full[ring.stage], ring.parity);
    return ring.tile();
  }
  /// Frees a stage whose tile this warp has no product of under way.
  KVPOLICY_DEVICE void release(int stage) const {
    if (lane_index() == 0) mbarrier_arrive(&barriers.empty[stage]);
  }

  KVPOLICY_DEVICE void load_queries() const {
    copy_queries<Shape>(0, params.q, item, queries);
    cp_async_commit();
    cp_async_wait<0>();
  }
  /// Brings the queries to the form that a tile's keys need. No product of this warpgroup reads them.
  KVPOLICY_DEVICE void form_queries(QueryForm needed) {
    if (needed == form) return;
    sync_warpgroup();  // no other warp's product reads them any more
    load_queries();
    sync_warp();
    if (needed == QueryForm::turned) rotate_queries<E, Shape>(0, item.head, queries);
    form = needed;
    fence_shared_for_products();
    sync_warpgroup();
  }

  /// The softmax of a tile's logits, which become weights; returns whether outputs of before are to be multiplied by
  /// `factors`.
  KVPOLICY_DEVICE bool soften_in_place(LogitTile<Shape>& logits, RowStates<Shape>& states,
                                       const TileCursor& at, RowNumbers<Shape>& factors) const {
    scale.prepare(logits);
    const LiveSegment& segment = live.segment[at.segment];
    if (segment.cuts(at.tile)) hide<Shape>(logits, segment, at.tile, queries, item.request);
    RowNumbers<Shape> latest;
    const bool grown = find_maxima<Shape>(latest, logits, states);
    if (grown) raise_maxima<Shape>(states, latest, scale.factor, factors);
    weigh<Shape>(logits, states, scale.factor,
                 [&](int m, int n, int half, float low, float high) KVPOLICY_INLINE_LAMBDA {
                   logits.at[m][n][half * 2] = low;
                   logits.at[m][n][half * 2 + 1] = high;
                 });
    return grown;
  }
  KVPOLICY_DEVICE static void pack_weights(WeightTile<Shape>& weights, const LogitTile<Shape>& logits) {
    KVPOLICY_UNROLL
    for (int n = 0; n < Shape::key_rows / 8; ++n) {
      KVPOLICY_UNROLL
      for (int half = 0; half < 2; ++half) {
        weights.at[0][n / 2][n % 2 * 2 + half] =
            pack<E>(logits.at[0][n][half * 2], logits.at[0][n][half * 2 + 1]);
      }
    }
  }

  KVPOLICY_DEVICE void run(OutputTile<Shape>& output, RowStates<Shape>& states, TileCursor cursor,
                           int tiles) {
    load_queries();
    fence_shared_for_products();
    sync_warpgroup();
    if (warpgroup == 1 && tiles > 1) give_turn();  // the first one begins

    LogitTile<Shape> logits;
    WeightTile<Shape> weights;
    RowNumbers<Shape> factors;
    form_queries(live.segment[cursor.segment].queries);
    const int first_keys = await_tile();
    wgmma_fence(logits.at[0]);
    Products::multiply_keys(logits, own_queries(), first_keys);
    wgmma_wait<0>(logits.at[0]);
    release(ring.stage);
    ring.advance();
    soften_in_place(logits, states, cursor, factors);
    pack_weights(weights, logits);

    KVPOLICY_NO_UNROLL
    for (int left = tiles - 1; left > 0; --left) {
      cursor = cursor.next(live);
      form_queries(live.segment[cursor.segment].queries);
      await_turn();
      const int keys_stage = ring.stage;
      const int keys = await_tile();
      ring.advance();
      wgmma_fence(logits.at[0]);
      Products::multiply_keys(logits, own_queries(), keys);
      const int values_stage = ring.stage;
      const int values = await_tile();
      ring.advance();
      wgmma_fence(output.at[0], weights.at[0]);
      Products::multiply_values(output, weights, values);
      if (warpgroup == 0 || left > 1) give_turn();
      wgmma_wait<1>(logits.at[0]);
      release(keys_stage);
      const bool grown = soften_in_place(logits, states, cursor, factors);
      wgmma_wait<0>(output.at[0], weights.at[0]);
      release(values_stage);
      if (grown) multiply_rows<Shape>(output, factors);
      pack_weights(weights, logits);
    }
    const int values = await_tile();
    wgmma_fence(output.at[0], weights.at[0]);
    Products::multiply_values(output, weights, values);
    wgmma_wait<0>(output.at[0], weights.at[0]);
    sync_warpgroup();  // the output is staged in the queries' memory
  }
};

/// Grid: prefill_items<HopperShape<HeadDim>>(params) * params.splits blocks, of a ragged call as many as all its
/// sequences have, of HopperShape::threads threads. No head has quantised rows.
template <Element E, int HeadDim>
KVPOLICY_HOPPER_KERNEL(HopperShape<HeadDim>::threads)
prefill_hopper_kernel(const KVPOLICY_GRID_CONSTANT AttendParams params) {
  if constexpr (has_warpgroups) {
    wait_for_kernel_before();
    using Shape = HopperShape<HeadDim>;
    auto& own = *reinterpret_cast<HopperNotes<HeadDim>*>(shared_memory() + Shape::tiles_bytes);
    PrefillNotes& notes = own.notes;
    if (thread_index() == 0) {
      for (int stage = 0; stage < Shape::stages; ++stage) {
        mbarrier_init(&own.barriers.full[stage], warpgroup_threads);
        mbarrier_init(&own.barriers.empty[stage], Shape::multiplying_threads / warp_lanes);
      }
    }
    if (!find_item<Shape>(params, shared_memory(), notes.item, notes.queries, notes.live)) return;
    const PrefillItem& item = notes.item;
    const long long all = notes.live.tiles;
    const int first = static_cast<int>(all * item.split / params.splits);
    // The same in all lanes, and the compiler knows: what follows from them, descriptors above all, is computed once
    // a warp.
    const int tiles = shuffle(static_cast<int>(all * (item.split + 1) / params.splits) - first, 0);
    const int warp = shuffle(warp_index(), 0);

    if (warp >= Shape::first_loading_warp) {
      lower_register_limit<40>();
      if (tiles > 0) {
        HopperLoader<HeadDim>{notes.live, own.barriers}.run(params, item, TileCursor{notes.live, first},
                                                            tiles);
      }
    } else {
      raise_register_limit<232>();
      OutputTile<Shape> output;
      output.clear();
      RowStates<Shape> states;
      HopperAttention<E, HeadDim> attention{params,     item,         notes.queries,
                                            notes.live, own.barriers, warp / warpgroup_warps};
      if (tiles > 0) attention.run(output, states, TileCursor{notes.live, first}, tiles);
      states.gather(attention.scale.factor);
      if (params.splits == 1) {
        write_rows<E, Shape>(output, states, params, item, notes.queries, 0);
      } else {
        share_rows<Shape>(output, states, params, item, notes.queries);
        const auto sync = [] { named_barrier_sync(multiplying_barrier, Shape::multiplying_threads); };
        if (is_last_block(params.workspace.tickets + item.index, params.splits, notes.arrived, sync)) {
          merge_rows<E, Shape>(params, item, notes.queries);
        }
      }
    }
  }
}

}  // namespace kvpolicy::gpu
