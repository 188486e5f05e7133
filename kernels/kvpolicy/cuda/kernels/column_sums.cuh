// SPDX-License-Identifier: Apache-2.0
//
// Adds up how much attention each row gets: for `observe`, the sum over some queries for each query head;
// for heads that rank their rows by all attention so far (H2O, arXiv:2306.14048, as
// policy/h2o_scorer.hpp defines it), what the queries of a call pay, which is added to HeadView::sums. Heads
// with Votes::largest keep the most that one query paid instead.
//
// This is the second pass over the keys, after observe_lse_kernel. A row belongs to one warp, so nothing
// is added by two threads and results do not depend on timing.
#pragma once

#include <kvpolicy/cuda/kernels/observe.cuh>

namespace kvpolicy::gpu {

/// Queries of one launch: more take more launches. Scratch memory is for so many.
inline constexpr int most_observing = 64;

struct ColumnSumsParams {
  ObserveParams observed;
  /// [kv_heads, group, pitch], in the order in which the rows are shown; sums are added to what is
  /// there. Null: adds means over the group to HeadView::sums, as HeadView::votes says.
  float* sums = nullptr;
  long long pitch = 0;
};

/// What two columns of lanes found of the rows of a HeldKeys, for one query head or several.
template <int Parts>
struct LaneSums {
  float part[Parts][2] = {};

  /// Sums over the lanes that have columns of the same row, or takes the largest.
  KVPOLICY_DEVICE void join(Votes votes) {
    KVPOLICY_UNROLL
    for (int p = 0; p < Parts; ++p) {
      KVPOLICY_UNROLL
      for (int side = 0; side < 2; ++side) {
        part[p][side] = with_vote(votes, part[p][side], shuffle_xor(part[p][side], 1));
        part[p][side] = with_vote(votes, part[p][side], shuffle_xor(part[p][side], 2));
      }
    }
  }
};

/// Grid: any number of blocks, which share a head's rows, then kv_heads.
template <Element E, int HeadDim, bool Packed>
KVPOLICY_KERNEL(observe_threads, HeadDim <= 128 ? 3 : 2)
column_sums_kernel(const KVPOLICY_GRID_CONSTANT ColumnSumsParams params) {
  const ObserveParams& p = params.observed;
  using Keys = HeldKeys<E, HeadDim>;
  using Queries = QueryOperands<HeadDim, 1>;
  constexpr int warps = observe_threads / warp_lanes;
  const int kv_head = block_y();
  const HeadView& head = p.heads[kv_head];
  const Observation seen = observation_of(p, kv_head);
  if (seen.queries == 0) return;
  const DeviceSegmentList& list = list_observed(p, head);
  const int at_once = observe_heads_at_once<HeadDim>(p.group, p.queries);
  const int columns = seen.tiles * tile_columns;
  const Votes votes = params.sums != nullptr ? Votes::mean : head.votes;
  // Rows of the call follow those that are stored.
  const int stored = p.state->tokens - head.evicted;

  for (int from = 0; from < p.group; from += at_once) {
    const int heads = smaller(at_once, p.group - from);
    std::byte* queries = shared_memory() + observed_list_bytes;
    auto* lse = reinterpret_cast<float*>(queries + heads * seen.tiles * Queries::bytes);
    sync_block();  // the previous heads are finished
    for (int i = thread_index(); i < heads * columns; i += observe_threads) {
      lse[i] = p.log_sum_exp[static_cast<long long>(kv_head) * observe_columns(p.group, p.queries) +
                             from * columns + i];
    }
    int shown = 0;  // rows of the segments before
    for (int s = 0; s < list.count; ++s) {
      const DeviceSegment& segment = list.segment[s];
      if (s == 0 || segment.rotated != list.segment[s - 1].rotated) {
        sync_block();  // the previous segment is read
        load_observing<E, HeadDim>(p, head, seen, kv_head * p.group + from, heads, segment.rotated, queries);
        sync_block();
      }
      const ObservedRows rows{p, seen, segment, kv_head};
      const KeyRows keys_from = keys_of(p, head, kv_head, segment);
      const bool own = segment.source == DeviceSegment::Source::call;
      const int origin = keys_from.origin(rows.first);
      const int before = (rows.first - origin) / Keys::rows;
      const int units = quotient_up(rows.last + 1 - origin, Keys::rows) - before;
      for (int unit = block_x() * warps + warp_index(); unit < units; unit += grid_x() * warps) {
        for_keys<E, HeadDim, Packed>(
            keys_from, origin + (before + unit) * Keys::rows, rows.first, rows.last,
            [&](const Keys& keys, int row, auto split) {
              constexpr bool is_split = decltype(split)::value;
              constexpr int parts = is_split ? 1 : Keys::parts;
              const bool edge = !rows.all_see(row, is_split ? tile_rows : Keys::rows);
              double total[parts][2] = {};
              KVPOLICY_NO_UNROLL
              for (int member = 0; member < heads; ++member) {
                LaneSums<parts> sums;
                KVPOLICY_NO_UNROLL
                for (int t = 0; t < seen.tiles; ++t) {
                  const int tile = member * seen.tiles + t;
                  float logits[Keys::parts][4];
                  keys.template multiply<is_split>(queries + tile * Queries::bytes, logits);
                  KVPOLICY_UNROLL
                  for (int i = 0; i < 4; ++i) {
                    const int query = t * tile_columns + lane_index() % 4 * 2 + i % 2;
                    const float whole = lse[member * columns + query];
                    KVPOLICY_UNROLL
                    for (int part = 0; part < parts; ++part) {
                      const int at = row + part * tile_rows + i / 2 * 8 + lane_index() / 4;
                      if (edge && !rows.sees(query, at)) continue;
                      const float logit = capped(logits[part][i] * p.scale_log2, p.softcap);
                      sums.part[part][i / 2] =
                          with_vote(votes, sums.part[part][i / 2], exp2_approximate(logit - whole));
                    }
                  }
                }
                sums.join(votes);
                KVPOLICY_UNROLL
                for (int part = 0; part < parts; ++part) {
                  KVPOLICY_UNROLL
                  for (int side = 0; side < 2; ++side) {
                    const float sum = sums.part[part][side];
                    total[part][side] = with_vote(votes, total[part][side], static_cast<double>(sum));
                    const int at = row + part * tile_rows + side * 8 + lane_index() / 4;
                    if (params.sums == nullptr || lane_index() % 4 != 0) continue;
                    if (at < rows.first || at > rows.last) continue;
                    params.sums[(static_cast<long long>(kv_head) * p.group + from + member) * params.pitch +
                                shown + at - rows.first] += sum;
                  }
                }
              }
              if (params.sums != nullptr) return;
              const double counted = votes == Votes::mean ? static_cast<double>(p.group) : 1.0;
              KVPOLICY_UNROLL
              for (int part = 0; part < parts; ++part) {
                KVPOLICY_UNROLL
                for (int side = 0; side < 2; ++side) {
                  const int at = row + part * tile_rows + side * 8 + lane_index() / 4;
                  if (lane_index() % 4 != 0 || at < rows.first || at > rows.last) continue;
                  double& place = head.sums[(own ? stored : 0) + at];
                  place = with_vote(votes, place, total[part][side] / counted);
                }
              }
            });
      }
      shown += segment.rows;
    }
  }
}

}  // namespace kvpolicy::gpu
