// SPDX-License-Identifier: Apache-2.0
//
// Chooses the likeliest token on the device, where the logits are.
#pragma once

#include <kvpolicy/cuda/kernels/simt.cuh>
#include <reference_model/cuda/kernels/choices.cuh>

namespace kvpolicy::gpu::llama {

struct LikeliestParams {
  const float* logits = nullptr;  ///< [vocabulary]
  int vocabulary = 0;
  Choices choices = {};
};

inline constexpr int likeliest_threads = 1024;

struct Candidate {
  float logit;
  int token;
};
KVPOLICY_DEVICE Candidate likelier(Candidate a, Candidate b) {
  return b.logit > a.logit || (b.logit == a.logit && b.token < a.token) ? b : a;
}

constexpr std::size_t likeliest_shared_bytes() { return likeliest_threads / warp_lanes * sizeof(Candidate); }

/// One block. Ties go to the lower token. A NaN, +infinity, or no logit above -infinity gives
/// no_token; reference::likeliest throws in these cases.
template <int Threads = likeliest_threads>
KVPOLICY_KERNEL(Threads, 1)
likeliest_kernel(const KVPOLICY_GRID_CONSTANT LikeliestParams p) {
  const float infinity = float_of_bits(0x7f800000U);
  Candidate best{-infinity, no_token};
  for (int token = thread_index(); token < p.vocabulary; token += Threads) {
    const float logit = p.logits[token];
    // The condition is written so that NaN takes the second branch, and then wins.
    if (logit < infinity) {
      if (logit > best.logit) best = {logit, token};
    } else {
      best = {infinity, no_token};
    }
  }
  for (int mask = warp_lanes / 2; mask > 0; mask /= 2) {
    best = likelier(best, {shuffle_xor(best.logit, mask), shuffle_xor(best.token, mask)});
  }
  auto* of_warps = reinterpret_cast<Candidate*>(shared_memory());
  if (lane_index() == 0) of_warps[warp_index()] = best;
  sync_block();
  if (thread_index() > 0) return;
  for (int warp = 1; warp < Threads / warp_lanes; ++warp) best = likelier(best, of_warps[warp]);
  p.choices.record(best.token);
}

}  // namespace kvpolicy::gpu::llama
