// SPDX-License-Identifier: Apache-2.0
//
// One warp reads the quantised rows of a block's share of a head. Codes are converted to half in
// registers and multiplied with the queries in half. If a row has one scale and one zero, these are
// applied to the product instead of to the codes. Used by decode.cuh.
#pragma once

#include <type_traits>

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/decode_queries.cuh>
#include <kvpolicy/cuda/kernels/fragments.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>

namespace kvpolicy::cuda {

/// Where a tile of 16 quantised rows is. Lane i has the value for tile i % (rows_of_unit / 16).
struct TileAddress {
  unsigned long long page;
  int row;  ///< index in the page

  /// The value of another lane.
  KVPOLICY_DEVICE TileAddress of(int lane) const { return {shuffle(page, lane), shuffle(row, lane)}; }
  KVPOLICY_DEVICE const std::byte* at(int offset) const {
    return reinterpret_cast<const std::byte*>(page) + offset;
  }
};

/// All rows of a tile are written together, so a tile can be read whole even if a call needs only
/// some of its rows. Chunks are whole tiles; beyond the end of a list its last tile is repeated.
template <int Tiles>
KVPOLICY_DEVICE TileAddress address_of_tile(const AttendParams& p, const BlockSlice& slice,
                                            const UnitCursor& at) {
  const DeviceSegment& segment = slice.list.segment[at.segment];
  const int i = (at.unit * Tiles + lane_index() % Tiles) * tile_rows;
  const int row = segment.chunks == nullptr ? segment.first - slice.skipped[at.segment] + i
                                            : segment.row(smaller(i, segment.rows - tile_rows));
  const int slot = slice.head.packed_slot(row);
  return {reinterpret_cast<unsigned long long>(slice.head.packed_pages[page_of(slot, p.page_rows)]),
          slot & (p.page_rows - 1)};
}

/// Scales and zeros of a unit whose rows have one of each. They are loaded once, in one contiguous
/// read, and passed between lanes by shuffle.
template <int UnitRows>
struct RowGrids {
  std::uint32_t key[UnitRows / warp_lanes];  ///< for row 32 i + lane: scale, zero
  std::uint32_t value_scale;                 ///< for rows 2 (lane % (UnitRows / 2)) and + 1
  std::uint32_t value_zero;

  /// `offset` is that of the page's key scales; key zeros, value scales and value zeros follow.
  KVPOLICY_DEVICE void load_keys(const TileAddress& address, int offset, int page_rows) {
    KVPOLICY_UNROLL
    for (int i = 0; i < UnitRows / warp_lanes; ++i) {
      const TileAddress tile = address.of(2 * i + lane_index() / tile_rows);
      const auto* scale =
          reinterpret_cast<const std::uint16_t*>(tile.at(offset)) + tile.row + lane_index() % tile_rows;
      key[i] = permute_bytes(load_once(scale), load_once(scale + page_rows), 0x5410);
    }
  }
  KVPOLICY_DEVICE void load_values(const TileAddress& address, int offset, int page_rows) {
    const int pair = lane_index() % (UnitRows / 2);
    const TileAddress tile = address.of(pair / 8);
    const auto* scales =
        reinterpret_cast<const std::uint16_t*>(tile.at(offset)) + 2 * page_rows + tile.row + pair % 8 * 2;
    value_scale = load_once(reinterpret_cast<const Words1*>(scales)).word[0];
    value_zero = load_once(reinterpret_cast<const Words1*>(scales + page_rows)).word[0];
  }

  KVPOLICY_DEVICE std::uint32_t of_key(int row) const {
    return shuffle(key[row / warp_lanes], row % warp_lanes + lane_index() / 4);
  }
};

/// Scales and zeros of groups: rows of channels, or channels of rows.
template <int HeadDim>
struct GroupGrids {
  PackedLayout layout;
  bool per_channel;
  int key_group;
  int value_group;
  int page_rows;

  /// Loads those of a tile's keys, for the registers of steps 2 * pair and + 1.
  KVPOLICY_DEVICE void of_keys(std::uint32_t (&scale)[2][4], std::uint32_t (&zero)[2][4],
                               const TileAddress& tile, int pair) const {
    const int g = lane_index() / 4;
    const int channel = pair * 32 + lane_index() % 4 * 8;
    const int first = key_param(tile.row, channel, HeadDim, page_rows, per_channel, key_group);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(tile.at(layout.key_scales_offset)) + first;
    const auto* zeros = reinterpret_cast<const std::uint16_t*>(tile.at(layout.key_zeros_offset)) + first;
    if (per_channel) {
      const Words4 s = *reinterpret_cast<const Words4*>(scales);
      const Words4 z = *reinterpret_cast<const Words4*>(zeros);
      KVPOLICY_UNROLL
      for (int i = 0; i < 8; ++i) {
        scale[i / 4][i % 4] = s.word[i / 4 * 2 + i % 4 / 2];
        zero[i / 4][i % 4] = z.word[i / 4 * 2 + i % 4 / 2];
      }
    } else {
      KVPOLICY_UNROLL
      for (int upper = 0; upper < 2; ++upper) {
        const std::uint32_t s = twice(scales[g + 8 * upper]);
        const std::uint32_t z = twice(zeros[g + 8 * upper]);
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          scale[i / 2][i % 2 * 2 + upper] = s;
          zero[i / 2][i % 2 * 2 + upper] = z;
        }
      }
    }
  }
  /// Loads those of a tile's values, for the registers of steps 4 * block .. 4 * block + 3: [row
  /// pair].
  KVPOLICY_DEVICE void of_values(std::uint32_t (&scale)[2], std::uint32_t (&zero)[2], const TileAddress& tile,
                                 int block) const {
    const int channel = block * 64 + lane_index() / 4 * 8;
    const int first = value_param(tile.row, channel, page_rows, value_group) + lane_index() % 4 * 2;
    const auto* scales =
        reinterpret_cast<const std::uint32_t*>(tile.at(layout.value_scales_offset + 2 * first));
    const auto* zeros =
        reinterpret_cast<const std::uint32_t*>(tile.at(layout.value_zeros_offset + 2 * first));
    KVPOLICY_UNROLL
    for (int upper = 0; upper < 2; ++upper) {
      scale[upper] = scales[4 * upper];
      zero[upper] = zeros[4 * upper];
    }
  }
};

template <int Bits, int HeadDim, int ColumnTiles, int Warps, bool OneGroup>
KVPOLICY_DEVICE void attend_packed(const AttendParams& p, const BlockSlice& slice, const std::byte* queries,
                                   const CodeColumn* columns, OnlineSoftmax<HeadDim, ColumnTiles>& softmax) {
  using Queries = QueryOperands<HeadDim, ColumnTiles>;
  constexpr int unit_rows = Bits == 8 ? 32 : 64;
  constexpr int tiles = unit_rows / tile_rows;
  const int t = lane_index() % 4;
  const HeadView& head = slice.head;
  const GroupGrids<HeadDim> groups{
      .layout{Bits, HeadDim, p.page_rows, !OneGroup && head.key_per_channel,
              OneGroup ? HeadDim : head.key_group, OneGroup ? HeadDim : head.value_group},
      .per_channel = head.key_per_channel,
      .key_group = head.key_group,
      .value_group = head.value_group,
      .page_rows = p.page_rows};

  CodeTile<Bits, HeadDim> keys[tiles];
  CodeTile<Bits, HeadDim> values[tiles];
  RowGrids<unit_rows> grids;
  const auto load_keys = [&](const TileAddress& address) {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      const TileAddress from = address.of(tile);
      keys[tile].load(from.at(from.row / tile_rows * groups.layout.tile_bytes));
    }
    if constexpr (OneGroup) grids.load_keys(address, groups.layout.key_scales_offset, p.page_rows);
  };
  const auto load_values = [&](const TileAddress& address) {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      const TileAddress from = address.of(tile);
      values[tile].load(
          from.at(groups.layout.values_offset + from.row / tile_rows * groups.layout.tile_bytes));
    }
    if constexpr (OneGroup) grids.load_values(address, groups.layout.key_scales_offset, p.page_rows);
  };

  // The order of loads is that of decode_exact.cuh.
  constexpr bool overlaps = HeadDim * (1 + ColumnTiles) < 384;
  UnitCursor at = UnitCursor::first(slice);
  bool more = at.skip(slice, true, warp_index());
  if (!more) return;
  TileAddress address = address_of_tile<tiles>(p, slice, at);
  load_keys(address);
  if constexpr (overlaps) load_values(address);
  while (more) {
    const UnitCursor now = at;
    const TileAddress here = address;
    more = at.skip(slice, true, Warps);
    if (more) address = address_of_tile<tiles>(p, slice, at);

    float logits[tiles][ColumnTiles][4] = {};
    KVPOLICY_UNROLL
    for (int pair = 0; pair < HeadDim / 32; ++pair) {
      Words4 q[ColumnTiles];
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) q[n] = Queries::of_steps(queries, pair, n);
      KVPOLICY_UNROLL
      for (int tile = 0; tile < tiles; ++tile) {
        std::uint32_t scale[2][4];
        std::uint32_t zero[2][4];
        if constexpr (!OneGroup) groups.of_keys(scale, zero, here.of(tile), pair);
        KVPOLICY_UNROLL
        for (int step = 0; step < 2; ++step) {
          std::uint32_t a[4];
          keys[tile].operand(a, 2 * pair + step);
          if constexpr (!OneGroup) {
            KVPOLICY_UNROLL
            for (int reg = 0; reg < 4; ++reg) {
              a[reg] = half2_multiply_add(a[reg], scale[step][reg], zero[step][reg]);
            }
          }
          KVPOLICY_UNROLL
          for (int n = 0; n < ColumnTiles; ++n) {
            multiply_add<half>(logits[tile][n], a, q[n].word[2 * step], q[n].word[2 * step + 1]);
          }
        }
      }
    }
    KVPOLICY_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      std::uint32_t grid[2] = {};
      if constexpr (OneGroup) {
        grid[0] = grids.of_key(tile * tile_rows);
        grid[1] = grids.of_key(tile * tile_rows + 8);
      }
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          const CodeColumn column = columns[n * tile_columns + 2 * t + i % 2];
          if constexpr (OneGroup) {
            const float scale = to_float<half>(static_cast<std::uint16_t>(grid[i / 2]));
            const float zero = to_float<half>(static_cast<std::uint16_t>(grid[i / 2] >> 16));
            logits[tile][n][i] = logits[tile][n][i] * scale + zero * column.sum;
          }
          logits[tile][n][i] *= column.scale;
        }
      }
    }
    if (overlaps && more) load_keys(address);
    cap_and_mask(logits, p, slice, now.segment, now.unit * unit_rows - slice.skipped[now.segment]);
    softmax.weigh(logits);
    if constexpr (!overlaps) load_values(here);

    KVPOLICY_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      std::uint32_t weights[ColumnTiles][2];
      weight_operands<half>(weights, logits[tile]);
      std::uint32_t scale[2], zero[2];
      if constexpr (OneGroup) {
        KVPOLICY_UNROLL
        for (int upper = 0; upper < 2; ++upper) {
          const int lane = tile * 8 + upper * 4 + t;
          scale[upper] = shuffle(grids.value_scale, lane);
          zero[upper] = shuffle(grids.value_zero, lane);
        }
      }
      KVPOLICY_UNROLL
      for (int step = 0; step < HeadDim / 16; ++step) {
        if constexpr (!OneGroup) {
          if (step % 4 == 0) groups.of_values(scale, zero, here.of(tile), step / 4);
        }
        std::uint32_t a[4];
        values[tile].operand(a, step);
        KVPOLICY_UNROLL
        for (int reg = 0; reg < 4; ++reg) {
          a[reg] = half2_multiply_add(a[reg], scale[reg / 2], zero[reg / 2]);
        }
        softmax.template add<half>(step, a, weights);
      }
    }
    if (more) {
      if constexpr (overlaps) {
        load_values(address);
      } else {
        load_keys(address);
      }
    }
  }
}

/// Dispatches by the head's encoding and groups.
template <int HeadDim, int ColumnTiles, int Warps>
KVPOLICY_DEVICE void attend_packed(const AttendParams& p, const BlockSlice& slice, const std::byte* queries,
                                   const CodeColumn* columns, OnlineSoftmax<HeadDim, ColumnTiles>& softmax) {
  const HeadView& head = slice.head;
  const bool one_group = !head.key_per_channel && head.key_group == HeadDim && head.value_group == HeadDim;
  const auto run = [&](auto bits) {
    constexpr int Bits = decltype(bits)::value;
    if (one_group) {
      attend_packed<Bits, HeadDim, ColumnTiles, Warps, true>(p, slice, queries, columns, softmax);
    } else {
      attend_packed<Bits, HeadDim, ColumnTiles, Warps, false>(p, slice, queries, columns, softmax);
    }
  };
  if (head.encoding == Encoding::uint8) {
    run(std::integral_constant<int, 8>{});
  } else if (head.encoding == Encoding::uint4) {
    run(std::integral_constant<int, 4>{});
  } else {
    run(std::integral_constant<int, 2>{});
  }
}

}  // namespace kvpolicy::cuda
