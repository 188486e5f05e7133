// SPDX-License-Identifier: Apache-2.0
//
// Operands of matrix products loaded directly from memory. Rows of the cache are the first operand
// (16 rows of keys as 16 matrix rows, 16 channels of values as 16 matrix rows), and queries are the
// second: S^T = K q^T and O^T = V^T P^T. So a warp needs no shared memory to reorder its rows:
// offset_of_key and offset_of_value (packing.cuh) say which lane loads what, for exact and for
// quantised rows.
//
// In this file g = lane / 4 and t = lane % 4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

inline constexpr int tile_columns = 8;  ///< Columns of a product: (query, query head) pairs.

// ---- queries -----------------------------------------------------------------------------------
/// Queries in shared memory, [columns, head_dim], in the order in which lanes need them: 16 bytes a
/// lane for two steps of 16 channels, and 8 bytes for the last step if 32 does not divide head_dim.
template <int HeadDim, int ColumnTiles>
struct QueryOperands {
  static constexpr int columns = ColumnTiles * tile_columns;
  static constexpr int step_pairs = HeadDim / 32;
  static constexpr int tail_offset = step_pairs * ColumnTiles * warp_lanes * 16;
  static constexpr int bytes = columns * HeadDim * 2;

  /// Offset of the channels channel .. channel + 7 of a column; `channel` is a multiple of 8.
  KVPOLICY_DEVICE static Words4* place(std::byte* operands, int column, int channel) {
    const int tile = column / tile_columns;
    const int lane = column % tile_columns * 4;
    const int block = channel / 32;
    const int offset = block < step_pairs
                           ? ((block * ColumnTiles + tile) * warp_lanes + lane + channel % 32 / 8) * 16
                           : tail_offset + (tile * warp_lanes + lane + channel % 32 / 4) * 8;
    return reinterpret_cast<Words4*>(operands + offset);
  }
  KVPOLICY_DEVICE static Words4 of_steps(const std::byte* operands, int pair, int tile) {
    return reinterpret_cast<const Words4*>(operands)[(pair * ColumnTiles + tile) * warp_lanes + lane_index()];
  }
  KVPOLICY_DEVICE static Words2 of_tail(const std::byte* operands, int tile) {
    return reinterpret_cast<const Words2*>(operands + tail_offset)[tile * warp_lanes + lane_index()];
  }
};

// ---- exact rows --------------------------------------------------------------------------------
/// Keys of 16 rows.
template <int HeadDim>
struct KeyTile {
  static constexpr int step_pairs = HeadDim / 32;
  static constexpr bool has_tail = HeadDim % 32 != 0;
  static_assert(HeadDim % 32 == 0 || HeadDim % 32 == 16);
  Words4 block[step_pairs][2];
  Words2 tail[2];

  /// `low` and `high` are this lane's rows g and g + 8.
  KVPOLICY_DEVICE void load(const std::byte* low, const std::byte* high) {
    const int t = lane_index() % 4;
    KVPOLICY_UNROLL
    for (int pair = 0; pair < step_pairs; ++pair) {
      block[pair][0] = load_once(reinterpret_cast<const Words4*>(low) + pair * 4 + t);
      block[pair][1] = load_once(reinterpret_cast<const Words4*>(high) + pair * 4 + t);
    }
    if constexpr (has_tail) {
      tail[0] = load_once(reinterpret_cast<const Words2*>(low + step_pairs * 64) + t);
      tail[1] = load_once(reinterpret_cast<const Words2*>(high + step_pairs * 64) + t);
    }
  }

  /// Adds dot products with the queries: products[n] is [16 rows, columns 8n .. 8n + 7].
  template <Element E, int ColumnTiles>
  KVPOLICY_DEVICE void multiply(float (&products)[ColumnTiles][4], const std::byte* operands) const {
    using Queries = QueryOperands<HeadDim, ColumnTiles>;
    KVPOLICY_UNROLL
    for (int pair = 0; pair < step_pairs; ++pair) {
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        const Words4 q = Queries::of_steps(operands, pair, n);
        KVPOLICY_UNROLL
        for (int step = 0; step < 2; ++step) {
          const std::uint32_t a[4] = {block[pair][0].word[2 * step], block[pair][1].word[2 * step],
                                      block[pair][0].word[2 * step + 1], block[pair][1].word[2 * step + 1]};
          multiply_add<E>(products[n], a, q.word[2 * step], q.word[2 * step + 1]);
        }
      }
    }
    if constexpr (has_tail) {
      const std::uint32_t a[4] = {tail[0].word[0], tail[1].word[0], tail[0].word[1], tail[1].word[1]};
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        const Words2 q = Queries::of_tail(operands, n);
        multiply_add<E>(products[n], a, q.word[0], q.word[1]);
      }
    }
  }
};

/// Values of 16 rows. A lane's rows are 2t, 2t + 1, 2t + 8 and 2t + 9, in this order.
template <int HeadDim>
struct ValueTile {
  static constexpr int blocks = HeadDim / 64;
  static constexpr int left = HeadDim % 64;
  static_assert(left == 0 || left == 16 || left == 32);
  Words4 block[blocks][4];
  Words2 half_block[4];
  Words1 quarter_block[4];

  KVPOLICY_DEVICE void load(const std::byte* const (&row)[4]) {
    const int g = lane_index() / 4;
    KVPOLICY_UNROLL
    for (int b = 0; b < blocks; ++b) {
      KVPOLICY_UNROLL
      for (int r = 0; r < 4; ++r) {
        block[b][r] = load_once(reinterpret_cast<const Words4*>(row[r]) + b * 8 + g);
      }
    }
    KVPOLICY_UNROLL
    for (int r = 0; r < 4; ++r) {
      const std::byte* rest = row[r] + blocks * 128;
      if constexpr (left == 32) half_block[r] = load_once(reinterpret_cast<const Words2*>(rest) + g);
      if constexpr (left == 16) {
        quarter_block[r] = load_once(reinterpret_cast<const Words1*>(rest) + g);
      }
    }
  }

  /// The operand of step `step`: two channels of this lane's four rows.
  KVPOLICY_DEVICE void operand(std::uint32_t (&a)[4], int step) const {
    KVPOLICY_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const std::uint32_t even = word(2 * pair, step);
      const std::uint32_t odd = word(2 * pair + 1, step);
      a[2 * pair] = permute_bytes(even, odd, 0x5410);
      a[2 * pair + 1] = permute_bytes(even, odd, 0x7632);
    }
  }

 private:
  KVPOLICY_DEVICE std::uint32_t word(int r, int step) const {
    if (step < blocks * 4) return block[step / 4][r].word[step % 4];
    if constexpr (left == 32) return half_block[r].word[step % 4];
    return quarter_block[r].word[0];
  }
};

// ---- quantised rows ----------------------------------------------------------------------------
/// 1024 as both halves of a word: its mantissa counts ones.
inline constexpr std::uint32_t code_bias = 0x64006400U;

/// Loads this lane's words of a part of a tile (packing.cuh).
template <int Words>
KVPOLICY_DEVICE void load_words(std::uint32_t* words, const std::byte* part, int lane) {
  constexpr int vector_words = Words < 4 ? Words : 4;
  using Vector =
      std::conditional_t<vector_words == 4, Words4, std::conditional_t<vector_words == 2, Words2, Words1>>;
  KVPOLICY_UNROLL
  for (int i = 0; i < Words; i += vector_words) {
    const Vector vector =
        load_once(reinterpret_cast<const Vector*>(part + (i * warp_lanes + lane * vector_words) * 4));
    KVPOLICY_UNROLL
    for (int j = 0; j < vector_words; ++j) words[i + j] = vector.word[j];
  }
}

/// One lane's codes of 16 rows of keys or values, of a width that is known when the code is compiled: 8, 4 or 2.
template <int Bits, int HeadDim>
struct CodeTile {
  static constexpr int head_dim = HeadDim;
  static constexpr int words = HeadDim * Bits / 64;
  std::uint32_t word[words];

  /// Calls `use` with the width, as a type.
  template <class Use>
  KVPOLICY_DEVICE static void with_bits(int, Use use) {
    use(std::integral_constant<int, Bits>{});
  }
  template <class Width>
  KVPOLICY_DEVICE void load(Width, const std::byte* tile, int lane) {
    load_words<words>(word, tile, lane);
  }

  /// Registers 1 and 3 of an operand (rows g + 8) hold codes times 2^row_shift, registers 2 and 3
  /// (inner indices 8 .. 15) codes times 2^inner_shift.
  static constexpr int row_shift = Bits == 4 ? 4 : Bits == 2 ? 2 : 0;
  static constexpr int inner_shift = Bits == 2 ? 4 : 0;

  /// The operand of step `step`: codes as halves in units of 2^-24, which are the bits of a code
  /// and nothing else, because halves below 2^-14 are subnormal. Tensor cores multiply subnormal
  /// halves exactly (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ Comput. Sci.
  /// 7:e330). With `bias` = code_bias the result is 1024 + code, for arithmetic in half.
  KVPOLICY_DEVICE void operand(std::uint32_t (&a)[4], int step, std::uint32_t bias = 0) const {
    KVPOLICY_UNROLL
    for (int reg = 0; reg < 4; ++reg) {
      const int shift = reg % 2 * row_shift + reg / 2 * inner_shift;
      if constexpr (Bits == 8) {
        a[reg] = permute_bytes(word[step * 2 + reg / 2], bias, reg % 2 == 0 ? 0x5150 : 0x5352);
      } else if constexpr (Bits == 4) {
        a[reg] = (word[step] >> reg / 2 * 8 & 0x000f000fU << shift) | bias;
      } else {
        a[reg] = (word[step / 2] >> step % 2 * 8 & 0x00030003U << shift) | bias;
      }
    }
  }

  /// The code in the middle of the range, of codes of a width.
  KVPOLICY_DEVICE static constexpr float middle(int) { return 1 << (Bits - 1); }
  /// What `operand` gives for codes that are all `middle`, negated. Adding its product subtracts
  /// `middle` from every code without rounding.
  KVPOLICY_DEVICE static void minus_middle(std::uint32_t (&a)[4], int) {
    KVPOLICY_UNROLL
    for (int reg = 0; reg < 4; ++reg) {
      const int shift = reg % 2 * row_shift + reg / 2 * inner_shift;
      a[reg] = (0x8000U | 1U << (Bits - 1 + shift)) * 0x00010001U;
    }
  }
};

/// The same for codes of every width, which is the head's: one piece of code for all the widths that few heads have.
/// `widen` makes bytes of the codes, which are then read as 8-bit codes are.
template <int HeadDim>
struct AnyCodeTile {
  static constexpr int head_dim = HeadDim;
  static constexpr int words = HeadDim / 8;
  std::uint32_t word[words];

  template <class Use>
  KVPOLICY_DEVICE static void with_bits(int bits, Use use) {
    switch (bits) {
      case 8: return use(std::integral_constant<int, 8>{});
      case 6: return use(std::integral_constant<int, 6>{});
      case 5: return use(std::integral_constant<int, 5>{});
      case 4: return use(std::integral_constant<int, 4>{});
      case 3: return use(std::integral_constant<int, 3>{});
      default: return use(std::integral_constant<int, 2>{});
    }
  }
  /// Upper halves are a tile of 4-bit codes. A tile of whole codes in halves has as many words as one of 8-bit codes,
  /// the lower halves' first, so that neither needs loads of its own. Words that few bits leave over lose what they
  /// were: kept, they would take the registers that the other side's codes need.
  template <int Bits>
  KVPOLICY_DEVICE void load(std::integral_constant<int, Bits>, const std::byte* tile, int lane) {
    constexpr TilePart lower = tile_part(Bits, 0);
    constexpr int lower_words = HeadDim * lower.bits / 64;
    load_words<lower_words>(word, tile, lane);
    if constexpr (tile_parts(Bits) > 1) {
      constexpr int upper_words = HeadDim * (Bits - lower.bits) / 64;
      load_words<upper_words>(word + lower_words, tile + tile_rows * HeadDim * lower.bits / 8, lane);
    }
    KVPOLICY_UNROLL
    for (int i = HeadDim * Bits / 64; i < words; ++i) word[i] = unset_word();
  }
  /// Makes bytes of the codes that `load` loaded, in place. Those of 2 and 3 bits are nibbles on the way, so that
  /// widths share most of the code.
  KVPOLICY_DEVICE void widen(int width) {
    if (width == 2) spread_pairs();
    if (width == 3) join_pairs();
    if (width == 8) return order_bytes();
    if (width == both_halves) return join_halves();
    std::uint32_t upper[nibble_words / 2];
    KVPOLICY_UNROLL
    for (int i = 0; i < nibble_words / 2; ++i)
      upper[i] = word[nibble_words + i];  // unused unless 5 or 6 bits
    KVPOLICY_UNROLL
    for (int i = nibble_words - 1; i >= 0; --i) {
      const std::uint32_t nibbles = word[i];
      word[2 * i] = nibbles & 0x0f0f0f0fU;
      word[2 * i + 1] = nibbles >> 4 & 0x0f0f0f0fU;
    }
    if (width == 5) add_upper<5>(upper);
    if (width == 6) add_upper<6>(upper);
  }

  static constexpr int row_shift = 0;
  static constexpr int inner_shift = 0;
  KVPOLICY_DEVICE void operand(std::uint32_t (&a)[4], int step, std::uint32_t bias = 0) const {
    KVPOLICY_UNROLL
    for (int reg = 0; reg < 4; ++reg) {
      a[reg] = permute_bytes(word[step * 2 + reg % 2], bias, reg < 2 ? 0x5250 : 0x5351);
    }
  }
  KVPOLICY_DEVICE static float middle(int width) { return static_cast<float>(1 << (bits_read(width) - 1)); }
  KVPOLICY_DEVICE static void minus_middle(std::uint32_t (&a)[4], int width) {
    KVPOLICY_UNROLL
    for (int reg = 0; reg < 4; ++reg) a[reg] = (0x8000U | 1U << (bits_read(width) - 1)) * 0x00010001U;
  }

 private:
  static constexpr int nibble_words = words / 2;

  /// Nibbles of 2-bit codes; a byte has those of four registers.
  KVPOLICY_DEVICE void spread_pairs() {
    KVPOLICY_UNROLL
    for (int i = nibble_words - 1; i >= 0; --i) {
      std::uint32_t four = word[i / 2] >> i % 2 * 8 & 0x00ff00ffU;
      four = (four | four << 4) & 0x0f0f0f0fU;
      word[i] = (four | four << 2) & 0x33333333U;
    }
  }
  /// Nibbles of 3-bit codes.
  KVPOLICY_DEVICE void join_pairs() {
    std::uint32_t upper[nibble_words / 4];
    KVPOLICY_UNROLL
    for (int i = 0; i < nibble_words / 4; ++i) upper[i] = word[nibble_words / 2 + i];
    KVPOLICY_UNROLL
    for (int i = nibble_words - 1; i >= 0; --i) {
      word[i] = (word[i / 2] >> i % 2 * 2 & 0x33333333U) | (moved<3>(upper[i / 4], i) & 0x44444444U);
    }
  }
  /// Bytes of codes in halves.
  KVPOLICY_DEVICE void join_halves() {
    std::uint32_t halves[words];
    KVPOLICY_UNROLL
    for (int i = 0; i < words; ++i) halves[i] = word[i];
    KVPOLICY_UNROLL
    for (int i = 0; i < nibble_words; ++i) {
      const std::uint32_t low = halves[i], high = halves[nibble_words + i];
      word[2 * i] = (low & 0x0f0f0f0fU) | (high << 4 & 0xf0f0f0f0U);
      word[2 * i + 1] = (low >> 4 & 0x0f0f0f0fU) | (high & 0xf0f0f0f0U);
    }
  }
  /// 8-bit codes in the order of bytes that are made of nibbles.
  KVPOLICY_DEVICE void order_bytes() {
    KVPOLICY_UNROLL
    for (int i = 0; i < words; i += 2) {
      const std::uint32_t low = word[i], high = word[i + 1];
      word[i] = permute_bytes(low, high, 0x5140);
      word[i + 1] = permute_bytes(low, high, 0x7362);
    }
  }
  /// Adds the upper parts of codes to bytes that have the lower ones.
  template <int Width>
  KVPOLICY_DEVICE void add_upper(const std::uint32_t (&upper)[nibble_words / 2]) {
    constexpr TilePart part = tile_part(Width, 1);
    constexpr std::uint32_t mask = ((1U << part.bits) - 1U) * 0x01010101U << part.shift;
    KVPOLICY_UNROLL
    for (int i = 0; i < words; ++i) word[i] |= moved<Width>(upper[i / (part.whole / part.bits)], i) & mask;
  }
  /// A word of upper parts, such that those of the i-th word of whole codes are where these have them.
  template <int Width>
  KVPOLICY_DEVICE static std::uint32_t moved(std::uint32_t parts, int i) {
    constexpr TilePart part = tile_part(Width, 1);
    const int shift = i % (part.whole / part.bits) * part.bits - part.shift;
    return shift < 0 ? parts << -shift : parts >> shift;
  }
};

}  // namespace kvpolicy::gpu
