// SPDX-License-Identifier: Apache-2.0
//
// The layout of rows in the pages of a device cache.
//
// A page holds keys and values of `page_rows` rows of one KV head. Exact rows are plain: keys
// [page_rows, head_dim], then values. Quantised rows are in fragment order: they form tiles of 16
// rows, in which one 16-byte load gives each lane of a warp the operands of several matrix products
// without an exchange between lanes (the idea is BitDecoding's, arXiv:2503.18773; the order is our
// own). After the codes come the scales and zeros in half: first those of the keys, then those of
// the values, each [groups, page_rows] per token or [page_rows / group, head_dim] per channel. A
// page takes as many bytes as the two pages of core/segment.hpp's PageLayout together.
//
// The order follows from multiply_add (simt.cuh) with S^T = K q^T and O^T = V^T P^T, in which
// tokens are the rows and queries are the few columns. The assignment of channels to inner indices
// is free as long as both operands agree; it is chosen so that exact rows also load 16 bytes at a
// time.
//
// A tile of codes in halves has its lower halves first, then its upper ones, either in the order of a tile of 4-bit
// codes. After the other scales and zeros come those with which upper halves stand for their rows by themselves.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

inline constexpr int tile_rows = 16;           ///< Rows of a matrix tile.
inline constexpr int quantized_together = 64;  ///< Rows that are quantised together; divides page_rows.

/// The page of a slot; `page_rows` is a power of two.
KVPOLICY_DEVICE int page_of(int slot, int page_rows) {
  return slot >> count_bits(static_cast<std::uint32_t>(page_rows - 1));
}
/// The same slot's place in the page.
KVPOLICY_DEVICE int place_in_page(int slot, int page_rows) { return slot & (page_rows - 1); }

/// The width of codes, as kernels read them: their bits, or one of two ways to read those in halves.
inline constexpr int in_halves = 0x100;
inline constexpr int both_halves = in_halves | 8;
inline constexpr int upper_halves = in_halves | 4;

/// The bits of a code that is read with a width, and those that it has in a tile.
KVPOLICY_HOST_DEVICE constexpr int bits_read(int width) { return width & ~in_halves; }
KVPOLICY_HOST_DEVICE constexpr int bits_stored(int width) { return (width & in_halves) != 0 ? 8 : width; }

/// The width of the codes of one side of a HeadView.
KVPOLICY_HOST_DEVICE constexpr int code_width(Encoding encoding) {
  switch (encoding) {
    case Encoding::uint4x2: return both_halves;
    case Encoding::uint8: return 8;
    case Encoding::uint6: return 6;
    case Encoding::uint5: return 5;
    case Encoding::uint4: return 4;
    case Encoding::uint3: return 3;
    default: return 2;  // no view has another encoding (served_rule.hpp's `packed_widths`)
  }
}

/// A number for a head's keys, and one for its values.
struct Sides {
  int keys = 0;
  int values = 0;

  KVPOLICY_HOST_DEVICE constexpr int of(bool key) const { return key ? keys : values; }
};

/// Identifies one number of a tile in a lane: the low or high half of register `reg` (of
/// multiply_add's a) of step `step`. A step is one product: for keys along the channels (head_dim /
/// 16 steps), for values one for each 16 channels of output.
struct TileOffset {
  int lane;
  int step;
  int reg;
  int high;
};

/// Where a tile has a key of rows 0..15. A lane's 8 neighbouring channels serve two steps. If 32
/// does not divide head_dim, the last 16 channels serve one step, with 4 channels a lane.
KVPOLICY_HOST_DEVICE constexpr TileOffset offset_of_key(int row, int channel, int head_dim) {
  const bool tail = channel >= head_dim / 32 * 32;
  const int lane_channels = tail ? 4 : 8;
  const int in_block = channel % 32;
  const int in_lane = in_block % lane_channels;
  return {.lane = row % 8 * 4 + in_block / lane_channels,
          .step = channel / 32 * 2 + in_lane / 4,
          .reg = row / 8 + in_lane % 4 / 2 * 2,
          .high = in_lane % 2};
}

/// Where a tile has a value of rows 0..15. A lane has 8 neighbouring channels of each 64 (4 of the
/// last 32, 2 of the last 16), two for each step.
KVPOLICY_HOST_DEVICE constexpr TileOffset offset_of_value(int row, int channel, int head_dim) {
  const int left = head_dim - channel / 64 * 64;
  const int lane_channels = left >= 64 ? 8 : left / 8;
  const int in_block = channel % 64;
  const int in_lane = in_block % lane_channels;
  return {.lane = in_block / lane_channels * 4 + row % 8 / 2,
          .step = channel / 64 * 4 + in_lane / 2,
          .reg = in_lane % 2 + row / 8 * 2,
          .high = row % 2};
}

/// Some neighbouring bits of every code of a tile. Codes of 2, 4 and 8 bits are one part. Those of 3, 5 and 6 bits are
/// two, one after the other: their lower 2 or 4 bits, then the upper 1 or 2. So are codes in halves. A shift and a mask
/// take a word of codes with `whole` bits of room each from either part, so that the two need only be joined.
struct TilePart {
  int bits;   ///< of a code
  int shift;  ///< where the code has them
  int whole;  ///< 2, 4 or 8
  int first;  ///< bits of each code that the tile has before this part
};

/// How many parts of a tile of codes are read with a width.
KVPOLICY_HOST_DEVICE constexpr int tile_parts(int width) {
  return width == 3 || width == 5 || width == 6 || width == both_halves ? 2 : 1;
}
/// One of them.
KVPOLICY_HOST_DEVICE constexpr TilePart tile_part(int width, int part) {
  if (width == upper_halves) return {4, 0, 8, 4};
  const int bits = bits_read(width);
  const int whole = bits > 4 ? 8 : bits > 2 ? 4 : 2;
  const int lower = tile_parts(width) == 1 ? bits : whole / 2;
  return part == 0 ? TilePart{lower, 0, whole, 0} : TilePart{bits - lower, lower, whole, lower};
}

/// Bit address of a part of a code inside its tile, from the tile's first byte. Each lane's words of a part
/// form vectors of up to four words; the vectors of all lanes are contiguous.
///
/// In a word, the two numbers of a register are 16 bits apart, so that a mask leaves both at the
/// position of half's mantissa. 8-bit codes are adjacent instead, because a byte permutation widens
/// them; the bytes that are made of 5 or 6 bits lie so that their lower parts are a tile of 4-bit codes.
KVPOLICY_HOST_DEVICE constexpr int bit_of_code(const TileOffset& at, const TilePart& part, int head_dim) {
  const int lane_words = head_dim * part.bits / 64;
  const int vector_words = lane_words < 4 ? lane_words : 4;
  int word = 0, bit = 0;  // of a word of whole codes
  if (part.bits == 8) {
    word = at.step * 2 + at.reg / 2;
    bit = at.reg % 2 * 16 + at.high * 8;
  } else if (part.whole == 8) {
    word = at.step * 2 + at.reg % 2;
    bit = at.reg / 2 * 8 + at.high * 16;
  } else if (part.whole == 4) {
    word = at.step;
    bit = at.reg * 4 + at.high * 16;
  } else {
    word = at.step / 2;
    bit = (at.step % 2 * 4 + at.reg) * 2 + at.high * 16;
  }
  const int share = part.whole / part.bits;  // words of whole codes that have their bits in one word
  bit += word % share * part.bits;
  word /= share;
  return tile_rows * head_dim * part.first +
         ((word / vector_words * warp_lanes + at.lane) * vector_words + word % vector_words) * 32 + bit;
}

/// The inverse of bit_of_code.
KVPOLICY_HOST_DEVICE constexpr TileOffset offset_of_bit(int address, const TilePart& part, int head_dim) {
  const int lane_words = head_dim * part.bits / 64;
  const int vector_words = lane_words < 4 ? lane_words : 4;
  address -= tile_rows * head_dim * part.first;
  const int vector = address / 32 / vector_words;  // index among all lanes' vectors
  const int share = part.whole / part.bits;
  const int word = (vector / warp_lanes * vector_words + address / 32 % vector_words) * share +
                   address % part.whole / part.bits;
  const int bit = address % 32;
  TileOffset at{.lane = vector % warp_lanes, .step = word, .reg = bit % 16 / 4, .high = bit / 16};
  if (part.bits == 8) {
    at.step = word / 2;
    at.reg = word % 2 * 2 + bit / 16;
    at.high = bit / 8 % 2;
  } else if (part.whole == 8) {
    at.step = word / 2;
    at.reg = bit % 16 / 8 * 2 + word % 2;
  } else if (part.whole == 2) {
    at.step = word * 2 + bit % 16 / 8;
    at.reg = bit % 8 / 2;
  }
  return at;
}

/// The code at a place of a tile, read with a width; `word(i)` is the tile's i-th word.
template <class Word>
KVPOLICY_HOST_DEVICE constexpr std::uint32_t code_at(const TileOffset& at, int width, int head_dim,
                                                     Word word) {
  std::uint32_t code = 0;
  for (int i = 0; i < tile_parts(width); ++i) {
    const TilePart part = tile_part(width, i);
    const int bit = bit_of_code(at, part, head_dim);
    code |= (word(bit / 32) >> bit % 32 & ((1U << part.bits) - 1U)) << part.shift;
  }
  return code;
}

/// A row and a channel of a tile.
struct RowOffset {
  int row;
  int channel;
};

/// The inverse of offset_of_key.
KVPOLICY_HOST_DEVICE constexpr RowOffset key_at(const TileOffset& at, int head_dim) {
  const int block = at.step / 2 * 32;
  const int lane_channels = block >= head_dim / 32 * 32 ? 4 : 8;
  return {.row = at.lane / 4 + at.reg % 2 * 8,
          .channel = block + at.lane % 4 * lane_channels + at.step % 2 * 4 + at.reg / 2 * 2 + at.high};
}

/// The inverse of offset_of_value.
KVPOLICY_HOST_DEVICE constexpr RowOffset value_at(const TileOffset& at, int head_dim) {
  const int block = at.step / 4 * 64;
  const int left = head_dim - block;
  const int lane_channels = left >= 64 ? 8 : left / 8;
  return {.row = at.lane % 4 * 2 + at.reg / 2 * 8 + at.high,
          .channel = block + at.lane / 4 * lane_channels + at.step % 4 * 2 + at.reg % 2};
}

/// Byte offsets inside a page of quantised rows, whose codes are read with some widths.
struct PackedLayout {
  Sides tile_bytes = {};  ///< bytes of the codes of 16 keys, and of 16 values
  int values_offset = 0;
  int key_scales_offset = 0;
  int key_zeros_offset = 0;
  int value_scales_offset = 0;
  int value_zeros_offset = 0;
  /// From a scale or zero of a code in halves to that of its upper half; 0 for other codes.
  Sides upper_grids = {};
  int page_bytes = 0;

  PackedLayout() = default;
  /// `key_group` counts channels, or rows if `per_channel`; `value_group` counts channels.
  KVPOLICY_HOST_DEVICE constexpr PackedLayout(Sides widths, int head_dim, int page_rows, bool per_channel,
                                              int key_group, int value_group)
      : tile_bytes{tile_rows * head_dim * bits_stored(widths.keys) / 8,
                   tile_rows * head_dim * bits_stored(widths.values) / 8},
        values_offset{page_rows / tile_rows * tile_bytes.keys},
        key_scales_offset{values_offset + page_rows / tile_rows * tile_bytes.values} {
    const int key_params = per_channel ? page_rows / key_group * head_dim : head_dim / key_group * page_rows;
    const int value_params = head_dim / value_group * page_rows;
    key_zeros_offset = key_scales_offset + 2 * key_params;
    value_scales_offset = key_zeros_offset + 2 * key_params;
    value_zeros_offset = value_scales_offset + 2 * value_params;
    page_bytes = value_zeros_offset + 2 * value_params;
    if ((widths.keys & in_halves) != 0) {
      upper_grids.keys = page_bytes - key_scales_offset;
      page_bytes += 4 * key_params;
    }
    if ((widths.values & in_halves) != 0) {
      upper_grids.values = page_bytes - value_scales_offset;
      page_bytes += 4 * value_params;
    }
    if (widths.keys == upper_halves) {
      key_scales_offset += upper_grids.keys;
      key_zeros_offset += upper_grids.keys;
    }
    if (widths.values == upper_halves) {
      value_scales_offset += upper_grids.values;
      value_zeros_offset += upper_grids.values;
    }
  }
};

/// Index of a key's scale among the key scales of its page.
KVPOLICY_HOST_DEVICE constexpr int key_param(int row, int channel, int head_dim, int page_rows,
                                             bool per_channel, int group) {
  return per_channel ? row / group * head_dim + channel : channel / group * page_rows + row;
}
KVPOLICY_HOST_DEVICE constexpr int value_param(int row, int channel, int page_rows, int group) {
  return channel / group * page_rows + row;
}

}  // namespace kvpolicy::gpu
