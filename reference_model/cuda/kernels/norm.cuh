// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm (Zhang and Sennrich, arXiv:1910.07467): scales a row to unit mean square and multiplies
// it by a learned weight.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

struct NormParams {
  const float* x = nullptr;       ///< [rows, width]
  const float* weight = nullptr;  ///< [width]
  std::uint16_t* out = nullptr;   ///< [rows, width], bfloat16
  int width = 0;
  float eps = 0.0F;
};

inline constexpr int norm_threads = 512;  // many, because a decode step has one row and waits for
                                          // it
constexpr std::size_t norm_shared_bytes() { return norm_threads / warp_lanes * sizeof(float); }

/// One block for each row.
template <int Threads = norm_threads>
KVPOLICY_KERNEL(Threads, 1)
norm_kernel(const KVPOLICY_GRID_CONSTANT NormParams p) {
  const long long start = static_cast<long long>(block_x()) * p.width;
  const float* x = p.x + start;
  float squares = 0.0F;
  for (int i = thread_index(); i < p.width; i += Threads) squares += x[i] * x[i];
  for (int mask = warp_lanes / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
  auto* of_warps = reinterpret_cast<float*>(shared_memory());
  if (lane_index() == 0) of_warps[warp_index()] = squares;
  sync_block();
  float sum = 0.0F;
  for (int warp = 0; warp < Threads / warp_lanes; ++warp) sum += of_warps[warp];
  const float scale = inverse_square_root(sum / static_cast<float>(p.width) + p.eps);
  for (int i = thread_index(); i < p.width; i += Threads) {
    p.out[start + i] = from_float<bfloat16>(x[i] * scale * p.weight[i]);
  }
}

}  // namespace kvpolicy::gpu::llama
