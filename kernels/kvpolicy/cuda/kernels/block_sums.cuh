// SPDX-License-Identifier: Apache-2.0
//
// Sums over the threads of a block: CUB's BlockScan on a device, and on the emulation a plain loop with the same
// meaning. Sums over a warp's lanes are shuffles where they are needed (online_softmax.cuh, partials.cuh): every lane
// needs the result there, where CUB's WarpReduce gives it to one, and a broadcast more would be one more exchange.
#pragma once

#include <kvpolicy/cuda/kernels/simt.cuh>

#if defined(__CUDACC__)
#include <cub/block/block_scan.cuh>
#endif

namespace kvpolicy::gpu {

/// Prefix sums of one number of each of a block's `Threads` threads, in their order.
template <class T, int Threads>
class BlockSums {
 public:
#if defined(__CUDACC__)
  using Memory = typename cub::BlockScan<T, Threads>::TempStorage;  ///< shared memory of a call
#else
  struct Memory {
    T before[Threads + 1];
  };
#endif

  struct Result {
    T before;  ///< of the threads before this one
    T total;
  };
  /// Called by all threads; between two calls with the same memory there is a sync_block.
  KVPOLICY_DEVICE static Result of(T own, Memory& memory) {
    Result sums;
#if defined(__CUDACC__)
    cub::BlockScan<T, Threads>{memory}.ExclusiveSum(own, sums.before, sums.total);
#else
    memory.before[thread_index() + 1] = own;
    sync_block();
    if (thread_index() == 0) {
      memory.before[0] = T{};
      for (int thread = 0; thread < Threads; ++thread) memory.before[thread + 1] += memory.before[thread];
    }
    sync_block();
    sums = {memory.before[thread_index()], memory.before[Threads]};
#endif
    return sums;
  }
};

}  // namespace kvpolicy::gpu
