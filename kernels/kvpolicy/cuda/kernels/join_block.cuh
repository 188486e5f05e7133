// SPDX-License-Identifier: Apache-2.0
//
// Joins numbers in double over the threads of a block, always in the same order.
#pragma once

#include <cstddef>

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Shared memory of a call.
inline constexpr std::size_t join_block_bytes = warp_lanes * sizeof(double);

/// Joins one number of each thread of the block; all threads get the result. `of_warps` is shared memory that no call
/// before is still reading.
template <class Join>
KVPOLICY_DEVICE double join_block(double own, double* of_warps, const Join& join) {
  KVPOLICY_UNROLL
  for (int mask = 1; mask < warp_lanes; mask *= 2) own = join(own, shuffle_xor(own, mask));
  if (lane_index() == 0) of_warps[warp_index()] = own;
  sync_block();
  double all = of_warps[0];
  for (int warp = 1; warp < thread_count() / warp_lanes; ++warp) all = join(all, of_warps[warp]);
  return all;
}

}  // namespace kvpolicy::gpu
