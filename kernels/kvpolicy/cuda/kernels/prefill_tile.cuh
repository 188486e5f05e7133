// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the prefill kernel: which tiles of keys a tile of queries meets, and how 16-bit rows
// come into shared memory.
//
// Rows of a shared tile are cut into chunks of 16 bytes. Eight rows that a matrix load reads at one
// chunk must fall on different banks: where rows are whole multiples of 128 bytes, the chunk's
// number is XORed with the row's; elsewhere a spare chunk makes the pitch odd, which does the same.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

inline constexpr int prefill_warps = 4;
inline constexpr int prefill_threads = prefill_warps * warp_lanes;

/// What a block works on. The unnormalised output takes 128 registers of a thread at head_dim 128
/// and 256 alike; keys and values pass through a ring of three tiles, so that two blocks share the
/// 164 KiB of an A100's multiprocessor and the softmax of one hides behind the products of the
/// other.
template <int HeadDim>
struct PrefillShape {
  static constexpr int row_tiles = HeadDim <= 128 ? 2 : 1;  ///< tiles of 16 query rows of a warp
  static constexpr int warp_rows = 16 * row_tiles;
  static constexpr int query_rows = prefill_warps * warp_rows;
  static constexpr int key_rows = HeadDim <= 128 ? 64 : 32;
  static constexpr int chunks = HeadDim / 8;  ///< of a row
  static constexpr bool swizzled = chunks % 8 == 0;
  static constexpr int pitch = swizzled ? chunks : chunks + 1;
  static constexpr int query_bytes = query_rows * pitch * 16;
  static constexpr int key_bytes = key_rows * pitch * 16;
  static constexpr int stages = 3;
  static constexpr int tiles_bytes = query_bytes + stages * key_bytes;
  static_assert(chunks % 2 == 0 && query_bytes % 128 == 0 && key_bytes % 128 == 0);
};

template <int HeadDim>
inline constexpr int prefill_tile_rows = PrefillShape<HeadDim>::query_rows;

/// A place in a tile of the block's shared memory, from which others are constants away. Rows and
/// chunks that are added must not carry into or out of the lowest three bits of those given first,
/// so that swizzling stays one XOR and a kernel needs few registers for addresses.
template <int HeadDim>
struct ChunkPlace {
  using Shape = PrefillShape<HeadDim>;
  int offset;

  /// `tile`: offset of the tile, a multiple of 128.
  KVPOLICY_DEVICE ChunkPlace(int tile, int row, int chunk)
      : offset{tile + (row * Shape::pitch + (Shape::swizzled ? chunk ^ (row % 8) : chunk)) * 16} {}

  KVPOLICY_DEVICE std::byte* plus(int rows, int chunks) const {
    const int swizzled = Shape::swizzled ? (offset ^ (chunks ^ rows) % 8 * 16) + chunks / 8 * 8 * 16
                                         : offset + chunks * 16;
    return shared_memory() + swizzled + rows * Shape::pitch * 16;
  }
};

/// Chunk `chunk` of row `row` of the tile at offset `tile`.
template <int HeadDim>
KVPOLICY_DEVICE std::byte* tile_chunk(int tile, int row, int chunk) {
  return ChunkPlace<HeadDim>{tile, row, chunk}.plus(0, 0);
}

/// Query rows of one KV head are its (token, query head) pairs, token by token, so that the query
/// heads of a group share each tile of keys.
struct QueryTile {
  int first = 0;  ///< row
  int rows = 0;
  int group = 1;
  // Of a tree's call: how deep each query stands, and the least and greatest of these.
  const int* depths = nullptr;
  int lowest = 0;
  int highest = 0;
  int first_position = 0;  ///< text position of row 0's token, not of `first`; or of depth 0

  KVPOLICY_DEVICE int token(int row) const {
    return smaller(first + row, first + rows - 1) / group;
  }
  KVPOLICY_DEVICE int head(int row) const { return (first + row) % group; }
  /// Text position of the tile's row; of rows behind the last, the last one's.
  KVPOLICY_DEVICE int position(int row) const {
    return first_position + (depths == nullptr ? token(row) : depths[token(row)]);
  }
  /// At least, and at most, the positions of all its rows.
  KVPOLICY_DEVICE int first_row_position() const {
    return depths == nullptr ? position(0) : first_position + lowest;
  }
  KVPOLICY_DEVICE int last_row_position() const {
    return depths == nullptr ? position(rows - 1) : first_position + highest;
  }
};

/// A segment as tiles of consecutive rows. Column c of tile j is the segment's row
/// j * key_rows + c - lead.
struct LiveSegment {
  Segment segment;
  int lead = 0;
  int begin = 0;  ///< Tiles of which some query of a tile sees something.
  int end = 0;
  int whole_begin = 0;  ///< Tiles of which all queries see everything.
  int whole_end = 0;

  KVPOLICY_DEVICE bool cuts(int tile) const { return tile < whole_begin || tile >= whole_end; }
};

/// The live tiles of a segment, and the uncut ones among them. Packed rows are cut where their
/// blocks are, so that a tile is one block and never leaves a page. A chunk list is live as a
/// whole: its rows precede the call, unless they were chosen in a call for the same tokens.
template <int KeyRows>
KVPOLICY_DEVICE LiveSegment live_part(const HeadView& head, const Segment& segment,
                                      const QueryTile& queries) {
  LiveSegment live{.segment = segment};
  if (segment.rows <= 0) return live;
  const int first = queries.first_row_position();
  const int last = queries.last_row_position();
  int begin = 0;
  int end = segment.rows;
  int whole_begin = 0;
  int whole_end = segment.rows;
  if (segment.node >= 0) {
    whole_end = 0;
  } else if (segment.chunks != nullptr) {
    if (segment.position_of(segment.rows - 1) > first) whole_end = 0;
  } else {
    if (segment.source == Segment::Source::packed) {
      live.lead = (segment.first - head.sinks) % block_rows;
    }
    end = smaller(end, last - segment.position + 1);
    whole_end = larger(0, smaller(whole_end, first - segment.position + 1));
    if (segment.reach != unlimited) {
      begin = larger(begin, first - segment.reach + 1 - segment.position);
      whole_begin = larger(whole_begin, last - segment.reach + 1 - segment.position);
    }
  }
  if (begin < end) {
    live.begin = (live.lead + begin) / KeyRows;
    live.end = quotient_up(live.lead + end, KeyRows);
    live.whole_begin = quotient_up(live.lead + whole_begin, KeyRows);
    live.whole_end = (live.lead + whole_end) / KeyRows;
  }
  return live;
}

/// Counts the live tiles of a tile of queries, for list_segments.
template <int KeyRows>
struct TileCount : QueryTile {
  const HeadView& head;
  int tiles = 0;

  KVPOLICY_DEVICE void add(const Segment& segment) {
    const LiveSegment live = live_part<KeyRows>(head, segment, *this);
    tiles += live.end - live.begin;
  }
};

/// The live tiles of a tile of queries, in the order of the text. Lies in shared memory.
struct LiveTiles {
  int segments = 0;
  int tiles = 0;
  LiveSegment segment[most_segments];
};

/// Lists them, for list_segments.
template <int KeyRows>
struct TileList : QueryTile {
  const HeadView& head;
  LiveTiles& live;

  KVPOLICY_DEVICE void add(const Segment& segment) {
    const LiveSegment part = live_part<KeyRows>(head, segment, *this);
    if (part.begin == part.end) return;
    live.segment[live.segments++] = part;
    live.tiles += part.end - part.begin;
  }
};

/// Walks over live tiles.
struct TileCursor {
  int segment = 0;
  int tile = 0;

  /// To the `skip`-th live tile.
  KVPOLICY_DEVICE TileCursor(const LiveTiles& live, int skip) {
    while (segment + 1 < live.segments &&
           skip >= live.segment[segment].end - live.segment[segment].begin) {
      skip -= live.segment[segment].end - live.segment[segment].begin;
      ++segment;
    }
    tile = live.segment[segment].begin + skip;
  }
  /// The live tile after this one; at the end, some tile of the last segment.
  KVPOLICY_DEVICE TileCursor next(const LiveTiles& live) const {
    TileCursor after = *this;
    if (++after.tile == live.segment[segment].end && segment + 1 < live.segments) {
      after.tile = live.segment[++after.segment].begin;
    }
    return after;
  }
};

/// Three places in shared memory take turns: keys, their values, and the keys of the next tile,
/// whose values then replace these keys.
template <int HeadDim>
struct TileRing {
  using Shape = PrefillShape<HeadDim>;
  static constexpr int begin = Shape::query_bytes;
  static constexpr int last = begin + 2 * Shape::key_bytes;
  int at = begin;

  KVPOLICY_DEVICE int keys() const { return at; }
  KVPOLICY_DEVICE int values() const { return at == last ? begin : at + Shape::key_bytes; }
  KVPOLICY_DEVICE int spare() const { return at == begin ? last : at - Shape::key_bytes; }
  KVPOLICY_DEVICE void advance() { at = spare(); }
};

/// Share `split` of the attention of one tile of query rows of one KV head.
struct PrefillItem {
  int sequence = 0;
  int kv_head = 0;
  int tile = 0;
  int split = 0;

  KVPOLICY_DEVICE const HeadView& head(const AttendParams& params) const {
    return params.heads[sequence * params.kv_heads + kv_head];
  }
};

/// Brings exact rows and the call's own into shared memory. Each warp copies a share of a tile's
/// rows; each lane finds one row, once for its key and its value, and the warp passes addresses
/// round. Tiles that a segment does not fill repeat its first or last row.
template <int HeadDim>
struct RowLoader {
  using Shape = PrefillShape<HeadDim>;
  static constexpr int rows = Shape::key_rows / prefill_warps;  ///< of a warp
  static constexpr int passes = rows * Shape::chunks / warp_lanes;
  // Where a pass is whole rows, a lane's chunk and the low bits of its row stay the same.
  static constexpr bool whole_passes = warp_lanes % Shape::chunks == 0;
  static constexpr int pass_rows = warp_lanes / Shape::chunks;
  static_assert(rows <= warp_lanes && rows * Shape::chunks % warp_lanes == 0);

  const AttendParams& params;
  const PrefillItem& item;
  const std::byte* key = nullptr;  ///< of the lane's row of the next tile

  KVPOLICY_DEVICE int row_of_lane(const LiveSegment& live, int tile) const {
    // Lanes whose address goes to whole groups of lanes in the same pass stand apart by a group.
    const int row = whole_passes
                        ? lane_index() % Shape::chunks * pass_rows + lane_index() / Shape::chunks
                        : lane_index();
    const int column = tile * Shape::key_rows + warp_index() * rows + row % rows;
    const int i = larger(0, smaller(column - live.lead, live.segment.rows - 1));
    return live.segment.row(i);
  }

  KVPOLICY_DEVICE void find(const LiveSegment& live, int tile) {
    const int row = row_of_lane(live, tile);
    if (live.segment.source == Segment::Source::call) {
      key = reinterpret_cast<const std::byte*>(params.k.row(item.sequence, row, item.kv_head));
    } else {
      const HeadView& head = item.head(params);
      const int slot = head.exact_slot(row);
      key = head.exact_pages[slot / params.page_rows] +
            static_cast<long long>(slot % params.page_rows) * HeadDim * 2;
    }
  }

  KVPOLICY_DEVICE void load_keys(int tile_memory) const { copy(tile_memory, key); }

  KVPOLICY_DEVICE void load_values(int tile_memory, const LiveSegment& live, int tile) const {
    const std::byte* value = key + static_cast<long long>(params.page_rows) * HeadDim * 2;
    if (live.segment.source == Segment::Source::call) {
      value = reinterpret_cast<const std::byte*>(
          params.v.row(item.sequence, row_of_lane(live, tile), item.kv_head));
    }
    copy(tile_memory, value);
  }

 private:
  KVPOLICY_DEVICE void copy(int tile_memory, const std::byte* row_of_lane) const {
    const auto address = reinterpret_cast<unsigned long long>(row_of_lane);
    if constexpr (whole_passes) {
      const int row = lane_index() / Shape::chunks;
      const int chunk = lane_index() % Shape::chunks;
      const ChunkPlace<HeadDim> to{tile_memory, warp_index() * rows + row, chunk};
      KVPOLICY_UNROLL
      for (int pass = 0; pass < passes; ++pass) {
        cp_async_16(to.plus(pass * pass_rows, 0),
                    pointer(shuffle_within<Shape::chunks>(address, pass)) + chunk * 16, true);
      }
    } else {
      KVPOLICY_UNROLL
      for (int pass = 0; pass < passes; ++pass) {
        const int row = (pass * warp_lanes + lane_index()) / Shape::chunks;
        const int chunk = (pass * warp_lanes + lane_index()) % Shape::chunks;
        cp_async_16(tile_chunk<HeadDim>(tile_memory, warp_index() * rows + row, chunk),
                    pointer(shuffle(address, row)) + chunk * 16, true);
      }
    }
  }
  static KVPOLICY_DEVICE const std::byte* pointer(unsigned long long address) {
    return reinterpret_cast<const std::byte*>(address);
  }
};

}  // namespace kvpolicy::cuda
