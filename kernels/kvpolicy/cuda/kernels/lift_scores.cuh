// SPDX-License-Identifier: Apache-2.0
//
// Lifts low scores to a share of the mean of the head's scores, because a row that few queries have looked at so far
// may matter yet: the second step of DefensiveKV (arXiv:2510.13334), as policy/snapkv_scorer.hpp has it. The scores of
// query heads that are weighed by themselves (weigh_outputs.cuh) are lifted by themselves.
#pragma once

#include <cstddef>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/join_block.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One layer of one sequence, whose rows are all committed and scored.
struct LiftScoresParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  int group = 1;
  float* scores = nullptr;          ///< [kv_heads, pitch]
  float* of_query_heads = nullptr;  ///< [kv_heads * group, pitch]; null where no head weighs outputs
  long long pitch = 0;
};

inline constexpr int lift_scores_threads = 1024;
constexpr std::size_t lift_scores_shared_bytes() { return join_block_bytes; }

/// Grid (1 + group, kv_heads): a head's scores, then those of each of its query heads.
template <int Threads = lift_scores_threads>
KVPOLICY_KERNEL(Threads, 1)
lift_scores_kernel(const KVPOLICY_GRID_CONSTANT LiftScoresParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (!(how.prior_share > 0.0) || (block_x() > 0 && !how.weighs_outputs())) return;
  const int candidates = how.rule().candidates(p.state->tokens - p.heads[block_y()].evicted);
  float* scores = block_x() == 0 ? p.scores + block_y() * p.pitch
                                 : p.of_query_heads + (block_y() * p.group + block_x() - 1) * p.pitch;
  double sum = 0.0;
  for (int row = thread_index(); row < candidates; row += Threads) sum += static_cast<double>(scores[row]);
  sum = join_block(sum, reinterpret_cast<double*>(shared_memory()), [](double a, double b) { return a + b; });
  const auto least = static_cast<float>(how.prior_share * sum / static_cast<double>(candidates));
  for (int row = thread_index(); row < candidates; row += Threads) {
    if (scores[row] < least) scores[row] = least;
  }
}

}  // namespace kvpolicy::gpu
