// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the prefill kernel: which tiles of keys a tile of queries needs, and how 16-bit rows are
// copied to shared memory.
//
// Rows of a shared tile consist of chunks of 16 bytes. The eight rows that a matrix load reads at
// one chunk must be in different banks. If rows are multiples of 128 bytes, the chunk's number is
// XORed with the row's; otherwise one padding chunk makes the pitch odd, which has the same effect.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

inline constexpr int prefill_warps = 4;
inline constexpr int prefill_threads = prefill_warps * warp_lanes;

template <int HeadDim>
struct ChunkRow;

/// Sizes of a block's work. What follows it in the kernels' other files takes such a shape, of which prefill_hopper.cuh
/// has another one. The unnormalised output takes 128 registers of a thread at head_dim 128 and at 256. Keys and values
/// pass through a ring of three tiles, so that two blocks fit into the 164 KiB of an A100's multiprocessor and the
/// softmax of one overlaps with the products of the other.
template <int HeadDim>
struct PrefillShape {
  using Chunk = ChunkRow<HeadDim>;
  static constexpr int head_dim = HeadDim;
  static constexpr int threads = prefill_threads;
  static constexpr int multiplying_threads = threads;
  static constexpr int first_loading_warp = 0;  ///< of those that copy keys and values
  static constexpr int loading_warps = prefill_warps;
  static constexpr int row_tiles = HeadDim <= 128 ? 2 : 1;  ///< tiles of 16 query rows per warp
  static constexpr int warp_rows = 16 * row_tiles;
  static constexpr int query_rows = prefill_warps * warp_rows;
  static constexpr int key_rows = HeadDim <= 128 ? 64 : 32;
  static constexpr int chunks = HeadDim / 8;  ///< chunks of a row
  static constexpr bool swizzled = chunks % 8 == 0;
  static constexpr int pitch = swizzled ? chunks : chunks + 1;
  static constexpr int query_bytes = query_rows * pitch * 16;
  static constexpr int key_bytes = key_rows * pitch * 16;
  static constexpr int stages = 3;
  static constexpr int tiles_bytes = query_bytes + stages * key_bytes;
  static_assert(chunks % 2 == 0 && query_bytes % 128 == 0 && key_bytes % 128 == 0);
};

/// A base address in a tile of shared memory, from which other addresses differ by constants. Added
/// rows and chunks must not carry into or out of the lowest three bits of the first ones, so that
/// swizzling stays one XOR and a kernel needs few registers for addresses.
template <int HeadDim>
struct ChunkRow {
  using Shape = PrefillShape<HeadDim>;
  int offset;

  /// `tile` is the offset of the tile, a multiple of 128.
  KVPOLICY_DEVICE ChunkRow(int tile, int row, int chunk)
      : offset{tile + (row * Shape::pitch + (Shape::swizzled ? chunk ^ (row % 8) : chunk)) * 16} {}

  KVPOLICY_DEVICE std::byte* plus(int rows, int chunks) const {
    const int swizzled =
        Shape::swizzled ? (offset ^ (chunks ^ rows) % 8 * 16) + chunks / 8 * 8 * 16 : offset + chunks * 16;
    return shared_memory() + swizzled + rows * Shape::pitch * 16;
  }
};

/// Address of chunk `chunk` of row `row` of the tile at offset `tile`.
template <class Shape>
KVPOLICY_DEVICE std::byte* tile_chunk(int tile, int row, int chunk) {
  return typename Shape::Chunk{tile, row, chunk}.plus(0, 0);
}

/// 2^31 / group, rounded up: with it a row is divided by the group in two instructions.
KVPOLICY_DEVICE std::uint32_t inverse_of(int group) {
  return (0x80000000U + static_cast<std::uint32_t>(group) - 1) / static_cast<std::uint32_t>(group);
}
/// Query rows of a KV head that a call may have, so that this division is exact for groups of up to 16.
inline constexpr long long most_query_rows = 1LL << 27;

/// A tile of query rows. The query rows of a KV head are its (token, query head) pairs, token by
/// token, so that the query heads of a group share each tile of keys.
struct QueryTile {
  int first = 0;  ///< first row
  int rows = 0;
  int group = 1;
  std::uint32_t inverse = 0;  ///< inverse_of(group)
  // For a call with a tree: the depth of each query, and the least and the greatest depth.
  const int* depths = nullptr;
  int lowest = 0;
  int highest = 0;
  int first_position = 0;  ///< position of row 0's token (not of `first`), or of depth 0

  KVPOLICY_DEVICE int token(int row) const { return token_of(smaller(first + row, first + rows - 1)); }
  KVPOLICY_DEVICE int head(int row) const { return first + row - token_of(first + row) * group; }
  /// Text position of a row of the tile; rows after the last have the position of the last.
  KVPOLICY_DEVICE int position(int row) const {
    return first_position + (depths == nullptr ? token(row) : depths[token(row)]);
  }
  /// A lower and an upper bound on the positions of all rows of the tile.
  KVPOLICY_DEVICE int first_row_position() const {
    return depths == nullptr ? position(0) : first_position + lowest;
  }
  KVPOLICY_DEVICE int last_row_position() const {
    return depths == nullptr ? position(rows - 1) : first_position + highest;
  }

 private:
  KVPOLICY_DEVICE int token_of(int row) const {
    return static_cast<int>(multiply_high(static_cast<std::uint32_t>(row) * 2, inverse));
  }
};

/// The queries that keys need: as they came, turned to another position (DeviceSegment::rotated), or rotated as
/// the keys were before they were quantised.
enum class QueryForm : std::uint8_t { plain, turned, hadamard };

/// A segment divided into tiles of consecutive rows. Column c of tile j is the segment's row
/// j * key_rows + c - lead.
struct LiveSegment {
  DeviceSegment segment;
  QueryForm queries = QueryForm::plain;
  bool rotated_values = false;  ///< as they were before they were quantised
  int lead = 0;
  int begin = 0;  ///< Tiles of which some query sees a row.
  int end = 0;
  int whole_begin = 0;  ///< Tiles of which all queries see all rows.
  int whole_end = 0;

  KVPOLICY_DEVICE bool cuts(int tile) const { return tile < whole_begin || tile >= whole_end; }
};

/// The visible tiles of a segment, and those among them that need no mask. Tiles of packed rows are
/// their blocks of 64 rows, so that a tile never crosses a page. A chunk list is visible as a
/// whole: its rows come before the call, unless they were selected in a call for the same tokens.
template <int KeyRows>
KVPOLICY_DEVICE LiveSegment live_part(const HeadView& head, const DeviceSegment& segment,
                                      const QueryTile& queries) {
  LiveSegment live{.segment = segment};
  if (segment.rows <= 0) return live;
  if (segment.rotated) live.queries = QueryForm::turned;
  if (segment.source == DeviceSegment::Source::packed) {
    if (head.key_hadamard) live.queries = QueryForm::hadamard;
    live.rotated_values = head.value_hadamard;
  }
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
    if (segment.source == DeviceSegment::Source::packed) {
      live.lead = (segment.first - head.sinks) % quantized_together;
    }
    end = smaller(end, last - segment.position + 1);
    whole_end = larger(0, smaller(whole_end, first - segment.position + 1));
    if (segment.window != unlimited) {
      begin = larger(begin, first - segment.window + 1 - segment.position);
      whole_begin = larger(whole_begin, last - segment.window + 1 - segment.position);
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

/// The visible tiles of a tile of queries, in the order of the text, in shared memory.
struct LiveTiles {
  int segments = 0;
  int tiles = 0;
  LiveSegment segment[most_segments];
};

/// Calls found(part) for each segment of a head of which the tile of queries sees a row, in the order of the text, and
/// sets the tile's text position. Segments are gathered in `list` first and divided in one loop: inlined where each is
/// found, the division would be much of the kernel's code.
template <int KeyRows, class Found>
KVPOLICY_DEVICE void for_each_live(const HeadView& head, const LayerState& state, const Request& request,
                                   QueryTile& queries, DeviceSegmentList& list, Found found) {
  list.count = 0;
  list_segments(head, state, request, list);
  queries.first_position = list.first_position;
  KVPOLICY_NO_UNROLL
  for (int i = 0; i < list.count; ++i) {
    const LiveSegment part = live_part<KeyRows>(head, list.segment[i], queries);
    if (part.begin < part.end) found(part);
  }
}

/// Iterates over visible tiles.
struct TileCursor {
  int segment = 0;
  int tile = 0;

  /// Moves to visible tile number `skip`.
  KVPOLICY_DEVICE TileCursor(const LiveTiles& live, int skip) {
    while (segment + 1 < live.segments && skip >= live.segment[segment].end - live.segment[segment].begin) {
      skip -= live.segment[segment].end - live.segment[segment].begin;
      ++segment;
    }
    tile = live.segment[segment].begin + skip;
  }
  /// Moves to the next visible tile; at the end, to some tile of the last segment.
  KVPOLICY_DEVICE TileCursor next(const LiveTiles& live) const {
    TileCursor after = *this;
    if (++after.tile == live.segment[segment].end && segment + 1 < live.segments) {
      after.tile = live.segment[++after.segment].begin;
    }
    return after;
  }
};

/// Three buffers in shared memory rotate: keys, their values, and the keys of the next tile, whose
/// values then replace the first keys.
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

/// Split `split` of the attention of one tile of query rows of one KV head.
struct PrefillItem {
  HeadView head = {};            ///< beside the tiles, because every tile's addresses need it
  Request request = {};          ///< of the head's sequence
  CallTokens tokens = {};        ///< of the head's sequence
  float* log_sum_exp = nullptr;  ///< of the head's sequence, or null
  int index = 0;                 ///< among all items, for tickets and slots
  int kv_head = 0;
  int tile = 0;
  int split = 0;
};

/// Copies exact rows and the call's rows to shared memory. Each warp copies a part of a tile's
/// rows; each lane computes the address of one row, for both key and value, and passes it to the
/// other lanes. A tile that a segment does not fill repeats the segment's first or last row.
template <class Shape>
struct RowLoader {
  static constexpr int rows = Shape::key_rows / Shape::loading_warps;  ///< rows for each warp
  static constexpr int passes = rows * Shape::chunks / warp_lanes;
  // If a pass copies whole rows, a lane's chunk and the low bits of its row stay the same.
  static constexpr bool whole_passes = warp_lanes % Shape::chunks == 0;
  static constexpr int pass_rows = warp_lanes / Shape::chunks;
  static_assert(rows <= warp_lanes && rows * Shape::chunks % warp_lanes == 0);

  const AttendParams& params;
  const PrefillItem& item;
  // The key of the lane's row of the next tile. They are added up where it is copied: the page's address is requested a
  // tile ahead, and nothing before waits for it.
  const std::byte* page = nullptr;
  int place = 0;

  KVPOLICY_DEVICE int row_of_lane(const LiveSegment& live, int tile) const {
    // Lanes whose addresses go to whole groups of lanes in one pass are a group apart.
    const int row =
        whole_passes ? lane_index() % Shape::chunks * pass_rows + lane_index() / Shape::chunks : lane_index();
    const int column = tile * Shape::key_rows + first_row() + row % rows;
    const int i = larger(0, smaller(column - live.lead, live.segment.rows - 1));
    return live.segment.row(i);
  }

  KVPOLICY_DEVICE void find(const LiveSegment& live, int tile) {
    const int row = row_of_lane(live, tile);
    if (live.segment.source == DeviceSegment::Source::call) {
      page = reinterpret_cast<const std::byte*>(
          params.k.row(item.tokens.sequence, item.tokens.first + row, item.kv_head));
      place = 0;
    } else {
      const int slot = item.head.exact_slot(row);
      page = item.head.exact_pages[page_of(slot, params.page_rows)];
      place = place_in_page(slot, params.page_rows) * item.head.exact_row_stride;
    }
  }

  KVPOLICY_DEVICE void load_keys(int tile_memory) const { copy(tile_memory, page + place); }

  KVPOLICY_DEVICE void load_values(int tile_memory, const LiveSegment& live, int tile) const {
    const std::byte* value =
        live.segment.source == DeviceSegment::Source::call
            ? reinterpret_cast<const std::byte*>(params.v.row(
                  item.tokens.sequence, item.tokens.first + row_of_lane(live, tile), item.kv_head))
            : page + place + item.head.exact_values_offset;
    copy(tile_memory, value);
  }

 private:
  KVPOLICY_DEVICE static int first_row() { return (warp_index() - Shape::first_loading_warp) * rows; }

  KVPOLICY_DEVICE void copy(int tile_memory, const std::byte* row_of_lane) const {
    const auto address = reinterpret_cast<unsigned long long>(row_of_lane);
    if constexpr (whole_passes) {
      const int row = lane_index() / Shape::chunks;
      const int chunk = lane_index() % Shape::chunks;
      const typename Shape::Chunk to{tile_memory, first_row() + row, chunk};
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
        cp_async_16(tile_chunk<Shape>(tile_memory, first_row() + row, chunk),
                    pointer(shuffle(address, row)) + chunk * 16, true);
      }
    }
  }
  static KVPOLICY_DEVICE const std::byte* pointer(unsigned long long address) {
    return reinterpret_cast<const std::byte*>(address);
  }
};

}  // namespace kvpolicy::gpu
