// SPDX-License-Identifier: Apache-2.0
//
// Assigns work to the blocks of the prefill kernel: the longest work first, so that short work
// fills the gaps at the end (a tile of a streaming head is a small fraction of a retrieval head's).
#pragma once

#include <kvpolicy/cuda/kernels/prefill_tile.cuh>

namespace kvpolicy::gpu {

template <class Shape>
KVPOLICY_HOST_DEVICE constexpr int prefill_tiles(const Request& request, int group) {
  return quotient_up(request.queries * group, Shape::query_rows);
}

/// The number of items, which are tiles of queries of all heads and sequences. The grid has splits
/// times as many blocks. With splits, the workspace needs one slot of Shape::query_rows columns for
/// each block and a ticket for each item.
template <class Shape>
KVPOLICY_HOST_DEVICE constexpr int prefill_items(const AttendParams& params) {
  return params.sequences * params.kv_heads * prefill_tiles<Shape>(params.request, params.group);
}

/// The sequence of a block, and which of its blocks it is; a sequence after the last one if there is no work.
struct PrefillShare {
  int sequence = 0;
  int block = 0;
  int items_before = 0;  ///< of earlier sequences
};
template <class Shape>
KVPOLICY_DEVICE PrefillShare share_of_block(const AttendParams& params) {
  if (params.ragged == nullptr) {
    const int items = params.kv_heads * prefill_tiles<Shape>(params.request, params.group);
    const int sequence = block_x() / (items * params.splits);
    return {sequence, block_x() % (items * params.splits), sequence * items};
  }
  PrefillShare place{.sequence = 0, .block = block_x(), .items_before = 0};
  for (; place.sequence < params.sequences; ++place.sequence) {
    const int items = params.kv_heads * prefill_tiles<Shape>(params.request_of(place.sequence), params.group);
    if (place.block < items * params.splits) break;
    place.block -= items * params.splits;
    place.items_before += items;
  }
  return place;
}

/// The tile of queries, without its text position, which list_segments computes.
template <class Shape>
KVPOLICY_DEVICE QueryTile query_tile(const Request& request, int group, int tile) {
  const int first = tile * Shape::query_rows;
  const CallTree& tree = request.tree;
  return {.first = first,
          .rows = smaller(Shape::query_rows, request.queries * group - first),
          .group = group,
          .inverse = inverse_of(group),
          .depths = tree.nodes > 0 ? tree.depths + request.older_nodes() : nullptr,
          .lowest = tree.lowest,
          .highest = tree.highest};
}

/// What a block keeps in shared memory after its tiles.
struct PrefillNotes {
  LiveTiles live;
  PrefillItem item;
  QueryTile queries;
  std::uint32_t arrived = 0;
};

/// What find_item keeps in the memory of the tiles: lists of segments of the threads that rank heads, then the heads'
/// counts of tiles.
inline constexpr int ranking_threads = 64;
inline constexpr int ranking_lists_bytes = ranking_threads * static_cast<int>(sizeof(DeviceSegmentList));
/// How many heads a block can rank, by this memory. More heads are taken in their own order.
template <class Shape>
inline constexpr int most_ranked_heads =
    (Shape::tiles_bytes - ranking_lists_bytes) / static_cast<int>(sizeof(int));

/// Finds the block's item and its visible tiles; false if there is no work for the block. Called by all threads;
/// ends with a barrier, after which `scratch` may be overwritten.
///
/// Heads with at least half as many tiles as the longest head come first, then the others. Inside
/// both groups, later queries come first, because they see most, and for equal queries the longest
/// head. Splits of an item are neighbours. Each block ranks the heads of its sequence itself. This
/// needs no plan on the host, so a captured launch stays valid while the text grows.
template <class Shape>
KVPOLICY_DEVICE bool find_item(const AttendParams& params, std::byte* scratch, PrefillItem& item,
                               QueryTile& queries, LiveTiles& live) {
  constexpr int key_rows = Shape::key_rows;
  auto* const lists = reinterpret_cast<DeviceSegmentList*>(scratch);
  int* const tiles =
      reinterpret_cast<int*>(scratch + ranking_lists_bytes);  // of each head, for the last queries
  const PrefillShare place = share_of_block<Shape>(params);
  if (place.sequence == params.sequences) return false;
  const int block = place.block;
  const Request request = params.request_of(place.sequence);
  const int query_tiles = prefill_tiles<Shape>(request, params.group);
  const int heads = params.kv_heads;
  const HeadView* head = &params.head_of(place.sequence, 0);
  const LayerState& state = params.state_of(place.sequence);

  const bool ranked = heads > 1 && heads <= most_ranked_heads<Shape>;
  int heavy = heads;
  if (ranked) {
    if (thread_index() < ranking_threads) {
      for (int h = thread_index(); h < heads; h += ranking_threads) {
        QueryTile last = query_tile<Shape>(request, params.group, query_tiles - 1);
        int count = 0;
        for_each_live<key_rows>(head[h], state, request, last, lists[thread_index()],
                                [&](const LiveSegment& part) { count += part.end - part.begin; });
        tiles[h] = count;
      }
    }
    sync_block();
    int longest = 0;
    KVPOLICY_NO_UNROLL
    for (int h = 0; h < heads; ++h) longest = larger(longest, tiles[h]);
    heavy = 0;
    KVPOLICY_NO_UNROLL
    for (int h = 0; h < heads; ++h) heavy += tiles[h] >= longest - longest / 2 ? 1 : 0;
  }
  const int heavy_blocks = heavy * query_tiles * params.splits;
  const bool light = block >= heavy_blocks;
  const int in_class = light ? block - heavy_blocks : block;
  const int of_class = (light ? heads - heavy : heavy) * params.splits;
  const int rank = (light ? heavy : 0) + in_class % of_class / params.splits;
  if (!ranked) {
    if (thread_index() == 0) item.kv_head = rank;
  } else {
    for (int h = thread_index(); h < heads; h += Shape::threads) {
      int before = 0;
      KVPOLICY_NO_UNROLL
      for (int other = 0; other < heads; ++other) {
        const int more = tiles[other] - tiles[h];
        before += more > 0 || (more == 0 && other < h) ? 1 : 0;
      }
      if (before == rank) item.kv_head = h;
    }
  }
  sync_block();
  if (thread_index() == 0) {
    item.head = head[item.kv_head];
    item.head.upper_half = request.upper_half;
    item.request = request;
    item.tokens = params.tokens_of(place.sequence);
    item.log_sum_exp = params.log_sum_exp_of(place.sequence);
    item.tile = query_tiles - 1 - in_class / of_class;
    item.index = place.items_before + item.kv_head * query_tiles + item.tile;
    item.split = in_class % params.splits;
    live.segments = 0;
    live.tiles = 0;
    queries = query_tile<Shape>(request, params.group, item.tile);
    for_each_live<key_rows>(item.head, state, request, queries, lists[0], [&](const LiveSegment& part) {
      live.segment[live.segments++] = part;
      live.tiles += part.end - part.begin;
    });
  }
  sync_block();
  return true;
}

}  // namespace kvpolicy::gpu
