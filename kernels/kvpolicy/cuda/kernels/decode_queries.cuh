// SPDX-License-Identifier: Apache-2.0
//
// The queries of a head in the forms that its segments need: unchanged, rotated (for sinks that are
// read as if they came right before the window), and in half (for quantised rows). Column c is
// query c / group of query head c % group. Used by decode.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/fragments.cuh>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/rotate.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Converts products with a column of halves to logits (units of log 2).
struct CodeColumn {
  float code_scale;  ///< for products with codes, which are in units of 2^-24
  float scale;       ///< for products with numbers
};

/// The queries as quantised rows need them.
struct CodeQueries {
  const std::byte* halves;    ///< QueryOperands
  const CodeColumn* columns;  ///< [columns]
  const float* sums;          ///< [columns, head_dim / 8], of 8 channels each
};

template <Element E, int HeadDim, int ColumnTiles, bool Packed>
struct DecodeQueries {
  using Operands = QueryOperands<HeadDim, ColumnTiles>;
  static constexpr int columns = Operands::columns;
  static constexpr int vectors = HeadDim / 8;  // vectors of 16 bytes in a column
  static constexpr int bytes = (Packed ? 3 : 2) * Operands::bytes;

  std::byte* plain;
  CodeColumn* code_columns;  ///< [columns]
  float* sums;               ///< [columns, vectors]

  KVPOLICY_DEVICE std::byte* turned() const { return plain + Operands::bytes; }
  KVPOLICY_DEVICE CodeQueries for_codes() const { return {halves(), code_columns, sums}; }

  /// Each of `threads` threads calls it, this one as thread `thread`.
  KVPOLICY_DEVICE void load(const AttendParams& p, int sequence, int kv_head, int thread, int threads) const {
    const int used_columns = p.request_of(sequence).queries * p.group;
    const CallTokens tokens = p.tokens_of(sequence);
    for (int i = thread; i < columns * vectors; i += threads) {
      const int column = i / vectors;
      const int channel = i % vectors * 8;
      Words4 q{};
      if (column < used_columns) {
        q = *reinterpret_cast<const Words4*>(
            p.q.row(tokens.sequence, tokens.first + column / p.group, kv_head * p.group + column % p.group) +
            channel);
      }
      *Operands::place(plain, column, channel) = q;
    }
  }

  /// Rotates the loaded queries; each thread rotates 8 channels and their partners.
  KVPOLICY_DEVICE void turn(const AttendParams& p, const BlockSlice& slice) const {
    for (int i = unforeseen(thread_index()); i < columns * vectors / 2; i += thread_count()) {
      const int column = i / (vectors / 2);
      const int channel = i % (vectors / 2) * 8;
      const int query = smaller(column / p.group, slice.request.queries - 1);
      const int position = slice.list.first_position + slice.request.place_of(query);
      const int steps = smaller(slice.head.rotation_limit - position, 0);
      Words4 low = *Operands::place(plain, column, channel);
      Words4 high = *Operands::place(plain, column, channel + HeadDim / 2);
      rotate_channels<E>(low, high, steps, slice.head.inverse_frequencies + channel);
      *Operands::place(turned(), column, channel) = low;
      *Operands::place(turned(), column, channel + HeadDim / 2) = high;
    }
  }

  /// Converts the loaded queries to half, because bfloat16 cannot represent all codes, and rotates them for keys
  /// that were `rotated` before they were quantised; a warp converts a column, and a lane 8 channels.
  KVPOLICY_DEVICE void convert(const AttendParams& p, bool rotated) const {
    static_assert(Packed && vectors <= warp_lanes);
    const int warps = thread_count() / warp_lanes;
    for (int column = warp_index(); column < columns; column += warps) {
      Words4 q{};
      if (lane_index() < vectors) q = *Operands::place(plain, column, lane_index() * 8);
      float x[8];
      KVPOLICY_UNROLL
      for (int i = 0; i < 8; ++i) {
        x[i] = to_float<E>(static_cast<std::uint16_t>(q.word[i / 2] >> 16 * (i % 2)));
      }
      if (rotated) rotate_vectors<HeadDim>(x);
      // The power of two that scales the largest number to just below 1/2. Then no product with a
      // scale overflows half, and numbers down to 2^-13 of the largest lose nothing; what the
      // smaller ones lose is below 2^-24 of the largest.
      float largest = 0.0F;
      KVPOLICY_UNROLL
      for (int i = 0; i < 8; ++i) largest = greater(largest, magnitude(x[i]));
      KVPOLICY_UNROLL
      for (int mask = 1; mask < vectors; mask *= 2) {
        largest = greater(largest, shuffle_xor(largest, mask));
      }
      const int exponent = static_cast<int>(bits_of_float(largest) >> 23);
      const float scale = float_of_bits(static_cast<std::uint32_t>(larger(252 - exponent, 1)) << 23);
      float sum = 0.0F;
      KVPOLICY_UNROLL
      for (int w = 0; w < 4; ++w) {
        q.word[w] = pack<float16>(x[2 * w] * scale, x[2 * w + 1] * scale);
        sum += to_float<float16>(static_cast<std::uint16_t>(q.word[w]));
        sum += to_float<float16>(static_cast<std::uint16_t>(q.word[w] >> 16));
      }
      if (lane_index() < vectors) {
        *Operands::place(halves(), column, lane_index() * 8) = q;
        sums[column * vectors + lane_index()] = sum;
      }
      const float back = p.scale_log2 / scale;
      // Finite, even if no sensible query is that large.
      if (lane_index() == 0) code_columns[column] = {back < 0x1p100F ? back * 0x1p24F : 0x1p124F, back};
    }
  }

 private:
  KVPOLICY_DEVICE std::byte* halves() const { return plain + 2 * Operands::bytes; }
  KVPOLICY_DEVICE static float magnitude(float x) { return x < 0.0F ? -x : x; }
  KVPOLICY_DEVICE static float greater(float a, float b) { return a > b ? a : b; }
};

}  // namespace kvpolicy::gpu
