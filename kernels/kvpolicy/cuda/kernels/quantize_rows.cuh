// SPDX-License-Identifier: Apache-2.0
//
// Quantises 64 rows in shared memory: x ~ scale * code + zero, with zero rounded down and scale rounded up in
// half, so that the error of a number is at most scale / 2. Every number is replaced by its code in place.
// Scales, zeros and codes equal those of storage/quantize.hpp bit for bit. Used by quantize.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/quantizable.hpp>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Threads of the kernels that write rows. It divides the number of vectors of every block of rows
/// that is quantised.
inline constexpr int write_threads = 128;

/// Shared memory for a block of rows that is being quantised.
template <int HeadDim>
struct QuantizerMemory {
  /// In 16-bit numbers. 16 bytes more than a row avoid bank conflicts when values are gathered.
  static constexpr int pitch = HeadDim + 8;
  static constexpr int most_grids = quantized_together * HeadDim / 8;
  static constexpr std::size_t bytes =
      sizeof(std::uint16_t) * quantized_together * pitch + sizeof(std::uint32_t) * most_grids;

  KVPOLICY_DEVICE explicit QuantizerMemory(std::byte* memory)
      : numbers{reinterpret_cast<std::uint16_t*>(memory)},
        grids{reinterpret_cast<std::uint32_t*>(numbers + quantized_together * pitch)} {}

  std::uint16_t* numbers;  ///< [quantized_together, pitch]: numbers of type E first, then codes
  std::uint32_t* grids;    ///< scale in the low half, zero in the high; as in a 64-row page
};

// ---- the arithmetic of storage/quantize.hpp --------------------------------------------------
/// The next half towards -infinity (`up` false) or +infinity.
KVPOLICY_DEVICE std::uint16_t neighbouring_half(std::uint16_t bits, bool up) {
  if ((bits & 0x7fffU) == 0) return up ? 0x0001U : 0x8001U;
  const bool negative = (bits & 0x8000U) != 0;
  return static_cast<std::uint16_t>(negative == up ? bits - 1 : bits + 1);
}

/// A group's scale (low half) and zero (high half).
KVPOLICY_DEVICE std::uint32_t grid_covering(float min, float max, float levels) {
  refuse_fast_math();
  std::uint16_t zero = from_float<float16>(min);
  if (to_float<float16>(zero) > min) zero = neighbouring_half(zero, false);
  const float step = rounded_quotient(max - to_float<float16>(zero), levels);
  std::uint16_t scale = from_float<float16>(step);
  if (to_float<float16>(scale) < step) scale = neighbouring_half(scale, true);
  return scale | static_cast<std::uint32_t>(zero) << 16;
}

KVPOLICY_DEVICE std::uint32_t encode(float value, std::uint32_t grid, float levels) {
  const float step = to_float<float16>(static_cast<std::uint16_t>(grid & 0xffffU));
  if (step == 0.0F) return 0;  // every number of the group is `zero`
  const float code =
      rounded_quotient(value - to_float<float16>(static_cast<std::uint16_t>(grid >> 16)), step);
  const float clamped = code < 0.0F ? 0.0F : code > levels ? levels : code;
  // In 1.5 * 2^23 + code the last bit of the mantissa has value 1. So the addition rounds to
  // nearest even, and the code is in the low bits.
  return bits_of_float(clamped + 12582912.0F) & 0xffU;
}

/// The number that is quantised for `x`. A number that the host would refuse is counted and
/// clamped; NaN becomes 0.
KVPOLICY_DEVICE float quantizable(float x, int& refused) {
  // Adding 0 turns -0 into 0, so that a zero's sign does not depend on the order of a reduction.
  if (is_quantizable(bits_of_float(x))) return x + 0.0F;
  ++refused;
  return x > 0.0F ? largest_quantizable : x < 0.0F ? -largest_quantizable : 0.0F;
}

// ---- rows in shared memory to codes in shared memory -----------------------------------------
/// Starts copying rows [first, 64) of a block; `row(i)` is the address of row i.
template <int HeadDim, class Row>
KVPOLICY_DEVICE void stage_rows(const QuantizerMemory<HeadDim>& memory, int first, Row row) {
  constexpr int vectors = HeadDim / 8;
  for (int i = first * vectors + thread_index(); i < quantized_together * vectors; i += thread_count()) {
    cp_async_16(memory.numbers + i / vectors * memory.pitch + i % vectors * 8,
                row(i / vectors) + i % vectors * 8, true);
  }
  cp_async_commit();
}

/// Loads 8 numbers of a row that is to be quantised, from channel `channel` on, and rotates them if the rows are
/// rotated; counts those that had to be clamped. Then neighbouring lanes have a row, and all of them call it.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void load_quantizable(const QuantizerMemory<HeadDim>& memory, int row, int channel,
                                      bool rotated, float (&x)[8], int& refused) {
  const Words4 raw = *reinterpret_cast<const Words4*>(memory.numbers + row * memory.pitch + channel);
  KVPOLICY_UNROLL
  for (int j = 0; j < 8; ++j) {
    const std::uint32_t pair = raw.word[j / 2];
    x[j] = to_float<E>(static_cast<std::uint16_t>(j % 2 == 0 ? pair & 0xffffU : pair >> 16));
  }
  if (rotated) rotate_vectors<HeadDim>(x);
  KVPOLICY_UNROLL
  for (int j = 0; j < 8; ++j) x[j] = quantizable(x[j], refused);
}

/// Replaces 8 numbers of a row by their codes; `grid(j)` is that of number j.
template <int HeadDim, class Grid>
KVPOLICY_DEVICE void store_codes(const QuantizerMemory<HeadDim>& memory, int row, int channel,
                                 const float (&x)[8], float levels, Grid grid) {
  Words4 codes;
  KVPOLICY_UNROLL
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t high = encode(x[2 * j + 1], grid(2 * j + 1), levels);
    codes.word[j] = encode(x[2 * j], grid(2 * j), levels) | high << 16;
  }
  *reinterpret_cast<Words4*>(memory.numbers + row * memory.pitch + channel) = codes;
}

/// Quantises groups of neighbouring channels of rows that are `rotated` or not. Rows before `first` are codes
/// already.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void quantize_per_token(const QuantizerMemory<HeadDim>& memory, int first, int group,
                                        bool rotated, float levels, int& refused) {
  constexpr int vectors = HeadDim / 8;
  static_assert(quantized_together * vectors % write_threads == 0 && warp_lanes % vectors == 0);
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < quantized_together * vectors; i += thread_count()) {
    const int row = i / vectors;
    const int channel = i % vectors * 8;
    int unrepresentable = 0;
    float x[8];
    load_quantizable<E>(memory, row, channel, rotated, x, unrepresentable);
    float min = x[0], max = x[0];
    KVPOLICY_UNROLL
    for (int j = 1; j < 8; ++j) {
      min = x[j] < min ? x[j] : min;
      max = x[j] > max ? x[j] : max;
    }
    // Neighbouring lanes have neighbouring vectors of a row.
    for (int mask = 1; mask < group / 8; mask *= 2) {
      const float other_min = shuffle_xor(min, mask);
      const float other_max = shuffle_xor(max, mask);
      min = other_min < min ? other_min : min;
      max = other_max > max ? other_max : max;
    }
    if (row < first) continue;
    refused += unrepresentable;
    const std::uint32_t grid = grid_covering(min, max, levels);
    if (channel % group == 0) memory.grids[value_param(row, channel, quantized_together, group)] = grid;
    store_codes(memory, row, channel, x, levels, [&](int) { return grid; });
  }
}

/// Quantises groups of neighbouring rows of one channel; a thread has two channels of a group.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void quantize_per_channel(const QuantizerMemory<HeadDim>& memory, int group, float levels,
                                          int& refused) {
  constexpr int pairs = HeadDim / 2;
  for (int i = thread_index(); i < quantized_together / group * pairs; i += thread_count()) {
    const int row = i / pairs * group;
    const int channel = i % pairs * 2;
    auto* column = reinterpret_cast<std::uint32_t*>(memory.numbers + row * memory.pitch + channel);
    constexpr int step = QuantizerMemory<HeadDim>::pitch / 2;
    const auto low = [&](int j, int& count) {
      return quantizable(to_float<E>(static_cast<std::uint16_t>(column[j * step] & 0xffffU)), count);
    };
    const auto high = [&](int j, int& count) {
      return quantizable(to_float<E>(static_cast<std::uint16_t>(column[j * step] >> 16)), count);
    };
    float low_min = low(0, refused), high_min = high(0, refused);
    float low_max = low_min, high_max = high_min;
    for (int j = 1; j < group; ++j) {
      const float a = low(j, refused), b = high(j, refused);
      low_min = a < low_min ? a : low_min;
      low_max = a > low_max ? a : low_max;
      high_min = b < high_min ? b : high_min;
      high_max = b > high_max ? b : high_max;
    }
    const std::uint32_t low_grid = grid_covering(low_min, low_max, levels);
    const std::uint32_t high_grid = grid_covering(high_min, high_max, levels);
    std::uint32_t* grids = memory.grids + key_param(row, channel, HeadDim, quantized_together, true, group);
    grids[0] = low_grid;
    grids[1] = high_grid;
    int counted = 0;
    KVPOLICY_NO_UNROLL
    for (int j = 0; j < group; ++j) {
      column[j * step] =
          encode(low(j, counted), low_grid, levels) | encode(high(j, counted), high_grid, levels) << 16;
    }
  }
}

/// The same for rows that are rotated first, for which whole rows are needed. A warp has 16 rows and rotates them
/// twice, once for their ranges and once for their codes, because a block's rotated numbers, which are floats,
/// have no room in its memory.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void quantize_rotated_per_channel(const QuantizerMemory<HeadDim>& memory, int group,
                                                  float levels, int& refused) {
  constexpr int vectors = HeadDim / 8;
  constexpr int tiles = quantized_together / tile_rows;
  static_assert(write_threads == tiles * warp_lanes &&
                2 * tiles * HeadDim <= QuantizerMemory<HeadDim>::most_grids);
  const int channel = lane_index() % vectors * 8;
  const auto for_each_row = [&](auto use) {
    KVPOLICY_NO_UNROLL
    for (int i = lane_index() / vectors; i < tile_rows; i += warp_lanes / vectors) {
      use(warp_index() * tile_rows + i);
    }
  };

  float min[8], max[8];
  KVPOLICY_UNROLL
  for (int j = 0; j < 8; ++j) {
    min[j] = float_of_bits(0x7f800000U);  // infinity
    max[j] = float_of_bits(0xff800000U);
  }
  for_each_row([&](int row) {
    float x[8];
    load_quantizable<E>(memory, row, channel, true, x, refused);
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) {
      min[j] = x[j] < min[j] ? x[j] : min[j];
      max[j] = x[j] > max[j] ? x[j] : max[j];
    }
  });
  // [tiles, least and largest, HeadDim], where the grids will be.
  auto* const ranges = reinterpret_cast<float*>(memory.grids);
  KVPOLICY_UNROLL
  for (int j = 0; j < 8; ++j) {
    KVPOLICY_UNROLL
    for (int mask = vectors; mask < warp_lanes; mask *= 2) {
      const float other_min = shuffle_xor(min[j], mask);
      const float other_max = shuffle_xor(max[j], mask);
      min[j] = other_min < min[j] ? other_min : min[j];
      max[j] = other_max > max[j] ? other_max : max[j];
    }
    if (lane_index() >= vectors) continue;
    ranges[2 * warp_index() * HeadDim + channel + j] = min[j];
    ranges[(2 * warp_index() + 1) * HeadDim + channel + j] = max[j];
  }
  sync_block();

  constexpr int most = tiles * HeadDim / write_threads;  // grids of a thread
  std::uint32_t grids[most];
  const int tiles_of_group = group / tile_rows;
  const int count = tiles / tiles_of_group * HeadDim;
  KVPOLICY_UNROLL
  for (int k = 0; k < most; ++k) {
    const int i = k * write_threads + thread_index();
    if (i >= count) continue;
    const float* range = ranges + i / HeadDim * tiles_of_group * 2 * HeadDim + i % HeadDim;
    float least = range[0], largest = range[HeadDim];
    for (int tile = 1; tile < tiles_of_group; ++tile) {
      range += 2 * HeadDim;
      least = range[0] < least ? range[0] : least;
      largest = range[HeadDim] > largest ? range[HeadDim] : largest;
    }
    grids[k] = grid_covering(least, largest, levels);
  }
  sync_block();
  KVPOLICY_UNROLL
  for (int k = 0; k < most; ++k) {
    const int i = k * write_threads + thread_index();
    if (i < count) memory.grids[i] = grids[k];
  }
  sync_block();

  int counted = 0;
  for_each_row([&](int row) {
    float x[8];
    load_quantizable<E>(memory, row, channel, true, x, counted);
    const std::uint32_t* grid =
        memory.grids + key_param(row, channel, HeadDim, quantized_together, true, group);
    store_codes(memory, row, channel, x, levels, [&](int j) { return grid[j]; });
  });
}

/// Quantises a block's keys as the head says.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void quantize_keys_of(const HeadView& head, const QuantizerMemory<HeadDim>& memory,
                                      float levels, int& refused) {
  if (!head.key_per_channel) {
    quantize_per_token<E>(memory, 0, head.key_group, head.key_hadamard, levels, refused);
  } else if (head.key_hadamard) {
    quantize_rotated_per_channel<E>(memory, head.key_group, levels, refused);
  } else {
    quantize_per_channel<E>(memory, head.key_group, levels, refused);
  }
}

}  // namespace kvpolicy::gpu
