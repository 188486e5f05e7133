// SPDX-License-Identifier: Apache-2.0
//
// Merges the partial softmaxes of a block's warps in shared memory, in the order of the rows. Used by decode.cuh;
// those of several blocks are merged by partials.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Sums the softmaxes of `Warps` warps. Shared memory has at most four buffers of values, to which
/// the warps add in turns.
template <int HeadDim, int ColumnTiles, int Warps>
struct WarpMerge {
  static constexpr int columns = ColumnTiles * tile_columns;
  static_assert(columns <= (Warps - 1) * warp_lanes, "a warp has nothing to do while states are merged");
  static constexpr int buffers = Warps < 4 ? Warps : 4;
  static constexpr int pitch = HeadDim + 1;  // columns begin in different banks
  static constexpr int bytes = buffers * columns * pitch * 4;

  float* values;         ///< [buffers, columns, pitch]
  PartialState* states;  ///< [Warps + 1, columns]; the last is the block's

  /// Called by all threads of the block, and then `merge_values`. `meanwhile()` is called by all lanes of a warp that
  /// has nothing else to do.
  template <class Meanwhile>
  KVPOLICY_DEVICE void merge_states(OnlineSoftmax<HeadDim, ColumnTiles>& softmax, Meanwhile meanwhile) const {
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
    } else if (warp_index() == Warps - 1) {
      meanwhile();
    }
    sync_block();
  }

  /// Afterwards `value` and `state` return the sums.
  KVPOLICY_DEVICE void merge_values(const OnlineSoftmax<HeadDim, ColumnTiles>& softmax,
                                    int used_columns) const {
    const int t = lane_index() % 4;
    const int warp = warp_index();
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

}  // namespace kvpolicy::gpu
