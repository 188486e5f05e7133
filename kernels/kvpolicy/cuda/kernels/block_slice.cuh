// SPDX-License-Identifier: Apache-2.0
//
// A block's share of a head: which work units of which segments the block reads. It is stored in
// shared memory for the block's warps. Used by decode.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/fragments.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/partition.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Copies an object by words; each of `threads` threads calls it, this one as thread `thread`.
template <class T>
KVPOLICY_DEVICE void copy_words(T& to, const T& from, int thread, int threads) {
  static_assert(sizeof(T) % sizeof(Words1) == 0);
  for (int i = thread; i < static_cast<int>(sizeof(T) / sizeof(Words1)); i += threads) {
    reinterpret_cast<std::uint32_t*>(&to)[i] = reinterpret_cast<const std::uint32_t*>(&from)[i];
  }
}

struct BlockSlice {
  HeadView head;
  Request request;    ///< of the head's sequence
  CallTokens tokens;  ///< of the head's sequence
  int index;          ///< the head's among the heads of all sequences
  int kv_head;
  DeviceSegmentList list;
  UnitRange range[most_segments];
  int skipped[most_segments];         ///< rows of unit 0 before the segment's first
  bool may_be_unseen[most_segments];  ///< a chunk list with rows that some queries do not see
  int first_block;                    ///< the blocks first_block .. last_block share the head
  int last_block;
  int last_position;  ///< position of the last query
  bool has_rows;      ///< the share is not only the cost of starting the head
  bool has_packed_rows;
  bool rotated;  ///< some segment is read with rotated queries

  /// The share of the block whose slice of the line is [from, to); the head has [begin, end) of it. Called by all lanes
  /// of a warp, of which lane s divides segment s: nothing of the head can be loaded before that is done.
  KVPOLICY_DEVICE void describe(const AttendParams& p, const Partition& line, int of_all, long long begin,
                                long long end, long long from, long long to) {
    static_assert(most_segments <= segment_lanes);
    const int lane = lane_index();
    const int sequence = of_all / p.kv_heads;
    const HeadView& view = p.head_of(sequence, of_all % p.kv_heads);
    const Request asked = p.request_of(sequence);
    if (lane == 0) {
      index = of_all;
      kv_head = of_all % p.kv_heads;
      request = asked;
      tokens = p.tokens_of(sequence);
      list.count = 0;
      list_segments(view, p.state_of(sequence), asked, list);
      last_position = list.first_position + asked.span();
    }
    copy_words(head, view, lane, warp_lanes);
    sync_warp();
    if (lane == 0) head.upper_half = asked.upper_half;

    const int segments = list.count;
    const bool has_segment = lane < segments;
    const DeviceSegment& segment = list.segment[has_segment ? lane : 0];
    const Units all = units_of(view, segment, asked.upper_half);
    const int weight = has_segment ? all.count * all.weight : 0;
    int before_next = weight;
    KVPOLICY_UNROLL
    for (int distance = 1; distance < segment_lanes; distance *= 2) {
      const int below = shuffle_up(before_next, distance);
      if (lane >= distance) before_next += below;
    }
    const long long first_unit = begin + cost_of_head;
    UnitRange own{0, 0};
    if (has_segment) {
      own = units_within(all, first_unit + before_next - weight, from, to);
      range[lane] = own;
      skipped[lane] = all.skipped;
      may_be_unseen[lane] =
          segment.chunks != nullptr && segment.position_of(segment.rows - 1) > list.first_position;
    }
    const bool reads = own.begin < own.end;
    const bool some = any(reads);
    const bool some_packed = any(reads && is_packed(lane));
    const bool some_rotated = any(reads && segment.rotated);
    const int last_weight = shuffle(all.weight, segments - 1);
    // One lane finds the block of the first unit, the others that of the last one.
    const int block = line.block_of(lane == 0 ? first_unit : end - last_weight);
    if (lane == 0) {
      first_block = block;
      has_rows = some;
      has_packed_rows = some_packed;
      rotated = some_rotated;
    }
    if (lane == 1) last_block = block;
    sync_warp();
  }
  KVPOLICY_DEVICE bool is_packed(int s) const {
    return list.segment[s].source == DeviceSegment::Source::packed;
  }

 private:
  static constexpr int segment_lanes = 8;
};

/// Iterates over a share's units of exact rows, or over those of packed rows.
struct UnitCursor {
  int segment = 0;
  int unit = 0;

  KVPOLICY_DEVICE static UnitCursor first(const BlockSlice& slice) { return {0, slice.range[0].begin}; }
  /// Moves `units` units on; returns whether there is such a unit.
  KVPOLICY_DEVICE bool skip(const BlockSlice& slice, bool packed, int units) {
    unit += units;
    while (segment < slice.list.count) {
      const UnitRange range = slice.range[segment];
      const int end = slice.is_packed(segment) == packed ? range.end : range.begin;
      if (unit < end) return true;
      unit -= end;
      if (++segment < slice.list.count) unit += slice.range[segment].begin;
    }
    return false;
  }
};

/// The mask of a call with a tree, in the layout of cap_and_mask's logits.
template <int Tiles, int ColumnTiles>
KVPOLICY_DEVICE void mask_tree(float (&logits)[Tiles][ColumnTiles][4], const AttendParams& p,
                               const BlockSlice& slice, const DeviceSegment& segment, int first) {
  // Computes mask bits one after another, because the kernel has no spare registers.
  constexpr int rows = 2 * Tiles;  // rows of a lane
  static_assert(2 * ColumnTiles * rows <= 32);
  std::uint32_t seen = 0;
  KVPOLICY_NO_UNROLL
  for (int i = 2 * ColumnTiles * rows - 1; i >= 0; --i) {
    const int column = i / rows / 2 * tile_columns + lane_index() % 4 * 2 + i / rows % 2;
    const int row = first + i % rows * 8 + lane_index() / 4;
    const bool sees =
        column < slice.request.queries * p.group &&
        TreeQuery{slice.request, column / p.group}.sees(segment, slice.list.first_position, row);
    seen = seen * 2 + (sees ? 1U : 0U);
  }
  KVPOLICY_UNROLL
  for (int n = 0; n < ColumnTiles; ++n) {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      KVPOLICY_UNROLL
      for (int k = 0; k < 4; ++k) {  // upper row and odd column, in the layout of the products
        const int i = (2 * n + k % 2) * rows + 2 * tile + k / 2;
        if ((seen >> i & 1U) == 0) logits[tile][n][k] = minus_infinity();
      }
    }
  }
}

/// Applies soft cap and mask to the logits of a unit of `Tiles` tiles of 16 rows. Its row 0 is row
/// `first` of the segment; if `first` is negative, rows before the segment come first.
template <int Tiles, int ColumnTiles>
KVPOLICY_DEVICE void cap_and_mask(float (&logits)[Tiles][ColumnTiles][4], const AttendParams& p,
                                  const BlockSlice& slice, int s, int first) {
  if (p.softcap != 0.0F) {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) logits[tile][n][i] = capped(logits[tile][n][i], p.softcap);
      }
    }
  }
  const DeviceSegment& segment = slice.list.segment[s];
  const int query = slice.list.first_position;
  const int last = first + Tiles * tile_rows - 1;
  bool cut = first < 0 || last >= segment.rows;
  if (segment.chunks != nullptr) {
    cut = cut || slice.may_be_unseen[s];
  } else {
    cut = cut || segment.position + last > query ||
          segment.position + first <= slice.last_position - segment.window;
  }
  if (!cut) return;
  // Rows of nodes always need the mask, because their segment begins at the first query's position.
  if (slice.request.tree.nodes > 0) {
    mask_tree(logits, p, slice, segment, first);
    return;
  }
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  KVPOLICY_UNROLL
  for (int tile = 0; tile < Tiles; ++tile) {
    KVPOLICY_UNROLL
    for (int upper = 0; upper < 2; ++upper) {
      const int i = first + tile * tile_rows + upper * 8 + g;
      int begin = slice.request.queries * p.group;  // columns begin .. end - 1 see the row
      int end = begin;
      if (i >= 0 && i < segment.rows) {
        const int ahead = segment.position_of(i) - query;  // relative to the call's first query
        begin = larger(ahead, 0) * p.group;
        if (segment.window < slice.request.queries - ahead) {
          end = larger(ahead + segment.window, 0) * p.group;
        }
      }
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int column = n * tile_columns + 2 * t + j;
          if (column < begin || column >= end) logits[tile][n][upper * 2 + j] = minus_infinity();
        }
      }
    }
  }
}

}  // namespace kvpolicy::gpu
