// SPDX-License-Identifier: Apache-2.0
//
// Scores the rows of heads that are compressed by the attention of their latest queries (observe.cuh):
// SnapKV's scores (arXiv:2404.14469, arXiv:2410.19258; one score for a KV head, as
// policy/snapkv_scorer.hpp defines it) and TOVA's (policy/tova_scorer.hpp), which are SnapKV's for one
// query and no pooling. The second pass over the keys computes each row's probabilities, sums them over
// the queries, pools them along the rows and sums over the group; for the worst case (DefensiveKV,
// arXiv:2510.13334) it takes the largest instead of both sums. It also writes unpooled sums, which decide
// between rows of equal scores; and the scores of each query head by itself, for heads that weigh these by its part of
// the output projection (weigh_outputs.cuh).
#pragma once

#include <kvpolicy/cuda/kernels/observe.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>

namespace kvpolicy::gpu {

/// Largest CompressionSettings::kernel, with which a block still pools at least 64 rows. The number of queries
/// may be any for which observe_shared_bytes fit into a block (at head_dim 256 more than 200).
inline constexpr int most_pooled = votes_rows - quantized_together + 1;

struct VotesParams {
  ObserveParams observed;
  float* scores = nullptr;    ///< [kv_heads, pitch]
  float* unpooled = nullptr;  ///< as scores: each row's own votes, not pooled
  /// [kv_heads * group, pitch]: scores of each query head by itself; null where no head weighs outputs.
  float* of_query_heads = nullptr;
  long long pitch = 0;
};

/// For each of the rows [first, first + count), sums the pooled votes of `heads` query heads of a KV head, from
/// `first_head` on, and also the row's own votes, or takes the largest; `votes` begin at row `votes_first`.
KVPOLICY_DEVICE void pool_votes(const VotesParams& params, int kv_head, int first_head, int heads,
                                int queries, const float* votes, int votes_first, int first, int count,
                                int candidates) {
  const int group = params.observed.group;
  // Read again, so that the settings take no registers while keys are multiplied.
  const CompressionSettings& how = params.observed.compressions[kv_head];
  const int kernel = how.kernel;
  const bool average = how.average;
  const bool add = first_head > 0;
  const int counted = (how.votes == Votes::mean ? queries : 1) * (average ? kernel : 1);
  const float weight_alone = 1.0F / static_cast<float>(counted);
  const float weight = 1.0F / static_cast<float>(how.votes == Votes::mean ? counted * group : counted);
  float* scores = params.scores + kv_head * params.pitch;
  float* unpooled = params.unpooled + kv_head * params.pitch;
  float* of_query_heads =
      how.weighs_outputs() ? params.of_query_heads + (kv_head * group + first_head) * params.pitch : nullptr;
  for (int row = first + thread_index(); row < first + count; row += thread_count()) {
    const int from = larger(row - kernel / 2, 0) - votes_first;
    const int to = smaller(row + kernel / 2 + 1, candidates) - votes_first;
    float score = 0.0F;
    float own = add ? unpooled[row] : 0.0F;
    for (int head = 0; head < heads; ++head) {
      const float* near = votes + head * votes_rows;
      own = with_vote(how.votes, own, near[row - votes_first]);
      float pooled = near[from];
      for (int i = from + 1; i < to; ++i) {
        pooled = average ? pooled + near[i] : near[i] > pooled ? near[i] : pooled;
      }
      score = with_vote(how.votes, score, pooled);
      if (of_query_heads != nullptr) of_query_heads[head * params.pitch + row] = pooled * weight_alone;
    }
    scores[row] = with_vote(how.votes, add ? scores[row] : 0.0F, score * weight);
    unpooled[row] = own;
  }
}

/// After observe_lse_kernel. Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim, bool Packed>
KVPOLICY_KERNEL(observe_threads, HeadDim <= 128 ? 3 : 2)
votes_kernel(const KVPOLICY_GRID_CONSTANT VotesParams params) {
  const ObserveParams& p = params.observed;
  using Keys = HeldKeys<E, HeadDim>;
  using Queries = QueryOperands<HeadDim, 1>;
  constexpr int warps = observe_threads / warp_lanes;
  const int kv_head = block_y();
  const HeadView& head = p.heads[kv_head];
  const CompressionSettings how = p.compressions[kv_head];
  const Observation seen = observation_of(p, kv_head);
  if (seen.queries == 0) return;
  const int at_once = observe_heads_at_once<HeadDim>(p.group, p.queries);
  // Rows that are always kept are neither ranked nor pooled into a neighbour. All other rows come
  // before the first query or with it, so every query sees them. The head has no sinks.
  const int candidates = how.rule().candidates(p.state->tokens - head.evicted);
  const int packed_end = head.packed_end(p.state->committed);
  const int half_width = how.kernel / 2;
  const int halo = quotient_up(half_width, 32) * 32;  // whole HeldKeys
  const int tile_candidates = votes_rows - 2 * halo;

  for (int from = 0; from < p.group; from += at_once) {
    const int heads = smaller(at_once, p.group - from);
    const int columns = seen.tiles * tile_columns;
    std::byte* queries = shared_memory() + observed_list_bytes;
    auto* lse = reinterpret_cast<float*>(queries + heads * seen.tiles * Queries::bytes);
    float* votes = lse + heads * columns;
    sync_block();  // the previous heads are finished
    load_observing<E, HeadDim>(p, head, seen, kv_head * p.group + from, heads, false, queries);
    for (int i = thread_index(); i < heads * columns; i += observe_threads) {
      lse[i] = p.log_sum_exp[static_cast<long long>(kv_head) * observe_columns(p.group, p.queries) +
                             from * columns + i];
    }
    sync_block();

    for (long long tile = block_x(); tile * tile_candidates < candidates; tile += grid_x()) {
      const int first = static_cast<int>(tile * tile_candidates);
      const int count = smaller(tile_candidates, candidates - first);
      // Of the halo, only the rows inside the pooling kernel are loaded.
      const int low = larger(first - half_width, 0);
      const int high = smaller(first + count + half_width, candidates) - 1;
      for (int unit = warp_index(); unit < votes_rows / Keys::rows; unit += warps) {
        const int unit_row = first - halo + unit * Keys::rows;
        if (unit_row + Keys::rows <= low || unit_row > high) continue;
        const KeyRows keys_from{
            .head = head,
            .page_rows = p.page_rows,
            .source = unit_row < packed_end ? DeviceSegment::Source::packed : DeviceSegment::Source::exact};
        for_keys<E, HeadDim, Packed>(
            keys_from, unit_row, low, high, [&](const Keys& keys, int row, auto split) {
              constexpr bool is_split = decltype(split)::value;
              KVPOLICY_NO_UNROLL
              for (int member = 0; member < heads; ++member) {
                float sums[Keys::parts][2] = {};
                KVPOLICY_NO_UNROLL
                for (int t = member * seen.tiles; t < (member + 1) * seen.tiles; ++t) {
                  float logits[Keys::parts][4];
                  keys.template multiply<is_split>(queries + t * Queries::bytes, logits);
                  KVPOLICY_UNROLL
                  for (int i = 0; i < 4; ++i) {
                    const float total = lse[t * tile_columns + lane_index() % 4 * 2 + i % 2];
                    KVPOLICY_UNROLL
                    for (int part = 0; part < Keys::parts; ++part) {
                      const float logit = capped(logits[part][i] * p.scale_log2, p.softcap);
                      sums[part][i / 2] =
                          with_vote(how.votes, sums[part][i / 2], exp2_approximate(logit - total));
                    }
                  }
                }
                KVPOLICY_UNROLL
                for (int part = 0; part < (is_split ? 1 : Keys::parts); ++part) {
                  KVPOLICY_UNROLL
                  for (int side = 0; side < 2; ++side) {
                    float sum = sums[part][side];
                    sum = with_vote(how.votes, sum, shuffle_xor(sum, 1));
                    sum = with_vote(how.votes, sum, shuffle_xor(sum, 2));
                    const int at = row - first + halo + part * tile_rows + side * 8 + lane_index() / 4;
                    if (lane_index() % 4 == 0) votes[member * votes_rows + at] = sum;
                  }
                }
              }
            });
      }
      sync_block();
      pool_votes(params, kv_head, from, heads, seen.queries, votes, first - halo, first, count, candidates);
      sync_block();  // the votes may be overwritten
    }
  }
}

}  // namespace kvpolicy::gpu
