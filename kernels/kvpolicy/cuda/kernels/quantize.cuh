// SPDX-License-Identifier: Apache-2.0
//
// Quantises a block of 64 rows into fragment order on the device.
//
// One thread block takes one side (keys, then values) through shared memory. Rows arrive by
// asynchronous copies, every number is replaced by its code in place (quantize_rows.cuh), and then each
// thread gathers whole words by the inverse of packing.cuh's order. So each row is read once, reads and
// writes are coalesced, and no two threads write to one word.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/quantize_rows.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::gpu {

// ---- codes in shared memory to a page --------------------------------------------------------
/// Writes a part of the codes of four tiles of one side; each thread gathers whole words.
template <int HeadDim, int Width, int Part, bool Keys>
KVPOLICY_DEVICE void write_part(const QuantizerMemory<HeadDim>& memory, std::uint32_t* out) {
  constexpr TilePart part = tile_part(Width, Part);
  constexpr int tile_words = tile_rows * HeadDim * bits_stored(Width) / 32;
  constexpr int first = tile_rows * HeadDim * part.first / 32;
  constexpr int part_words = tile_rows * HeadDim * part.bits / 32;
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < quantized_together / tile_rows * part_words; i += thread_count()) {
    const int in_tile = first + i % part_words;
    std::uint32_t word = 0;
    KVPOLICY_UNROLL
    for (int bit = 0; bit < 32; bit += part.bits) {
      const TileOffset at = offset_of_bit(in_tile * 32 + bit, part, HeadDim);
      const RowOffset from = Keys ? key_at(at, HeadDim) : value_at(at, HeadDim);
      const int row = i / part_words * tile_rows + from.row;
      std::uint32_t code = memory.numbers[row * memory.pitch + from.channel];
      if constexpr (tile_parts(Width) > 1) code = code >> part.shift & ((1U << part.bits) - 1U);
      word |= code << bit;
    }
    out[i / part_words * tile_words + in_tile] = word;
  }
}

/// Writes four tiles of one side.
template <int HeadDim, int Width, bool Keys>
KVPOLICY_DEVICE void write_codes(const QuantizerMemory<HeadDim>& memory, std::uint32_t* out) {
  write_part<HeadDim, Width, 0, Keys>(memory, out);
  if constexpr (tile_parts(Width) > 1) write_part<HeadDim, Width, 1, Keys>(memory, out);
}

template <int HeadDim, bool Keys>
KVPOLICY_DEVICE void write_codes(const QuantizerMemory<HeadDim>& memory, int width, std::uint32_t* out) {
  switch (width) {
    case both_halves: return write_codes<HeadDim, both_halves, Keys>(memory, out);
    case 8: return write_codes<HeadDim, 8, Keys>(memory, out);
    case 6: return write_codes<HeadDim, 6, Keys>(memory, out);
    case 5: return write_codes<HeadDim, 5, Keys>(memory, out);
    case 4: return write_codes<HeadDim, 4, Keys>(memory, out);
    case 3: return write_codes<HeadDim, 3, Keys>(memory, out);
    default: return write_codes<HeadDim, 2, Keys>(memory, out);
  }
}

/// The largest code of one side of a head.
KVPOLICY_DEVICE float highest_code(const HeadView& head, bool key) {
  return static_cast<float>((1 << bits_read(head.widths().of(key))) - 1);
}

/// The grid with which the upper halves of codes stand for numbers, as AffineGrid::upper_half has it: the numbers in
/// the middle of those whose codes have the half. Scale in the low half, zero in the high.
KVPOLICY_DEVICE std::uint32_t grid_of_upper_half(std::uint32_t grid) {
  const float step = to_float<float16>(static_cast<std::uint16_t>(grid & 0xffffU));
  const float zero = to_float<float16>(static_cast<std::uint16_t>(grid >> 16));
  const std::uint32_t upper = pack<float16>(16.0F * step, zero + 7.5F * step);
  return upper >> 16 == 0x8000U ? upper & 0xffffU : upper;  // no negative zero
}

/// Writes the scales and zeros of rows [row, row + 64) of a page; `upper` is as PackedLayout has it, or 0.
template <int HeadDim>
KVPOLICY_DEVICE void write_grids(const QuantizerMemory<HeadDim>& memory, bool per_channel, int group, int row,
                                 int page_rows, std::uint16_t* scales, std::uint16_t* zeros, int upper) {
  const int count = quantized_together * HeadDim / group;
  for (int i = thread_index(); i < count; i += thread_count()) {
    const int to = per_channel ? row / group * HeadDim + i
                               : i / quantized_together * page_rows + row + i % quantized_together;
    scales[to] = static_cast<std::uint16_t>(memory.grids[i] & 0xffffU);
    zeros[to] = static_cast<std::uint16_t>(memory.grids[i] >> 16);
    if (upper == 0) continue;
    const std::uint32_t grid = grid_of_upper_half(memory.grids[i]);
    scales[to + upper / 2] = static_cast<std::uint16_t>(grid & 0xffffU);
    zeros[to + upper / 2] = static_cast<std::uint16_t>(grid >> 16);
  }
}

/// The address of a row's exact slot.
template <int HeadDim>
KVPOLICY_DEVICE std::uint16_t* exact_row(const HeadView& head, int page_rows, int row, bool key) {
  const int slot = head.exact_slot(row);
  return reinterpret_cast<std::uint16_t*>(
      head.exact_row(head.exact_pages[slot / page_rows], slot % page_rows, key));
}

/// The address of a block of a head's packed rows.
struct PackedBlock {
  std::byte* page;
  std::byte* second;  ///< another copy of the page, or null
  int row;            ///< index of the block's first row in the page
  PackedLayout layout;

  /// The block that begins with head row `first`; addresses_of_page explains `entered`.
  KVPOLICY_DEVICE PackedBlock(const HeadView& head, int head_dim, int page_rows, int first, int entered = 0)
      : layout{head.packed_layout(head_dim, page_rows)} {
    const int slot = head.packed_slot(first);
    const PageAddresses addresses = addresses_of_page(head, true, slot / page_rows, entered);
    page = addresses.first;
    second = addresses.second;
    row = slot % page_rows;
  }
  KVPOLICY_DEVICE std::byte* codes(bool keys) const {
    return page + (keys ? 0 : layout.values_offset) + row / tile_rows * layout.tile_bytes.of(keys);
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
    write_codes<HeadDim, Keys>(memory, head.widths().of(Keys),
                               reinterpret_cast<std::uint32_t*>(at.codes(Keys)));
    write_grids(memory, Keys && head.key_per_channel, Keys ? head.key_group : head.value_group, at.row,
                page_rows, at.scales(Keys), at.zeros(Keys), at.layout.upper_grids.of(Keys));
    at.page = to.second;
  }
}

/// Replaces the first `rows` rows of one side in shared memory, which are codes, by those that the block has.
template <int HeadDim, bool Keys>
KVPOLICY_DEVICE void load_codes(const QuantizerMemory<HeadDim>& memory, const HeadView& head,
                                const PackedBlock& from, int page_rows, int rows) {
  const int width = head.widths().of(Keys);
  const auto* words = reinterpret_cast<const std::uint32_t*>(from.codes(Keys));
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < rows * HeadDim; i += thread_count()) {
    const int row = i / HeadDim;
    const int channel = i % HeadDim;
    const TileOffset at = Keys ? offset_of_key(row % tile_rows, channel, HeadDim)
                               : offset_of_value(row % tile_rows, channel, HeadDim);
    const std::uint32_t* tile = words + row / tile_rows * (from.layout.tile_bytes.of(Keys) / 4);
    memory.numbers[row * memory.pitch + channel] =
        static_cast<std::uint16_t>(code_at(at, width, HeadDim, [&](int word) { return tile[word]; }));
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
/// Called by all threads of the block.
template <Element E, int HeadDim, bool Keys>
KVPOLICY_DEVICE void write_coded_numbers(const QuantizerMemory<HeadDim>& memory, const HeadView& head,
                                         int page_rows, int first, int begin, int end) {
  constexpr int vectors = HeadDim / 8;
  constexpr int rows_at_once = write_threads / vectors;
  const bool rotated = Keys ? head.key_hadamard : head.value_hadamard;
  const int channel = thread_index() % vectors * 8;
  KVPOLICY_NO_UNROLL
  for (int at = begin - begin % rows_at_once; at < end; at += rows_at_once) {
    const int row = at + thread_index() / vectors;
    float x[8];
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t grid =
          memory.grids[Keys ? key_param(row, channel + j, HeadDim, quantized_together, head.key_per_channel,
                                        head.key_group)
                            : value_param(row, channel + j, quantized_together, head.value_group)];
      const float code = static_cast<float>(memory.numbers[row * memory.pitch + channel + j]);
      x[j] = to_float<float16>(static_cast<std::uint16_t>(grid & 0xffffU)) * code +
             to_float<float16>(static_cast<std::uint16_t>(grid >> 16));
    }
    if (rotated) rotate_vectors<HeadDim>(x);
    if (row < begin || row >= end) continue;
    Words4 numbers;
    KVPOLICY_UNROLL
    for (int j = 0; j < 4; ++j) numbers.word[j] = pack<E>(x[2 * j], x[2 * j + 1]);
    *reinterpret_cast<Words4*>(exact_row<HeadDim>(head, page_rows, first + row, Keys) + channel) = numbers;
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
  const float levels = highest_code(head, true);
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
  quantize_keys_of<E>(head, memory, levels, refused);
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
  int refused = 0;
  sync_block();  // the previous use of the memory is finished
  stage_rows(memory, 0, [&](int i) { return key(first + i); });
  cp_async_wait<0>();
  sync_block();
  quantize_keys_of<E>(head, memory, highest_code(head, true), refused);
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
  quantize_per_token<E>(memory, 0, head.value_group, head.value_hadamard, highest_code(head, false), refused);
  sync_block();
  if (coded_values > 0) {
    load_codes<HeadDim, false>(memory, head, to, page_rows, smaller(coded_values, quantized_together));
    sync_block();
  }
  write_side<HeadDim, false>(memory, head, to, page_rows);
  count_out_of_range(refused, out_of_range);
}

}  // namespace kvpolicy::gpu
