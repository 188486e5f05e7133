// SPDX-License-Identifier: Apache-2.0
//
// Copies the survivors of a compression into new pages of their head, in the order of the text, and
// the attention that was added up for them. Quantised rows are copied as they are: codes, scales and
// zeros. Exact rows stay exact or are quantised, as the new HeadView says. The old pages stay valid
// until the host frees them.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/quantize.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// The heads of one layer of one sequence. Every row is committed. A head that compresses keeps its
/// sinks and is quantised per token, because a key that shares its scale with others cannot move.
struct CompactParams {
  const HeadView* from = nullptr;  ///< [kv_heads]
  /// [kv_heads], with new pages; evicted + counts[head] is the length of the text.
  const HeadView* to = nullptr;
  int kv_heads = 0;
  int page_rows = 64;
  const int* const* kept = nullptr;  ///< [kv_heads]: ascending rows of `from`; null: head stays
  const int* counts = nullptr;       ///< [kv_heads]
  /// Text positions of the first old_counts[head] rows, which earlier compressions made irregular;
  /// later rows have position row + evicted. Null: no row was evicted before.
  const long long* const* old_positions = nullptr;  ///< [kv_heads]
  const int* old_counts = nullptr;                  ///< [kv_heads]
  long long* const* new_positions = nullptr;        ///< [kv_heads], each [counts]; or null
  int* out_of_range = nullptr;                      ///< as AppendParams
};

template <int HeadDim>
constexpr std::size_t compact_shared_bytes() {
  return append_shared_bytes<HeadDim>();
}

/// Number of tiles of 64 rows for the grid. The `sinks` rows shift the blocks that are quantised
/// together.
KVPOLICY_HOST_DEVICE constexpr int compact_tiles(int rows, int sinks) {
  return quotient_up(rows + (quantized_together - sinks % quantized_together) % quantized_together,
                     quantized_together);
}

/// Eight neighbouring channels of a packed row.
template <int HeadDim>
struct PackedVector {
  std::uint32_t code[8];
  std::uint32_t grid;  ///< scale in the low half, zero in the high

  KVPOLICY_DEVICE PackedVector(const HeadView& head, int page_rows, int row, int channel, bool key) {
    const PackedBlock block{head, HeadDim, page_rows, row - (row - head.sinks) % tile_rows};
    const int in_tile = (row - head.sinks) % tile_rows;
    const int width = head.widths().of(key);
    const auto* words = reinterpret_cast<const std::uint32_t*>(block.codes(key));
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) {
      const TileOffset at =
          key ? offset_of_key(in_tile, channel + j, HeadDim) : offset_of_value(in_tile, channel + j, HeadDim);
      code[j] = code_at(at, width, HeadDim, [&](int i) { return words[i]; });
    }
    const int param =
        value_param(block.row + in_tile, channel, page_rows, key ? head.key_group : head.value_group);
    grid = block.scales(key)[param] | static_cast<std::uint32_t>(block.zeros(key)[param]) << 16;
  }

  /// A number as the row has it, rotated if rows are.
  KVPOLICY_DEVICE float number(int i) const {
    const float scale = to_float<float16>(static_cast<std::uint16_t>(grid & 0xffffU));
    const float zero = to_float<float16>(static_cast<std::uint16_t>(grid >> 16));
    return scale * static_cast<float>(code[i]) + zero;
  }
  KVPOLICY_DEVICE void load(float* numbers) const {
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) numbers[j] = number(j);
  }
};

/// Copies rows [first, last) of the new head, all of which are exact there.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void compact_to_exact(const HeadView& from, const HeadView& to, int page_rows,
                                      const int* kept, int from_packed_end, int first, int last) {
  constexpr int vectors = HeadDim / 8;
  const int count = (last - first) * vectors;
  // A warp's lanes stay together, because all of them take part in a rotation.
  for (int i = thread_index(); i - lane_index() < count; i += thread_count()) {
    const int to_row = first + smaller(i, count - 1) / vectors;
    const int row = kept[to_row];
    const int channel = i % vectors * 8;
    KVPOLICY_UNROLL
    for (int side = 0; side < 2; ++side) {
      const bool key = side == 0;
      const bool packed = row >= from.sinks && row < from_packed_end;
      float x[8] = {};
      if constexpr (can_quantize<HeadDim>) {
        if (packed) PackedVector<HeadDim>{from, page_rows, row, channel, key}.load(x);
        if (key ? from.key_hadamard : from.value_hadamard) rotate_vectors<HeadDim>(x);
      }
      Words4 numbers;
      if (packed) {
        KVPOLICY_UNROLL
        for (int j = 0; j < 4; ++j) numbers.word[j] = pack<E>(x[2 * j], x[2 * j + 1]);
      } else {
        numbers = *reinterpret_cast<const Words4*>(exact_row<HeadDim>(from, page_rows, row, key) + channel);
      }
      if (i >= count) continue;
      *reinterpret_cast<Words4*>(exact_row<HeadDim>(to, page_rows, to_row, key) + channel) = numbers;
    }
  }
}

/// Copies one side of the `rows` rows from `first` on to their block of packed rows. Rows of `from` before
/// `from_coded_end` have codes already, which stay as they are. `flushed`: KIVI's flush quantises these keys
/// before their block is packed, so they are read from their exact slots, which get the numbers that the codes
/// stand for.
template <Element E, int HeadDim, bool Keys>
KVPOLICY_DEVICE void compact_side(const HeadView& from, const HeadView& to, int page_rows, const int* kept,
                                  int from_coded_end, int first, int rows, bool flushed, int& refused) {
  constexpr int vectors = HeadDim / 8;
  const QuantizerMemory<HeadDim> memory{shared_memory()};
  const int group = Keys ? to.key_group : to.value_group;
  // Survivors are in the order of the text: apart from the sinks, rows with codes come before the others.
  int coded = 0;
  for (int step = quantized_together; step > 0; step /= 2) {
    if (coded + step <= rows && kept[first + coded + step - 1] < from_coded_end) coded += step;
  }
  sync_block();
  stage_rows(memory, coded, [&](int i) -> const std::uint16_t* {
    return exact_row<HeadDim>(from, page_rows, kept[first + smaller(i, rows - 1)], Keys);
  });
  for (int i = thread_index(); i < coded * vectors; i += thread_count()) {
    const int row = i / vectors;
    const int channel = i % vectors * 8;
    const PackedVector<HeadDim> vector{from, page_rows, kept[first + row], channel, Keys};
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) {
      memory.numbers[row * memory.pitch + channel + j] = static_cast<std::uint16_t>(vector.code[j]);
    }
    if (channel % group == 0) {
      memory.grids[value_param(row, channel, quantized_together, group)] = vector.grid;
    }
  }
  cp_async_wait<0>();
  sync_block();
  if (rows < quantized_together) {
    // What the block lacks is not quantised, and nothing of it is to be counted.
    for (int i = rows * HeadDim + thread_index(); i < quantized_together * HeadDim; i += thread_count()) {
      memory.numbers[i / HeadDim * memory.pitch + i % HeadDim] = 0;
    }
    sync_block();
  }
  quantize_per_token<E>(memory, coded, group, Keys ? to.key_hadamard : to.value_hadamard,
                        highest_code(to, Keys), refused);
  sync_block();
  if (flushed) write_coded_numbers<E, HeadDim, Keys>(memory, to, page_rows, first, 0, rows);
  write_side<HeadDim, Keys>(memory, to, PackedBlock{to, HeadDim, page_rows, first}, page_rows);
}

/// Grid (compact_tiles of the longest head, kv_heads), compact_shared_bytes<HeadDim>().
template <Element E, int HeadDim>
KVPOLICY_KERNEL(write_threads, 4)
compact_kernel(const KVPOLICY_GRID_CONSTANT CompactParams params) {
  const int head = block_y();
  const int* kept = params.kept[head];
  if (kept == nullptr) return;
  const HeadView& from = params.from[head];
  const HeadView& to = params.to[head];
  const int count = params.counts[head];
  const int tokens = to.evicted + count;
  const int from_packed_end = from.packed_end(tokens);
  const int from_keys_end = from.keys_end(tokens);
  const int to_packed_end = to.packed_end(tokens);
  const int to_keys_end = smaller(to.keys_end(tokens), count);
  const int shift = (quantized_together - to.sinks % quantized_together) % quantized_together;
  for (int tile = block_x(); tile * quantized_together - shift < count; tile += grid_x()) {
    const int first = larger(tile * quantized_together - shift, 0);
    const int last = smaller((tile + 1) * quantized_together - shift, count);
    const bool packed = first >= to.sinks && first < to_packed_end;
    if (!packed) compact_to_exact<E, HeadDim>(from, to, params.page_rows, kept, from_packed_end, first, last);
    if constexpr (can_quantize<HeadDim>) {
      int refused = 0;
      if (packed) {
        compact_side<E, HeadDim, true>(from, to, params.page_rows, kept, from_keys_end, first,
                                       quantized_together, false, refused);
        compact_side<E, HeadDim, false>(from, to, params.page_rows, kept, from.values_end(tokens), first,
                                        quantized_together, false, refused);
      } else if (first >= to.sinks && first < to_keys_end) {
        compact_side<E, HeadDim, true>(from, to, params.page_rows, kept, from_keys_end, first,
                                       smaller(last, to_keys_end) - first, true, refused);
      }
      count_out_of_range(refused, params.out_of_range);
    }
    if (to.sums != nullptr) {
      for (int i = first + thread_index(); i < last; i += thread_count()) {
        to.sums[i] = from.sums[kept[i]];
      }
    }
    if (params.new_positions == nullptr || params.new_positions[head] == nullptr) continue;
    const int old_count = params.old_positions != nullptr ? params.old_counts[head] : 0;
    for (int i = first + thread_index(); i < last; i += thread_count()) {
      const int row = kept[i];
      params.new_positions[head][i] =
          row < old_count ? params.old_positions[head][row] : static_cast<long long>(row) + from.evicted;
    }
  }
}

}  // namespace kvpolicy::gpu
