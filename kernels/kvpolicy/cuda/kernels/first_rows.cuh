// SPDX-License-Identifier: Apache-2.0
//
// The rows that a warp reads first of a head. It requests them while the results of the head before are merged, which
// takes several barriers, and loads them when its queries are there: short texts' heads overlap so. The second-level
// cache holds them meanwhile, because registers hold results; so the page table is asked twice, the second time in the
// first-level cache. The first answer of the page table is not waited for: until rows are requested, what was loaded
// and what is added to it stay apart. Used by decode.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/decode_exact.cuh>
#include <kvpolicy/cuda/kernels/packed_tile.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

template <int HeadDim, bool Packed>
class FirstRows {
  static constexpr int line_bytes = 128;  // that one request brings

 public:
  /// Asks the page tables where those of `slice` are, if there are any. Called by all lanes.
  KVPOLICY_DEVICE FirstRows(const AttendParams& p, const BlockSlice& slice, bool any) {
    if (!any) return;
    UnitCursor at = UnitCursor::first(slice);
    if constexpr (Packed) {
      if (at.skip(slice, true, warp_index())) {
        find_codes(p, slice, at);
        return;
      }
      at = UnitCursor::first(slice);
    }
    if (at.skip(slice, false, warp_index())) find_numbers(p, slice, at);
  }

  KVPOLICY_DEVICE void request() const {
    KVPOLICY_UNROLL
    for (const Lines& own : lines_) own.request(base_ + from_base_);
  }

 private:
  using Address = unsigned long long;

  /// What a lane requests: a line every `step` bytes. `begin` and `end` are counted in bytes from the address that
  /// `request` is given. As it is made there is no line, wherever in a line that address is.
  struct Lines {
    unsigned begin = line_bytes;
    unsigned end = 0;
    unsigned step = line_bytes;

    /// Those of `bytes` bytes, divided among `lanes` lanes, of which this one is `lane`.
    KVPOLICY_DEVICE static Lines of(unsigned begin, int bytes, int lane = 0, int lanes = 1) {
      return {begin + static_cast<unsigned>(lane * line_bytes), begin + static_cast<unsigned>(bytes),
              static_cast<unsigned>(lanes * line_bytes)};
    }
    KVPOLICY_DEVICE void request(Address base) const {
      KVPOLICY_NO_UNROLL
      for (Address at = (base + begin) / line_bytes * line_bytes; at < base + end; at += step) {
        request_line(reinterpret_cast<const std::byte*>(at));
      }
    }
  };

  // Half of the lanes have the keys of a unit's rows, the others the values.
  KVPOLICY_DEVICE void find_numbers(const AttendParams& p, const BlockSlice& slice, const UnitCursor& at) {
    const DeviceSegment& segment = slice.list.segment[at.segment];
    const int row = row_of_lane(segment, at);
    const bool has_value = lane_index() >= tile_rows;
    unsigned place = 0;
    if (segment.source == DeviceSegment::Source::call) {
      const CallTokens& own = slice.tokens;
      const auto& rows = has_value ? p.v : p.k;
      base_ = reinterpret_cast<Address>(rows.row(own.sequence, own.first + row, slice.kv_head));
    } else {
      const int slot = slice.head.exact_slot(row);
      base_ = reinterpret_cast<Address>(slice.head.exact_pages[page_of(slot, p.page_rows)]);
      from_base_ = has_value ? static_cast<Address>(slice.head.exact_values_offset) : 0;
      place = static_cast<unsigned>(place_in_page(slot, p.page_rows) * slice.head.exact_row_stride);
    }
    lines_[0] = Lines::of(place, HeadDim * 2);
  }

  // Codes, scales and zeros of each tile are divided among lanes.
  KVPOLICY_DEVICE void find_codes(const AttendParams& p, const BlockSlice& slice, const UnitCursor& at) {
    const HeadView& head = slice.head;
    const Sides widths = head.widths();
    const int tiles = rows_of_unit(widths) / tile_rows;
    const TileAddress tile = address_of_tile(p, slice, at, tiles);
    base_ = tile.page;
    const PackedLayout layout = head.packed_layout(HeadDim, p.page_rows);
    const int lane = lane_index() / tiles;
    const int lanes = warp_lanes / tiles;
    const auto codes = [&](int offset, int tile_bytes, int width) {
      const int bytes = tile_rows * HeadDim * bits_read(width) / 8;
      const int skipped = width == upper_halves ? bytes : 0;
      return Lines::of(static_cast<unsigned>(offset + tile.row / tile_rows * tile_bytes + skipped), bytes,
                       lane, lanes);
    };
    lines_[0] = codes(0, layout.tile_bytes.keys, widths.keys);
    lines_[1] = codes(layout.values_offset, layout.tile_bytes.values, widths.values);
    // A tile's numbers of a group of channels lie in one line, which any of its bytes brings, and those of the next
    // group `page_rows` numbers further. The end is one after the first byte of the last group's.
    const auto grids = [&](int offset, int first, int groups) {
      const int begin = offset + 2 * first;
      return Lines{static_cast<unsigned>(begin + 2 * lane * p.page_rows),
                   static_cast<unsigned>(begin + 2 * (groups - 1) * p.page_rows + 1),
                   static_cast<unsigned>(2 * lanes * p.page_rows)};
    };
    const bool by_rows = head.key_per_channel;
    const int first_key = key_param(tile.row, 0, HeadDim, p.page_rows, by_rows, head.key_group);
    const auto key_grids = [&](int offset) {  // those of all channels of a group of keys follow each other
      return by_rows ? Lines::of(static_cast<unsigned>(offset + 2 * first_key), HeadDim * 2, lane, lanes)
                     : grids(offset, first_key, page_of(HeadDim, head.key_group));
    };
    lines_[2] = key_grids(layout.key_scales_offset);
    lines_[3] = key_grids(layout.key_zeros_offset);
    const int value_groups = page_of(HeadDim, head.value_group);
    lines_[4] = grids(layout.value_scales_offset, tile.row, value_groups);
    lines_[5] = grids(layout.value_zeros_offset, tile.row, value_groups);
  }

  Address base_ = 0;       ///< a page, or a row of the call's own
  Address from_base_ = 0;  ///< to the values, where they lie apart from the keys
  Lines lines_[Packed ? 6 : 1];
};

}  // namespace kvpolicy::gpu
