// SPDX-License-Identifier: Apache-2.0
//
// How one warp gets a unit of quantised rows, for decode_packed.cuh. Codes go to registers. Scales
// and zeros go to registers if a row has one of each. Otherwise they are copied to shared memory,
// from which a lane reads what it needs. Either way they are requested together with the codes.
#pragma once

#include <type_traits>

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/fragments.cuh>

namespace kvpolicy::gpu {

/// Which scales the rows of a head have.
enum class Grouping {
  row,       ///< one for each key and each value
  channels,  ///< one for each group of channels of a key, and the same for values
  rows,      ///< one for each channel of a group of keys; for values as `channels`
};

/// The shape of a head's quantised rows, as far as code is compiled for it. Bits are those of a pair that
/// `has_own_shape` allows, or any_width for both. `Finest` is the smallest group that is served: 32 channels or
/// rows; else 8 channels, and every tile of keys has scales of its own.
template <int KeyBits, int ValueBits, int Channels, Grouping Groups, int Finest>
struct PackedShape {
  static constexpr Sides bits{KeyBits, ValueBits};
  static constexpr int head_dim = Channels;
  static constexpr Grouping grouping = Groups;
  static constexpr int finest = Finest;
  static constexpr int rows = rows_of_unit(bits);  ///< that a warp reads at a time
  static constexpr int tiles = rows / tile_rows;
  static constexpr bool widens = KeyBits == any_width;
  using KeyTile = std::conditional_t<widens, AnyCodeTile<head_dim>, CodeTile<KeyBits, head_dim>>;
  using ValueTile = std::conditional_t<widens, AnyCodeTile<head_dim>, CodeTile<ValueBits, head_dim>>;
};

/// Where a tile of 16 quantised rows is. Lane i has the value for tile i % tiles of the unit.
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
KVPOLICY_DEVICE TileAddress address_of_tile(const AttendParams& p, const BlockSlice& slice,
                                            const UnitCursor& at, int tiles) {
  const DeviceSegment& segment = slice.list.segment[at.segment];
  const int i = (at.unit * tiles + lane_index() % tiles) * tile_rows;
  const int row = segment.chunks == nullptr ? segment.first - slice.skipped[at.segment] + i
                                            : segment.row(smaller(i, segment.rows - tile_rows));
  const int slot = slice.head.packed_slot(row);
  return {reinterpret_cast<unsigned long long>(slice.head.packed_pages[page_of(slot, p.page_rows)]),
          place_in_page(slot, p.page_rows)};
}

/// Loads this lane's codes of a unit, which are read with `width`; `offset` is where a page has those of row 0.
template <class Tile, int Tiles>
KVPOLICY_DEVICE void load_codes(Tile (&codes)[Tiles], const TileAddress& address, int offset, int width,
                                int lane) {
  const int first = width == upper_halves ? tile_rows * Tile::head_dim * 4 / 8 : 0;  // in a tile
  const int tile_bytes = tile_rows * Tile::head_dim * bits_stored(width) / 8;
  const auto* mine = address.at(offset + address.row / tile_rows * tile_bytes + first);
  Tile::with_bits(bits_read(width), [&](auto known) KVPOLICY_INLINE_LAMBDA {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      const auto* from =
          reinterpret_cast<const std::byte*>(shuffle(reinterpret_cast<unsigned long long>(mine), tile));
      codes[tile].load(known, from, lane);
    }
  });
}
/// Before the codes of a unit are multiplied.
template <class Tile, int Tiles>
KVPOLICY_DEVICE void widen_codes(Tile (&codes)[Tiles], int width) {
  KVPOLICY_UNROLL
  for (int tile = 0; tile < Tiles; ++tile) codes[tile].widen(width);
}

/// Scales and zeros of a unit whose rows have one of each. They are loaded once, in one contiguous
/// read, and passed between lanes by shuffle.
template <int UnitRows>
struct RowGrids {
  std::uint32_t word[UnitRows / warp_lanes];  ///< for row 32 i + lane: zero, scale

  /// `offset` is where a page has the scale of row 0. The zeros follow the scales.
  KVPOLICY_DEVICE void load(const TileAddress& address, int offset, int page_rows, int lane) {
    KVPOLICY_UNROLL
    for (int i = 0; i < UnitRows / warp_lanes; ++i) {
      const TileAddress tile = address.of(2 * i + lane / tile_rows);
      const auto* scale =
          reinterpret_cast<const std::uint16_t*>(tile.at(offset)) + tile.row + lane % tile_rows;
      word[i] = permute_bytes(load_once(scale + page_rows), load_once(scale), 0x5410);
    }
  }
  /// That of row `row` + lane / 4.
  KVPOLICY_DEVICE std::uint32_t of(int row, int lane) const {
    return shuffle(word[row / warp_lanes], row % warp_lanes + lane / 4);
  }
};

/// A half of a word as float.
KVPOLICY_DEVICE float low_half(std::uint32_t word) {
  return to_float<float16>(static_cast<std::uint16_t>(word));
}
KVPOLICY_DEVICE float high_half(std::uint32_t word) {
  return to_float<float16>(static_cast<std::uint16_t>(word >> 16));
}

/// What is the same in all units of a head.
struct PackedHead {
  const AttendParams& p;
  const BlockSlice& slice;
  Sides widths;
  PackedLayout layout;
  CodeQueries queries;
  std::byte* stage;  ///< this warp's shared memory for scales and zeros
  int lane;          ///< lane_index(), but unforeseen
};

/// Scales and zeros of a unit whose rows have groups of channels, in shared memory:
/// [side, group, row], with some room after each group so that matrix loads meet no bank twice.
template <class Shape>
struct GroupGrids {
  static constexpr int most = Shape::head_dim / Shape::finest;  ///< groups
  static constexpr int pitch = Shape::rows * 2 + 16;
  static constexpr int zeros_at = most * pitch;
  static constexpr int bytes = 2 * zeros_at;
  static constexpr int chunks = Shape::rows / 8;  ///< copies of 16 bytes for a group
  static constexpr int groups_at_once = warp_lanes / chunks;
  static constexpr int passes = (most + groups_at_once - 1) / groups_at_once;

  std::byte* memory;
  int group_channels;
  int lane;

  KVPOLICY_DEVICE int group_of(int channel) const { return page_of(channel, group_channels); }
  KVPOLICY_DEVICE std::byte* scales_of(int group) const { return memory + group * pitch; }

  /// Calls `visit(group, chunk)` for what this lane copies: scales of rows 8 chunk .. 8 chunk + 7.
  template <class Visit>
  KVPOLICY_DEVICE void each(Visit visit) const {
    KVPOLICY_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
      const int group = pass * groups_at_once + lane / chunks;
      if (group * group_channels < Shape::head_dim) visit(group, lane % chunks);
    }
  }
  /// Offsets are those of a page's first scale and first zero.
  KVPOLICY_DEVICE void copy(const TileAddress& address, int scales_offset, int zeros_offset, int page_rows) {
    const int chunk = lane % chunks;
    const TileAddress tile = address.of(chunk / 2);
    const std::byte* from = tile.at((tile.row + chunk % 2 * 8) * 2);
    each([&](int group, int) {
      const auto at =
          static_cast<unsigned>(group * page_rows * 2);  // takes a register less than a signed number
      cp_async_16(scales_of(group) + chunk * 16, from + (at + static_cast<unsigned>(scales_offset)), true);
      cp_async_16(scales_of(group) + zeros_at + chunk * 16, from + (at + static_cast<unsigned>(zeros_offset)),
                  true);
    });
  }
};

}  // namespace kvpolicy::gpu
