// SPDX-License-Identifier: Apache-2.0
//
// The partial softmaxes that blocks leave for each other in the workspace, and their sums, by the block that comes
// last. They are added in the order of the rows, so a result depends on lengths and grid, and not on timing. Used by
// decode.cuh, where blocks share a head, and by prefill_output.cuh, where they share a tile of queries.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Whether the `count` - 1 other blocks that share a piece of work have been here before: what they have written to
/// global memory can be read then (load_shared_by_blocks). Called by all threads of each of them; `arrived` is shared
/// memory. The ticket is what it was before afterwards, 0. `sync`: a barrier of the threads that call, if not all do.
template <class Sync>
KVPOLICY_DEVICE bool is_last_block(std::uint32_t* ticket, int count, std::uint32_t& arrived, Sync sync) {
  sync();
  if (thread_index() == 0) arrived = arrive(ticket);
  sync();
  const bool last = arrived + 1 == static_cast<std::uint32_t>(count);
  if (last && thread_index() == 0) *ticket = 0;
  return last;
}
KVPOLICY_DEVICE bool is_last_block(std::uint32_t* ticket, int count, std::uint32_t& arrived) {
  return is_last_block(ticket, count, arrived, [] { sync_block(); });
}

/// The partial results of the decoding blocks that share a head.
struct Partials {
  Workspace workspace;
  int first_block;
  int count;

  /// Each block has two slots: one for a head that began in an earlier block, and one for a head
  /// that continues in a later block.
  KVPOLICY_DEVICE static int slot(int block, bool begins) { return 2 * block + (begins ? 1 : 0); }
  KVPOLICY_DEVICE int slot_of(int part) const { return slot(first_block + part, part == 0); }
};

/// Those of the blocks that share a tile of queries.
struct TilePartials {
  Workspace workspace;
  long long first_slot;
  int count;

  KVPOLICY_DEVICE long long slot_of(int part) const { return first_slot + part; }
};

/// Four neighbouring values of a column, not normalised, and the column's state, over all partials.
struct MergedValues {
  float value[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  PartialState state = {minus_infinity(), 0.0F};
};

/// Merges the partials of a column from channel `channel` on, of which each slot has `Columns`. Every thread merges the
/// states as well, so that these come with the values: whoever merges waits for the second-level cache once for
/// eight partials, and no thread for another.
template <int Columns, int HeadDim, class Slots>
KVPOLICY_DEVICE MergedValues merge_partials(const Slots& partials, int column, int channel) {
  constexpr int at_once = 8;  // loads in flight
  MergedValues all;
  KVPOLICY_NO_UNROLL
  for (int first = 0; first < partials.count; first += at_once) {
    Words4 values[at_once];
    PartialState states[at_once];
    float max = all.state.max;
    KVPOLICY_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const bool there = first + i < partials.count;
      const long long row =
          static_cast<long long>(partials.slot_of(there ? first + i : 0)) * Columns + column;
      const Words2 state =
          load_shared_by_blocks(reinterpret_cast<const Words2*>(&partials.workspace.states[row].max));
      states[i] = {float_of_bits(state.word[0]), float_of_bits(state.word[1])};
      values[i] = load_shared_by_blocks(
          reinterpret_cast<const Words4*>(partials.workspace.values + row * HeadDim + channel));
    }
    KVPOLICY_UNROLL
    for (int i = 0; i < at_once; ++i) {
      if (first + i < partials.count) max = fmaxf(max, states[i].max);
    }
    const float before = rescale_factor(all.state.max, max);
    all.state = {max, all.state.sum * before};
    KVPOLICY_UNROLL
    for (int c = 0; c < 4; ++c) all.value[c] *= before;
    KVPOLICY_UNROLL
    for (int i = 0; i < at_once; ++i) {
      if (first + i >= partials.count) break;
      const float factor = rescale_factor(states[i].max, max);
      all.state.sum += states[i].sum * factor;
      KVPOLICY_UNROLL
      for (int c = 0; c < 4; ++c) all.value[c] += float_of_bits(values[i].word[c]) * factor;
    }
  }
  return all;
}

}  // namespace kvpolicy::gpu
