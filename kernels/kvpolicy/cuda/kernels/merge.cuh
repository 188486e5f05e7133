// SPDX-License-Identifier: Apache-2.0
//
// Merges partial softmaxes: those of a block's warps in shared memory, and those of the blocks that
// share a head in the workspace. They are merged in the order of the rows, so a result depends on
// lengths and grid, and not on timing. Used by decode.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

/// Sums the softmaxes of `Warps` warps. Shared memory has at most four buffers of values, to which
/// the warps add in turns.
template <int HeadDim, int ColumnTiles, int Warps>
struct WarpMerge {
  static constexpr int columns = ColumnTiles * tile_columns;
  static constexpr int buffers = Warps < 4 ? Warps : 4;
  static constexpr int pitch = HeadDim + 1;  // columns begin in different banks
  static constexpr int bytes = buffers * columns * pitch * 4;

  float* values;         ///< [buffers, columns, pitch]
  PartialState* states;  ///< [Warps + 1, columns]; the last is the block's

  /// Called by all threads of the block. Afterwards `value` and `state` return the sums.
  KVPOLICY_DEVICE void merge(OnlineSoftmax<HeadDim, ColumnTiles>& softmax, int used_columns) const {
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
    const int warp = warp_index();
    softmax.gather_sums();
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float sum = softmax.sum[n][j];
        if (g == 0) {
          states[warp * columns + n * tile_columns + 2 * t + j] = {
              sum == 0.0F ? minus_infinity() : softmax.reference[n][j], sum};
        }
      }
    }
    sync_block();  // also: no thread reads the queries any more, whose memory the values use
    if (thread_index() < columns) {
      PartialState all{minus_infinity(), 0.0F};
      for (int w = 0; w < Warps; ++w) {
        const float max = states[w * columns + thread_index()].max;
        all.max = max > all.max ? max : all.max;
      }
      for (int w = 0; w < Warps; ++w) {
        const PartialState one = states[w * columns + thread_index()];
        all.sum += one.sum * rescale_factor(one.max, all.max);
      }
      states[Warps * columns + thread_index()] = all;
    }
    sync_block();
    for (int turn = 0; turn < Warps; turn += buffers) {
      if (warp / buffers * buffers == turn) {
        KVPOLICY_UNROLL
        for (int n = 0; n < ColumnTiles; ++n) {
          KVPOLICY_UNROLL
          for (int j = 0; j < 2; ++j) {
            const int column = n * tile_columns + 2 * t + j;
            if (column < used_columns) put(softmax, n, j, column, turn == 0);
          }
        }
      }
      sync_block();
    }
  }

  KVPOLICY_DEVICE PartialState state(int column) const { return states[Warps * columns + column]; }
  KVPOLICY_DEVICE float value(int column, int channel) const {
    float sum = 0.0F;
    KVPOLICY_UNROLL
    for (int b = 0; b < buffers; ++b) sum += values[(b * columns + column) * pitch + channel];
    return sum;
  }

 private:
  KVPOLICY_DEVICE void put(const OnlineSoftmax<HeadDim, ColumnTiles>& softmax, int n, int j, int column,
                           bool first) const {
    const int warp = warp_index();
    const float factor =
        rescale_factor(states[warp * columns + column].max, states[Warps * columns + column].max);
    float* buffer = values + (warp % buffers * columns + column) * pitch;
    KVPOLICY_UNROLL
    for (int step = 0; step < HeadDim / 16; ++step) {
      KVPOLICY_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        float& place = buffer[channel_of_value(step, odd)];
        const float value = softmax.values[step][n][odd * 2 + j] * factor;
        place = first ? value : place + value;
      }
    }
  }
  /// The channel of this lane's matrix row g (odd: g + 8) of a step: packing.cuh, offset_of_value.
  KVPOLICY_DEVICE static int channel_of_value(int step, int odd) {
    return value_at({.lane = lane_index(), .step = step, .reg = odd, .high = 0}, HeadDim).channel;
  }
};

/// The partial results of the blocks that share a head.
struct Partials {
  Workspace workspace;
  int first_block;
  int count;

  /// Each block has two slots: one for a head that began in an earlier block, and one for a head
  /// that continues in a later block.
  KVPOLICY_DEVICE static int slot(int block, bool begins) { return 2 * block + (begins ? 1 : 0); }
  KVPOLICY_DEVICE int slot_of(int part) const { return slot(first_block + part, part == 0); }
};

/// The state of a column over all partials; called by all lanes of a warp.
template <int Columns>
KVPOLICY_DEVICE PartialState state_of_partials(const Partials& partials, int column) {
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
template <int Columns, int HeadDim>
KVPOLICY_DEVICE Words4 values_of_partials(const Partials& partials, int column, int channel, float max) {
  constexpr int at_once = 8;  // loads in flight, because each part is an access to L2
  float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  for (int first = 0; first < partials.count; first += at_once) {
    Words4 values[at_once];
    float maxima[at_once];
    KVPOLICY_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const int row = partials.slot_of(first + i < partials.count ? first + i : 0) * Columns + column;
      maxima[i] = load_shared_by_blocks(&partials.workspace.states[row].max);
      values[i] = load_shared_by_blocks(reinterpret_cast<const Words4*>(
          partials.workspace.values + static_cast<long long>(row) * HeadDim + channel));
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
