// SPDX-License-Identifier: Apache-2.0
//
// Scores the rows of heads that are compressed by a function of their keys: the length of the key, as
// policy/key_norm_scorer.hpp defines it (arXiv:2406.11430), or a function of the caller's own.
//
// A thread gathers one row in the order of the channels, as the host does, so that both rank rows alike.
// Each key is read once.
#pragma once

#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/cuda/kernels/gather_row.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One layer of one sequence, whose rows are all committed.
struct KeyScoresParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  int scorer = 0;                                     ///< of the heads that this launch scores
  int page_rows = 64;
  float* scores = nullptr;  ///< [kv_heads, pitch]
  long long pitch = 0;
};

inline constexpr int key_scores_threads = 128;

/// `Gather` is that of a GatheringKeyScorer (policy/row_scorer.hpp). Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim, class Gather>
KVPOLICY_KERNEL(key_scores_threads, 4)
key_scores_kernel(const KVPOLICY_GRID_CONSTANT KeyScoresParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (how.ranking != Ranking::keys || how.scorer != p.scorer) return;
  const HeadView& head = p.heads[block_y()];
  const int candidates = how.rule().candidates(p.state->tokens - head.evicted);
  const int packed_end = head.packed_end(p.state->committed);
  for (int row = block_x() * thread_count() + thread_index(); row < candidates;
       row += grid_x() * thread_count()) {
    Gather gather{how.key_numbers};
    gather_row<E, HeadDim>(head, p.page_rows, row, packed_end, true, gather);
    p.scores[block_y() * p.pitch + row] = gather.score();
  }
}

}  // namespace kvpolicy::gpu
