// SPDX-License-Identifier: Apache-2.0
//
// Quantises a block of 64 rows into fragment order on the device: x ~ scale * code + zero, with
// zero rounded down and scale rounded up in half, so that the error of a number is at most scale /
// 2. Scales, zeros and codes equal those of storage/quantize.hpp bit for bit.
//
// One thread block takes one side (keys, then values) through shared memory. Rows arrive by
// asynchronous copies, every number is replaced by its code in place, and then each thread gathers
// whole words by the inverse of packing.cuh's order. So each row is read once, reads and writes are
// coalesced, and no two threads write to one word.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/quantizable.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::cuda {

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
  std::uint16_t zero = from_float<half>(min);
  if (to_float<half>(zero) > min) zero = neighbouring_half(zero, false);
  const float step = (max - to_float<half>(zero)) / levels;
  std::uint16_t scale = from_float<half>(step);
  if (to_float<half>(scale) < step) scale = neighbouring_half(scale, true);
  return scale | static_cast<std::uint32_t>(zero) << 16;
}

KVPOLICY_DEVICE std::uint32_t encode(float value, std::uint32_t grid, float levels) {
  const float step = to_float<half>(static_cast<std::uint16_t>(grid & 0xffffU));
  if (step == 0.0F) return 0;  // every number of the group is `zero`
  const float code = (value - to_float<half>(static_cast<std::uint16_t>(grid >> 16))) / step;
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

/// Quantises groups of neighbouring channels. Rows before `first` are codes already.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void quantize_per_token(const QuantizerMemory<HeadDim>& memory, int first, int group,
                                        float levels, int& refused) {
  constexpr int vectors = HeadDim / 8;
  static_assert(quantized_together * vectors % write_threads == 0 && warp_lanes % vectors == 0);
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < quantized_together * vectors; i += thread_count()) {
    const int row = i / vectors;
    const int channel = i % vectors * 8;
    auto* place = reinterpret_cast<Words4*>(memory.numbers + row * memory.pitch + channel);
    const Words4 raw = *place;
    int unrepresentable = 0;
    float x[8];
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t pair = raw.word[j / 2];
      x[j] = quantizable(to_float<E>(static_cast<std::uint16_t>(j % 2 == 0 ? pair & 0xffffU : pair >> 16)),
                         unrepresentable);
    }
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
    Words4 codes;
    KVPOLICY_UNROLL
    for (int j = 0; j < 4; ++j) {
      codes.word[j] = encode(x[2 * j], grid, levels) | encode(x[2 * j + 1], grid, levels) << 16;
    }
    *place = codes;
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

// ---- codes in shared memory to a page --------------------------------------------------------
/// Writes four tiles of one side; each thread gathers whole words.
template <int HeadDim, int Bits, bool Keys>
KVPOLICY_DEVICE void write_codes(const QuantizerMemory<HeadDim>& memory, std::uint32_t* out) {
  constexpr int tile_words = tile_rows * HeadDim * Bits / 32;
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < quantized_together / tile_rows * tile_words; i += thread_count()) {
    std::uint32_t word = 0;
    KVPOLICY_UNROLL
    for (int bit = 0; bit < 32; bit += Bits) {
      const TileOffset at = offset_of_bit(i % tile_words * 32 + bit, Bits, HeadDim);
      const RowOffset from = Keys ? key_at(at, HeadDim) : value_at(at, HeadDim);
      const int row = i / tile_words * tile_rows + from.row;
      word |= static_cast<std::uint32_t>(memory.numbers[row * memory.pitch + from.channel]) << bit;
    }
    out[i] = word;
  }
}

template <int HeadDim, bool Keys>
KVPOLICY_DEVICE void write_codes(const QuantizerMemory<HeadDim>& memory, int bits, std::uint32_t* out) {
  if (bits == 8) {
    write_codes<HeadDim, 8, Keys>(memory, out);
  } else if (bits == 4) {
    write_codes<HeadDim, 4, Keys>(memory, out);
  } else {
    write_codes<HeadDim, 2, Keys>(memory, out);
  }
}

/// Writes the scales and zeros of rows [row, row + 64) of a page.
template <int HeadDim>
KVPOLICY_DEVICE void write_grids(const QuantizerMemory<HeadDim>& memory, bool per_channel, int group, int row,
                                 int page_rows, std::uint16_t* scales, std::uint16_t* zeros) {
  const int count = quantized_together * HeadDim / group;
  for (int i = thread_index(); i < count; i += thread_count()) {
    const int to = per_channel ? row / group * HeadDim + i
                               : i / quantized_together * page_rows + row + i % quantized_together;
    scales[to] = static_cast<std::uint16_t>(memory.grids[i] & 0xffffU);
    zeros[to] = static_cast<std::uint16_t>(memory.grids[i] >> 16);
  }
}

/// The address of a row's exact slot.
template <int HeadDim>
KVPOLICY_DEVICE std::uint16_t* exact_row(const HeadView& head, int page_rows, int row, bool key) {
  const int slot = head.exact_slot(row);
  return reinterpret_cast<std::uint16_t*>(
      head.exact_place(head.exact_pages[slot / page_rows], slot % page_rows, key));
}

/// The address of a block of a head's packed rows.
struct PackedBlock {
  std::byte* page;
  std::byte* second;  ///< another copy of the page, or null
  int row;            ///< index of the block's first row in the page
  PackedLayout layout;

  /// The block that begins with head row `first`; addresses_of_page explains `entered`.
  KVPOLICY_DEVICE PackedBlock(const HeadView& head, int head_dim, int page_rows, int first, int entered = 0)
      : layout{code_bits(head.encoding), head_dim,       page_rows,
               head.key_per_channel,     head.key_group, head.value_group} {
    const int slot = head.packed_slot(first);
    const PageAddresses addresses = addresses_of_page(head, true, slot / page_rows, entered);
    page = addresses.first;
    second = addresses.second;
    row = slot % page_rows;
  }
  KVPOLICY_DEVICE std::byte* codes(bool keys) const {
    return page + (keys ? 0 : layout.values_offset) + row / tile_rows * layout.tile_bytes;
  }
  KVPOLICY_DEVICE std::uint16_t* scales(bool keys) const {
    return reinterpret_cast<std::uint16_t*>(page +
                                            (keys ? layout.key_scales_offset : layout.value_scales_offset));
  }
  KVPOLICY_DEVICE std::uint16_t* zeros(bool keys) const {
    return reinterpret_cast<std::uint16_t*>(page +
                                            (keys ? layout.key_zeros_offset : layout.value_zeros_offset));
  }
};

/// Writes one side of a block whose numbers are codes already.
template <int HeadDim, bool Keys>
KVPOLICY_DEVICE void write_side(const QuantizerMemory<HeadDim>& memory, const HeadView& head,
                                const PackedBlock& to, int page_rows) {
  PackedBlock at = to;
  KVPOLICY_NO_UNROLL
  for (int copy = 0; copy < 2 && at.page != nullptr; ++copy) {
    write_codes<HeadDim, Keys>(memory, code_bits(head.encoding),
                               reinterpret_cast<std::uint32_t*>(at.codes(Keys)));
    write_grids(memory, Keys && head.key_per_channel, Keys ? head.key_group : head.value_group, at.row,
                page_rows, at.scales(Keys), at.zeros(Keys));
    at.page = to.second;
  }
}

/// Replaces the first `rows` rows of one side in shared memory, which are codes, by those that the block has.
template <int HeadDim, bool Keys>
KVPOLICY_DEVICE void load_codes(const QuantizerMemory<HeadDim>& memory, const HeadView& head,
                                const PackedBlock& from, int page_rows, int rows) {
  const int bits = code_bits(head.encoding);
  const auto* words = reinterpret_cast<const std::uint32_t*>(from.codes(Keys));
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < rows * HeadDim; i += thread_count()) {
    const int row = i / HeadDim;
    const int channel = i % HeadDim;
    const TileOffset at = Keys ? offset_of_key(row % tile_rows, channel, HeadDim)
                               : offset_of_value(row % tile_rows, channel, HeadDim);
    const int bit = row / tile_rows * from.layout.tile_bytes * 8 + bit_of_code(at, bits, HeadDim);
    memory.numbers[row * memory.pitch + channel] =
        static_cast<std::uint16_t>(words[bit / 32] >> bit % 32 & ((1U << bits) - 1U));
  }
  const bool per_channel = Keys && head.key_per_channel;
  const int group = Keys ? head.key_group : head.value_group;
  for (int i = thread_index(); i < quantized_together * HeadDim / group; i += thread_count()) {
    const int row = per_channel ? i / HeadDim * group : i % quantized_together;
    if (row >= rows) continue;
    const int at = per_channel ? from.row / group * HeadDim + i
                               : i / quantized_together * page_rows + from.row + i % quantized_together;
    memory.grids[i] = from.scales(Keys)[at] | static_cast<std::uint32_t>(from.zeros(Keys)[at]) << 16;
  }
}

/// Writes the numbers that the codes of a block's rows [begin, end) stand for to the exact slots of these rows.
template <Element E, int HeadDim, bool Keys>
KVPOLICY_DEVICE void write_coded_numbers(const QuantizerMemory<HeadDim>& memory, const HeadView& head,
                                         int page_rows, int first, int begin, int end) {
  for (int i = begin * HeadDim + thread_index(); i < end * HeadDim; i += thread_count()) {
    const int row = i / HeadDim;
    const int channel = i % HeadDim;
    const std::uint32_t grid =
        memory.grids[Keys ? key_param(row, channel, HeadDim, quantized_together, head.key_per_channel,
                                      head.key_group)
                          : value_param(row, channel, quantized_together, head.value_group)];
    const float code = static_cast<float>(memory.numbers[row * memory.pitch + channel]);
    exact_row<HeadDim>(head, page_rows, first + row, Keys)[channel] =
        from_float<E>(to_float<half>(static_cast<std::uint16_t>(grid & 0xffffU)) * code +
                      to_float<half>(static_cast<std::uint16_t>(grid >> 16)));
  }
}

KVPOLICY_DEVICE void count_out_of_range(int refused, int* out_of_range) {
  if (refused == 0 || out_of_range == nullptr) return;
  atomic_add(reinterpret_cast<std::uint32_t*>(out_of_range), static_cast<std::uint32_t>(refused));
}

/// Quantises the keys [from, to) of the block of 64 rows from `first` on, before the block is packed: codes
/// go to its page, the numbers that they stand for to the exact slots. Keys before `from` have codes already.
/// Called by all threads of the block; `key(row)` is as in quantize_block.
template <Element E, int HeadDim, class Key>
KVPOLICY_DEVICE void quantize_keys(const HeadView& head, int page_rows, int first, int from, int to, Key key,
                                   std::byte* shared, int* out_of_range, int entered) {
  const QuantizerMemory<HeadDim> memory{shared};
  const PackedBlock block{head, HeadDim, page_rows, first, entered};
  const auto levels = static_cast<float>((1 << code_bits(head.encoding)) - 1);
  int refused = 0;
  sync_block();
  stage_rows(memory, 0, [&](int i) { return key(smaller(larger(first + i, from), to - 1)); });
  cp_async_wait<0>();
  sync_block();
  // Rows beyond `to` may be taken back or are not there: nothing of them is to be counted.
  for (int i = thread_index(); i < quantized_together * HeadDim; i += thread_count()) {
    const int row = i / HeadDim;
    if (first + row < from || first + row >= to) memory.numbers[row * memory.pitch + i % HeadDim] = 0;
  }
  sync_block();
  if (head.key_per_channel) {
    quantize_per_channel<E>(memory, head.key_group, levels, refused);
  } else {
    quantize_per_token<E>(memory, 0, head.key_group, levels, refused);
  }
  sync_block();
  write_coded_numbers<E, HeadDim, true>(memory, head, page_rows, first, from - first, to - first);
  load_codes<HeadDim, true>(memory, head, block, page_rows, from - first);
  sync_block();
  write_side<HeadDim, true>(memory, head, block, page_rows);
  count_out_of_range(refused, out_of_range);
}

/// Quantises the 64 rows from `first` on; called by all threads of the block. `key(row)` and
/// `value(row)` return the addresses of the exact rows; addresses_of_page explains `entered`. So many of the
/// first keys and values have codes already.
template <Element E, int HeadDim, class Key, class Value>
KVPOLICY_DEVICE void quantize_block(const HeadView& head, int page_rows, int first, Key key, Value value,
                                    std::byte* shared, int* out_of_range, int entered = 0, int coded_keys = 0,
                                    int coded_values = 0) {
  const QuantizerMemory<HeadDim> memory{shared};
  const PackedBlock to{head, HeadDim, page_rows, first, entered};
  const auto levels = static_cast<float>((1 << code_bits(head.encoding)) - 1);
  int refused = 0;
  sync_block();  // the previous use of the memory is finished
  stage_rows(memory, 0, [&](int i) { return key(first + i); });
  cp_async_wait<0>();
  sync_block();
  if (head.key_per_channel) {
    quantize_per_channel<E>(memory, head.key_group, levels, refused);
  } else {
    quantize_per_token<E>(memory, 0, head.key_group, levels, refused);
  }
  sync_block();
  if (coded_keys > 0) {
    load_codes<HeadDim, true>(memory, head, to, page_rows, smaller(coded_keys, quantized_together));
    sync_block();
  }
  write_side<HeadDim, true>(memory, head, to, page_rows);
  sync_block();
  stage_rows(memory, 0, [&](int i) { return value(first + i); });
  cp_async_wait<0>();
  sync_block();
  quantize_per_token<E>(memory, 0, head.value_group, levels, refused);
  sync_block();
  if (coded_values > 0) {
    load_codes<HeadDim, false>(memory, head, to, page_rows, smaller(coded_values, quantized_together));
    sync_block();
  }
  write_side<HeadDim, false>(memory, head, to, page_rows);
  count_out_of_range(refused, out_of_range);
}

}  // namespace kvpolicy::cuda
