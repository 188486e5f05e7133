// SPDX-License-Identifier: Apache-2.0
//
// Scores each chunk of a selecting head for a query: by the dot product with the chunk's mean key
// (TriForce, arXiv:2404.11912), or by the upper bound from its smallest and largest keys (Quest,
// arXiv:2406.10774). policy/chunk_summary.hpp defines both.
//
// Both scores are linear in the summaries, so the queries of a group are summed first. What remains
// is one matrix-vector product, which is limited by bandwidth and runs on the float units with
// 16-byte loads.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Scores of one layer, for any number of sequences. All pointers are device pointers.
struct ScoreParams {
  const HeadView* heads = nullptr;     ///< [sequences, kv_heads]
  const LayerState* states = nullptr;  ///< [sequences]
  int kv_heads = 0;
  int group = 1;
  int page_rows = 64;
  int queries = 1;  ///< queries of the call; the last of them scores
  Tensor q = {};    ///< [sequences, queries, kv_heads * group, head_dim]
};

inline constexpr int score_threads = 128;

/// How many lanes share a summary; they take its 16-byte parts in turn.
template <int HeadDim>
inline constexpr int score_lanes = HeadDim == 80    ? 2
                                   : HeadDim == 96  ? 4
                                   : HeadDim == 256 ? 16
                                                    : 8;

/// The query for the mean or the smallest keys, and then that for the largest keys.
template <int HeadDim>
constexpr std::size_t score_shared_bytes() {
  return 2 * HeadDim * sizeof(float);
}

/// Writes the dot products of `chunks` full chunks with `query` [Sides, HeadDim] to `scores`.
template <Element E, int HeadDim, int Sides>
KVPOLICY_DEVICE void score_chunks(const HeadView& head, int chunks, int page_rows, const float* query,
                                  float* scores) {
  constexpr int lanes = score_lanes<HeadDim>;
  constexpr int parts = HeadDim / 8 / lanes;  // 16-byte parts of a summary for each lane
  constexpr int rows = warp_lanes / lanes;
  // About eight loads are in flight in each lane. A tile never crosses a page.
  constexpr int steps = parts * Sides < 8 ? 8 / (parts * Sides) : 1;
  constexpr int tile = rows * steps;
  static_assert(quantized_together % tile == 0);

  const int part = lane_index() % lanes;
  float q[Sides][parts][8];
  KVPOLICY_UNROLL
  for (int side = 0; side < Sides; ++side) {
    KVPOLICY_UNROLL
    for (int i = 0; i < parts; ++i) {
      KVPOLICY_UNROLL
      for (int c = 0; c < 8; ++c) q[side][i][c] = query[side * HeadDim + (i * lanes + part) * 8 + c];
    }
  }

  const int warps = thread_count() / warp_lanes;
  for (int first = (block_x() * warps + warp_index()) * tile; first < chunks;
       first += grid_x() * warps * tile) {
    const auto* page = reinterpret_cast<const Words4*>(head.summary_pages[first / page_rows]);
    const int first_in_page = first % page_rows;
    Words4 words[steps][Sides][parts];
    KVPOLICY_UNROLL
    for (int step = 0; step < steps; ++step) {
      const int ahead = smaller(step * rows + lane_index() / lanes, chunks - 1 - first);
      KVPOLICY_UNROLL
      for (int side = 0; side < Sides; ++side) {
        const int row = side * page_rows + first_in_page + ahead;
        KVPOLICY_UNROLL
        for (int i = 0; i < parts; ++i) {
          words[step][side][i] = load_once(page + row * (HeadDim / 8) + i * lanes + part);
        }
      }
    }
    KVPOLICY_UNROLL
    for (int step = 0; step < steps; ++step) {
      float sum = 0.0F;
      KVPOLICY_UNROLL
      for (int side = 0; side < Sides; ++side) {
        KVPOLICY_UNROLL
        for (int i = 0; i < parts; ++i) {
          KVPOLICY_UNROLL
          for (int w = 0; w < 4; ++w) {
            const std::uint32_t word = words[step][side][i].word[w];
            sum += q[side][i][2 * w] * to_float<E>(static_cast<std::uint16_t>(word));
            sum += q[side][i][2 * w + 1] * to_float<E>(static_cast<std::uint16_t>(word >> 16));
          }
        }
      }
      KVPOLICY_UNROLL
      for (int mask = 1; mask < lanes; mask *= 2) sum += shuffle_xor(sum, mask);
      const int chunk = first + step * rows + lane_index() / lanes;
      // Chunk 0 has the attention sinks and is always read.
      if (part == 0 && chunk < chunks) scores[chunk] = chunk == 0 ? -minus_infinity() : sum;
    }
  }
}

/// Scores the full chunks of each selecting head that has more of them than its budget. Grid: any
/// number of blocks for a head, then sequences * kv_heads.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(score_threads, 3)
score_kernel(const KVPOLICY_GRID_CONSTANT ScoreParams p) {
  const HeadView& head = p.heads[block_y()];
  if (head.chunk_rows == 0 || head.own_summary != 0) return;
  const int sequence = block_y() / p.kv_heads;
  const int chunks = head.closed_chunks(p.states[sequence].committed);
  if (chunks <= head.budget_chunks) return;

  auto* query = reinterpret_cast<float*>(shared_memory());
  const int first_head = block_y() % p.kv_heads * p.group;
  for (int c = thread_index(); c < HeadDim; c += thread_count()) {
    float low = 0.0F;
    float high = 0.0F;
    for (int member = 0; member < p.group; ++member) {
      const float x = to_float<E>(p.q.row(sequence, p.queries - 1, first_head + member)[c]);
      low += head.min_max && x > 0.0F ? 0.0F : x;
      high += x > 0.0F ? x : 0.0F;
    }
    query[c] = low;
    query[HeadDim + c] = high;
  }
  sync_block();
  float* scores = head.scores;
  if (head.min_max) {
    score_chunks<E, HeadDim, 2>(head, chunks, p.page_rows, query, scores);
  } else {
    score_chunks<E, HeadDim, 1>(head, chunks, p.page_rows, query, scores);
  }
}

}  // namespace kvpolicy::gpu
