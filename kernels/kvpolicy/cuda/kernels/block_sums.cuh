// SPDX-License-Identifier: Apache-2.0
//
// Sums over the threads of a block. CUB's BlockScan means the same, and every file that includes the library would compile its
// headers for this one use of them.
#pragma once

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Prefix sums of one number of each of a block's `Threads` threads, in their order.
template <class T, int Threads>
class BlockSums {
  static_assert(Threads % warp_lanes == 0);
  static constexpr int warps = Threads / warp_lanes;

 public:
  /// Shared memory of a call.
  struct Memory {
    T of_warps[warps];
  };
  struct Result {
    T before;  ///< of the threads before this one
    T total;
  };
  /// Called by all threads; between two calls with the same memory there is a sync_block.
  KVPOLICY_DEVICE static Result of(T own, Memory& memory) {
    // Unforeseen: code after the call asks the same of its lane, and would have the answers kept in registers for it.
    const int lane = unforeseen(lane_index());
    T up_to_lane = own;
    for (int distance = 1; distance < warp_lanes; distance *= 2) {
      const T below = shuffle_up(up_to_lane, distance);
      if (lane >= distance) up_to_lane += below;
    }
    if (lane == warp_lanes - 1) memory.of_warps[warp_index()] = up_to_lane;
    const T before_lane = shuffle_up(up_to_lane, 1);
    sync_block();
    Result sums{lane == 0 ? T{} : before_lane, T{}};
    for (int warp = 0; warp < warps; ++warp) {
      if (warp < warp_index()) sums.before += memory.of_warps[warp];
      sums.total += memory.of_warps[warp];
    }
    return sums;
  }
};

}  // namespace kvpolicy::gpu
