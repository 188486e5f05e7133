// SPDX-License-Identifier: Apache-2.0
//
// The partial softmaxes that blocks leave for each other in the workspace, and their sums, by the block that comes
// last. They are added in the order of the rows, so a result depends on lengths and grid, and not on timing. Used by
// decode.cuh, where blocks share a head, and by prefill_output.cuh, where they share a tile of queries.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

/// Whether the `count` - 1 other blocks that share a piece of work have been here before: what they have written to
/// global memory can be read then (load_shared_by_blocks). Called by all threads of each of them; `arrived` is shared
/// memory. The ticket is what it was before afterwards, 0.
KVPOLICY_DEVICE bool is_last_block(std::uint32_t* ticket, int count, std::uint32_t& arrived) {
  sync_block();
  if (thread_index() == 0) arrived = arrive(ticket);
  sync_block();
  const bool last = arrived + 1 == static_cast<std::uint32_t>(count);
  if (last && thread_index() == 0) *ticket = 0;
  return last;
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

/// The state of a column over all partials, of which each slot has `Columns`; called by all lanes of a warp.
template <int Columns, class Slots>
KVPOLICY_DEVICE PartialState state_of_partials(const Slots& partials, int column) {
  const auto load = [&](int part) -> PartialState {
    const float* state = &partials.workspace.states[partials.slot_of(part) * Columns + column].max;
    return {load_shared_by_blocks(state), load_shared_by_blocks(state + 1)};
  };
  PartialState all{minus_infinity(), 0.0F};
  for (int part = lane_index(); part < partials.count; part += warp_lanes) {
    const PartialState one = load(part);
    const float max = one.max > all.max ? one.max : all.max;
    all.sum = all.sum * rescale_factor(all.max, max) + one.sum * rescale_factor(one.max, max);
    all.max = max;
  }
  KVPOLICY_UNROLL
  for (int mask = 1; mask < warp_lanes; mask *= 2) {
    const PartialState one{shuffle_xor(all.max, mask), shuffle_xor(all.sum, mask)};
    const float max = one.max > all.max ? one.max : all.max;
    all.sum = all.sum * rescale_factor(all.max, max) + one.sum * rescale_factor(one.max, max);
    all.max = max;
  }
  return all;
}

/// Four neighbouring values of a column, summed over all partials; `max` is the column's overall
/// maximum.
template <int Columns, int HeadDim, class Slots>
KVPOLICY_DEVICE Words4 values_of_partials(const Slots& partials, int column, int channel, float max) {
  constexpr int at_once = 8;  // loads in flight, because each part is an access to L2
  float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  for (int first = 0; first < partials.count; first += at_once) {
    Words4 values[at_once];
    float maxima[at_once];
    KVPOLICY_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const long long row =
          static_cast<long long>(partials.slot_of(first + i < partials.count ? first + i : 0)) * Columns +
          column;
      maxima[i] = load_shared_by_blocks(&partials.workspace.states[row].max);
      values[i] = load_shared_by_blocks(
          reinterpret_cast<const Words4*>(partials.workspace.values + row * HeadDim + channel));
    }
    KVPOLICY_UNROLL
    for (int i = 0; i < at_once; ++i) {
      if (first + i >= partials.count) break;
      const float factor = rescale_factor(maxima[i], max);
      KVPOLICY_UNROLL
      for (int c = 0; c < 4; ++c) sum[c] += float_of_bits(values[i].word[c]) * factor;
    }
  }
  return {{bits_of_float(sum[0]), bits_of_float(sum[1]), bits_of_float(sum[2]), bits_of_float(sum[3])}};
}

}  // namespace kvpolicy::cuda
