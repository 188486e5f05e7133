// SPDX-License-Identifier: Apache-2.0
//
// Copies the rows of selected chunks from the pages of a head in slow memory (slow_rows.cuh) to
// dense pages in device memory, in the order of the selection. A selected read then never crosses
// the bus, because a second HeadView describes the head with these rows first.
//
// The kernel decides on the device what to copy. After a new selection, or after a rollback to an
// earlier one, it copies all of it. If the head quantises its rows, it also copies chunks that were
// exact when they were selected and are packed by now. Otherwise it copies nothing. So the kernel
// can be part of a captured step.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/partials.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::gpu {

/// All pointers are device pointers.
struct GatherParams {
  const HeadView* heads = nullptr;     ///< [sequences, kv_heads]
  const LayerState* states = nullptr;  ///< [sequences]
  int kv_heads = 0;
  int page_rows = 64;
  int head_dim = 0;
};

inline constexpr int gather_threads = 256;
constexpr std::size_t gather_shared_bytes() { return sizeof(std::uint32_t); }

/// The unit of a copy (a row, or a chunk of packed rows), in parts of 16 bytes.
struct GatherUnit {
  bool packed;
  bool per_channel;
  int rows;
  int row_parts;     ///< parts of one side of an exact row
  Sides code_parts;  ///< parts of the codes of a packed chunk
  int key_parts;     ///< parts of its keys' scales
  int value_parts;
  Sides grids;  ///< scales and zeros of its keys, and of its values: 2 arrays, or 4 for codes in halves
  int key_group;
  int head_dim;
  int page_rows;
  int parts;  ///< parts in all
  PackedLayout layout;

  KVPOLICY_DEVICE GatherUnit(const HeadView& head, const GatherParams& p)
      : packed{head.slow->packed != 0},
        per_channel{head.key_per_channel},
        rows{packed ? head.chunk_rows : 1},
        row_parts{p.head_dim / 8},
        code_parts{},
        key_parts{0},
        value_parts{0},
        grids{2, 2},
        key_group{head.key_group},
        head_dim{p.head_dim},
        page_rows{p.page_rows},
        parts{2 * row_parts} {
    if (!packed) return;
    layout = head.packed_layout(head_dim, page_rows);
    code_parts = {rows / tile_rows * layout.tile_bytes.keys / 16,
                  rows / tile_rows * layout.tile_bytes.values / 16};
    // If keys are quantised per channel, a chunk consists of whole groups of rows.
    key_parts = (per_channel ? rows / key_group * head_dim : head_dim / key_group * rows) / 8;
    value_parts = head_dim / head.value_group * rows / 8;
    grids = {layout.upper_grids.keys > 0 ? 4 : 2, layout.upper_grids.values > 0 ? 4 : 2};
    parts = code_parts.keys + code_parts.values + grids.keys * key_parts + grids.values * value_parts;
  }

  /// Byte offset, in its page, of a part of the unit that begins at row `row` of the page.
  KVPOLICY_DEVICE int offset(int part, int row) const {
    if (!packed) {
      const int side = part < row_parts ? 0 : 1;
      return (side * page_rows + row) * head_dim * 2 + (part - side * row_parts) * 16;
    }
    const int tile = row / tile_rows;
    if (part < code_parts.keys) return tile * layout.tile_bytes.keys + part * 16;
    part -= code_parts.keys;
    if (part < code_parts.values) return layout.values_offset + tile * layout.tile_bytes.values + part * 16;
    part -= code_parts.values;
    if (part < grids.keys * key_parts) {
      const int start = start_of(part / key_parts, layout.key_scales_offset, layout.key_zeros_offset,
                                 layout.upper_grids.keys);
      part %= key_parts;
      return start + (per_channel ? row / key_group * head_dim * 2 + part * 16 : of_group(part, row));
    }
    part -= grids.keys * key_parts;
    const int start = start_of(part / value_parts, layout.value_scales_offset, layout.value_zeros_offset,
                               layout.upper_grids.values);
    return start + of_group(part % value_parts, row);
  }

 private:
  /// Where an array is: scales, zeros, then those of upper halves.
  KVPOLICY_DEVICE static int start_of(int array, int scales, int zeros, int upper) {
    return (array % 2 == 0 ? scales : zeros) + (array < 2 ? 0 : upper);
  }
  /// Scales or zeros of rows, group of channels by group of channels.
  KVPOLICY_DEVICE int of_group(int part, int row) const {
    const int parts_of_group = rows / 8;
    return (part / parts_of_group * page_rows + row) * 2 + part % parts_of_group * 16;
  }
};

/// Grid (any, sequences * kv_heads), gather_shared_bytes().
template <int Threads = gather_threads>
KVPOLICY_KERNEL(Threads, 2)
gather_kernel(const KVPOLICY_GRID_CONSTANT GatherParams p) {
  const HeadView& head = p.heads[block_y()];
  if (head.slow == nullptr || head.chunk_rows == 0 || head.selections->valid == 0) return;
  const SlowRows& slow = *head.slow;
  const Selections& choice = *head.selections;
  const int* chunks = choice.chunks + static_cast<long long>(choice.latest) * head.budget_chunks;
  const int count = choice.counts[choice.latest];
  int end = count;
  if (slow.packed != 0) {  // rows that are not packed yet are in device memory anyway
    const int packed_end = head.packed_end(p.states[block_y() / p.kv_heads].committed);
    end = chunks_before(chunks, count, head.chunk_rows, packed_end);
  }
  const int before = slow.state->gathered;
  if (before == end) return;  // in all blocks, because no block changes it in this launch
  const int begin = larger(before, 0);

  const GatherUnit unit{head, p};
  const int units_of_chunk = head.chunk_rows / unit.rows;
  const auto shift_pages = static_cast<int>(slow.shift / p.page_rows);
  const long long parts = static_cast<long long>(end - begin) * units_of_chunk * unit.parts;
  constexpr int at_once = 4;  // loads in flight in a thread
  const long long stride = static_cast<long long>(grid_x()) * Threads;
  for (long long first = static_cast<long long>(block_x()) * Threads + thread_index(); first < parts;
       first += stride * at_once) {
    Words4 words[at_once];
    KVPOLICY_UNROLL
    for (int j = 0; j < at_once; ++j) {
      const long long i = first + j * stride;
      if (i >= parts) continue;
      const int number = static_cast<int>(i / unit.parts);
      const int at = number % units_of_chunk * unit.rows;
      const int row = chunks[begin + number / units_of_chunk] * head.chunk_rows + at;
      words[j] = *reinterpret_cast<const Words4*>(
          slow.table[row / p.page_rows] + unit.offset(static_cast<int>(i % unit.parts), row % p.page_rows));
    }
    KVPOLICY_UNROLL
    for (int j = 0; j < at_once; ++j) {
      const long long i = first + j * stride;
      if (i >= parts) continue;
      const int row = begin * head.chunk_rows + static_cast<int>(i / unit.parts) * unit.rows;
      *reinterpret_cast<Words4*>(slow.table[row / p.page_rows - shift_pages] +
                                 unit.offset(static_cast<int>(i % unit.parts), row % p.page_rows)) = words[j];
    }
  }

  // The last block publishes that the rows are copied.
  auto& arrived = *reinterpret_cast<std::uint32_t*>(shared_memory());
  if (!is_last_block(&slow.state->tickets, grid_x(), arrived)) return;
  Selections& chosen = *slow.chosen;
  const int shift = static_cast<int>(slow.shift);
  for (int i = thread_index(); i < count; i += Threads) {
    chosen.chunks[i] = i < end ? i : chunks[i] + shift / head.chunk_rows;
  }
  if (thread_index() == 0) {
    chosen.latest = 0;
    chosen.valid = 1;
    chosen.tokens[0] = choice.tokens[choice.latest];
    chosen.ends[0] = choice.ends[choice.latest] + shift;
    chosen.counts[0] = count;
    slow.state->gathered = end;
  }
}

}  // namespace kvpolicy::gpu
