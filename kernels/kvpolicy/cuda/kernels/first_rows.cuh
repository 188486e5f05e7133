// SPDX-License-Identifier: Apache-2.0
//
// The rows that a warp reads first of a head. It requests them while the results of the head before are merged, which
// takes several barriers, and loads them when its queries are there: short texts' heads overlap so. The second-level
// cache holds them meanwhile, because registers hold results. Used by decode.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/decode_exact.cuh>
#include <kvpolicy/cuda/kernels/packed_tile.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

template <int HeadDim, bool Packed>
class FirstRows {
  static constexpr int line_bytes = 128;  // that one request brings

 public:
  /// Asks the page tables where those of `slice` are, if there are any; the answers are needed by `request` alone.
  /// Called by all lanes.
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
    keys_.request();
    values_.request();
  }

 private:
  /// Those of a lane: lines `step` bytes apart, of `bytes` bytes.
  struct Lines {
    unsigned long long begin = 0;
    int bytes = 0;
    int step = line_bytes;

    KVPOLICY_DEVICE void request() const {
      KVPOLICY_NO_UNROLL
      for (int offset = 0; offset < bytes; offset += step) {
        request_line(reinterpret_cast<const std::byte*>(begin) + offset);
      }
    }
  };

  // Half of the lanes have the keys of a unit's rows, the others the values.
  KVPOLICY_DEVICE void find_numbers(const AttendParams& p, const BlockSlice& slice, const UnitCursor& at) {
    const RowAddress address = address_of_row<HeadDim>(p, slice, at);
    keys_ = {.begin = lane_index() < tile_rows ? address.key : address.value, .bytes = HeadDim * 2};
  }

  // Each tile's lines are divided among lanes.
  KVPOLICY_DEVICE void find_codes(const AttendParams& p, const BlockSlice& slice, const UnitCursor& at) {
    const Sides widths = slice.head.widths();
    const int tiles = rows_of_unit(widths) / tile_rows;
    const TileAddress tile = address_of_tile(p, slice, at, tiles);
    const PackedLayout layout = slice.head.packed_layout(HeadDim, p.page_rows);
    const auto lines = [&](int offset, int tile_bytes, int width) {
      const int bytes = tile_rows * HeadDim * bits_read(width) / 8;
      const int skipped = width == upper_halves ? bytes : 0;
      const int mine = lane_index() / tiles * line_bytes;
      return Lines{.begin = tile.page + static_cast<unsigned>(offset + tile.row / tile_rows * tile_bytes +
                                                              skipped + mine),
                   .bytes = bytes - mine,
                   .step = warp_lanes / tiles * line_bytes};
    };
    keys_ = lines(0, layout.tile_bytes.keys, widths.keys);
    values_ = lines(layout.values_offset, layout.tile_bytes.values, widths.values);
  }

  Lines keys_;
  Lines values_;
};

}  // namespace kvpolicy::cuda
