// SPDX-License-Identifier: Apache-2.0
//
// Scores the rows of heads that are compressed by a function of their keys: the length of the key, as
// policy/key_norm_scorer.hpp defines it (arXiv:2406.11430), or a function of the caller's own.
//
// A thread gathers one row in the order of the channels, as the host does, so that both rank rows alike.
// Each key is read once.
#pragma once

#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/cuda/kernels/compact.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

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
    if (can_quantize<HeadDim> && row < packed_end) {
      if constexpr (can_quantize<HeadDim>) {
        if (head.key_hadamard) {
          float key[HeadDim];  // in memory; few keys are scored once they are quantised
          for (int channel = 0; channel < HeadDim; channel += 8) {
            PackedVector<HeadDim>{head, p.page_rows, row, channel, true}.load(key + channel);
          }
          rotate_row<HeadDim>(key);
          for (const float number : key) gather.add(number);
        } else {
          for (int channel = 0; channel < HeadDim; channel += 8) {
            const PackedVector<HeadDim> key{head, p.page_rows, row, channel, true};
            for (int i = 0; i < 8; ++i) gather.add(key.number(i));
          }
        }
      }
    } else {
      const std::uint16_t* key = exact_row<HeadDim>(head, p.page_rows, row, true);
      for (int channel = 0; channel < HeadDim; channel += 8) {
        const Words4 words = *reinterpret_cast<const Words4*>(key + channel);
        KVPOLICY_UNROLL
        for (int i = 0; i < 8; ++i) {
          gather.add(to_float<E>(static_cast<std::uint16_t>(words.word[i / 2] >> 16 * (i % 2))));
        }
      }
    }
    p.scores[block_y() * p.pitch + row] = gather.score();
  }
}

}  // namespace kvpolicy::cuda
