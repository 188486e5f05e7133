// SPDX-License-Identifier: Apache-2.0
//
// How much attention the latest queries of a text pay to each row of a compressing head: SnapKV's
// scores (arXiv:2404.14469, arXiv:2410.19258; one score for a KV head, as policy/snapkv_scorer.hpp
// defines it), computed without storing the probabilities [heads, window, rows].
//
// The keys are read twice. observe_lse_kernel computes the log-sum-exp of each query over all rows.
// With it, observe_score_kernel computes each row's probabilities, sums them over the observation
// window, pools them along the rows and sums over the group. It also writes unpooled sums, which
// decide between rows of equal scores. Products are S^T = K q^T, as in decode: a warp has rows of
// keys from global memory in registers, and all columns of queries are in shared memory in operand
// order. So a key is loaded once for any number of queries.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/held_keys.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

/// One layer of one sequence, whose rows are all committed. All pointers are device pointers.
struct ObserveParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const Compression* compressions = nullptr;  ///< [kv_heads]
  int kv_heads = 0;
  int group = 1;
  int page_rows = 64;
  int window = 0;  ///< the largest window of the compressions
  // The latest queries, [query_slots, kv_heads * group, head_dim]; slot p % query_slots has that of
  // the token at position p. They are known from position `first_query` on, at least one. If a
  // head's window is larger, only the known queries vote.
  const std::uint16_t* queries = nullptr;
  int query_slots = 0;
  int first_query = 0;
  const float* attention_sink_bias = nullptr;  ///< [kv_heads * group] or null
  float scale_log2 = 0.0F;
  float softcap = 0.0F;
  PartialState* partial = nullptr;   ///< [kv_heads, blocks of a head, observe_columns]
  std::uint32_t* tickets = nullptr;  ///< [kv_heads]; 0 before and after a call
  float* log_sum_exp = nullptr;      ///< [kv_heads, observe_columns], in units of log 2
  float* scores = nullptr;           ///< [kv_heads, pitch]
  float* unpooled = nullptr;         ///< as scores: each row's own votes, not pooled
  long long pitch = 0;
};

inline constexpr int observe_threads = 128;
inline constexpr int votes_rows = 512;  ///< Rows that a block pools at a time, halo included.
/// Largest Compression::kernel, with which a block still pools at least 64 rows. A window may have
/// any size for which observe_shared_bytes fit into a block (at head_dim 256 more than 200
/// queries).
inline constexpr int most_pooled = votes_rows - block_rows + 1;

/// Tiles of columns for the queries of one query head; query heads do not share tiles.
KVPOLICY_HOST_DEVICE constexpr int observe_tiles(int queries) {
  return quotient_up(queries, tile_columns);
}
/// Columns of a KV head.
KVPOLICY_HOST_DEVICE constexpr int observe_columns(int group, int window) {
  return group * observe_tiles(window) * tile_columns;
}

/// Running softmax of the two columns of a tile that a lane has, over the rows that it has seen.
struct alignas(16) LaneState {
  PartialState column[2];

  /// In each part, the logits of column c have indices c and c + 2.
  template <int Parts>
  KVPOLICY_DEVICE void add(const float (&logits)[Parts][4]) {
    KVPOLICY_UNROLL
    for (int c = 0; c < 2; ++c) {
      const float before = column[c].max;
      float max = before;
      KVPOLICY_UNROLL
      for (int part = 0; part < Parts; ++part) {
        max = logits[part][c] > max ? logits[part][c] : max;
        max = logits[part][c + 2] > max ? logits[part][c + 2] : max;
      }
      // If nothing was visible yet, any finite number can be the maximum.
      const float base = max == minus_infinity() ? 0.0F : max;
      float sum = column[c].sum * exp2_approximate(before - base);
      KVPOLICY_UNROLL
      for (int part = 0; part < Parts; ++part) {
        sum += exp2_approximate(logits[part][c] - base);
        sum += exp2_approximate(logits[part][c + 2] - base);
      }
      column[c] = {max, sum};
    }
  }
};

// Shared memory has the queries, and then either lane states [tiles, warps, lanes], or the columns'
// log-sum-exps and votes [heads, votes_rows].
template <int HeadDim>
KVPOLICY_HOST_DEVICE constexpr int observe_bytes_of_head(int window) {
  constexpr int state_bytes = observe_threads * static_cast<int>(sizeof(LaneState));
  constexpr int lse_bytes = tile_columns * static_cast<int>(sizeof(float));
  const int tiles = observe_tiles(window);
  const int states = tiles * state_bytes;
  const int votes = tiles * lse_bytes + votes_rows * static_cast<int>(sizeof(float));
  return tiles * QueryOperands<HeadDim, 1>::bytes + (states > votes ? states : votes);
}
/// Query heads of a group that a block observes at once: as many as leave room for a second block.
/// If these are not all, the keys are read again for the others.
template <int HeadDim>
KVPOLICY_HOST_DEVICE constexpr int observe_heads_at_once(int group, int window) {
  const int most = 72 * 1024 / observe_bytes_of_head<HeadDim>(window);
  const int rounds = most < 1 ? group : (group + most - 1) / most;
  return (group + rounds - 1) / rounds;
}
template <int HeadDim>
constexpr std::size_t observe_shared_bytes(int group, int window) {
  return static_cast<std::size_t>(observe_heads_at_once<HeadDim>(group, window) *
                                  observe_bytes_of_head<HeadDim>(window));
}

/// What a block observes.
struct Observation {
  int queries;   ///< number of queries that vote
  int position;  ///< position of the first of them
  int tiles;     ///< tiles of queries in each query head
  int rows;      ///< rows of the KV head
  int packed_end;
};
KVPOLICY_DEVICE Observation observation_of(const ObserveParams& p, const HeadView& head,
                                           const Compression& how) {
  const LayerState state = *p.state;
  const int queries = smaller(how.window, state.tokens - p.first_query);
  return {.queries = queries,
          .position = state.tokens - queries,
          .tiles = observe_tiles(queries),
          .rows = state.tokens - head.evicted,
          .packed_end = head.packed_end(state.committed)};
}

/// Loads the queries of `heads` query heads from `first_head` on to shared memory; incomplete tiles
/// are filled with zeros.
template <int HeadDim>
KVPOLICY_DEVICE void load_observing(const ObserveParams& p, const Observation& seen, int first_head,
                                    int heads, std::byte* tiles) {
  constexpr int vectors = HeadDim / 8;
  const int q_heads = p.kv_heads * p.group;
  for (int i = thread_index(); i < heads * seen.tiles * tile_columns * vectors;
       i += thread_count()) {
    const int column = i / vectors;
    const int head = column / (seen.tiles * tile_columns);
    const int query = column % (seen.tiles * tile_columns);
    Words4 words = {};
    if (query < seen.queries) {
      const long long slot = (seen.position + query) % p.query_slots;
      words = reinterpret_cast<const Words4*>(p.queries + (slot * q_heads + first_head + head) *
                                                              HeadDim)[i % vectors];
    }
    using Queries = QueryOperands<HeadDim, 1>;
    *Queries::place(tiles + column / tile_columns * Queries::bytes, column % tile_columns,
                    i % vectors * 8) = words;
  }
}

/// Merges the results of a head's blocks, in the order of the rows.
KVPOLICY_DEVICE void merge_observed(const ObserveParams& p, const Observation& seen, int kv_head) {
  const int columns = observe_columns(p.group, p.window);
  const int padded = seen.tiles * tile_columns;
  for (int column = thread_index(); column < p.group * padded; column += thread_count()) {
    PartialState all{minus_infinity(), 0.0F};
    for (int block = 0; block < grid_x(); ++block) {
      const PartialState* place =
          p.partial + (static_cast<long long>(kv_head) * grid_x() + block) * columns + column;
      const PartialState part{load_shared_by_blocks(&place->max),
                              load_shared_by_blocks(&place->sum)};
      const float max = part.max > all.max ? part.max : all.max;
      all.sum = all.sum * rescale_factor(all.max, max) + part.sum * rescale_factor(part.max, max);
      all.max = max;
    }
    const float* sink =
        p.attention_sink_bias == nullptr ? nullptr : p.attention_sink_bias + kv_head * p.group + column / padded;
    // A column without a query gets probability 0.
    p.log_sum_exp[static_cast<long long>(kv_head) * columns + column] =
        column % padded < seen.queries ? finish_row(all, sink).log_sum_exp * log2_e
                                       : -minus_infinity();
  }
}

/// Grid: any number of blocks, which share a head's rows, then kv_heads.
template <Element E, int HeadDim, bool Packed>
KVPOLICY_KERNEL(observe_threads, HeadDim <= 128 ? 3 : 2)
observe_lse_kernel(const KVPOLICY_GRID_CONSTANT ObserveParams p) {
  using Keys = HeldKeys<E, HeadDim>;
  using Queries = QueryOperands<HeadDim, 1>;
  constexpr int warps = observe_threads / warp_lanes;
  const int kv_head = block_y();
  const HeadView& head = p.heads[kv_head];
  const Compression how = p.compressions[kv_head];
  if (how.window == 0) return;
  const Observation seen = observation_of(p, head, how);
  const int units = quotient_up(seen.rows, Keys::rows);
  const int first_unit = static_cast<int>(static_cast<long long>(units) * block_x() / grid_x());
  const int last_unit =
      static_cast<int>(static_cast<long long>(units) * (block_x() + 1) / grid_x());
  const int at_once = observe_heads_at_once<HeadDim>(p.group, p.window);
  PartialState* partial = p.partial + (static_cast<long long>(kv_head) * grid_x() + block_x()) *
                                          observe_columns(p.group, p.window);

  for (int from = 0; from < p.group; from += at_once) {
    const int heads = smaller(at_once, p.group - from);
    const int tiles = heads * seen.tiles;
    std::byte* queries = shared_memory();
    auto* states = reinterpret_cast<LaneState*>(queries + tiles * Queries::bytes);
    const PartialState nothing{minus_infinity(), 0.0F};
    sync_block();  // the previous heads are merged
    load_observing<HeadDim>(p, seen, kv_head * p.group + from, heads, queries);
    for (int tile = 0; tile < tiles; ++tile) {
      states[tile * observe_threads + thread_index()] = {{nothing, nothing}};
    }
    sync_block();

    for (int unit = first_unit + warp_index(); unit < last_unit; unit += warps) {
      for_keys<E, HeadDim, Packed>(
          head, p.page_rows, seen.packed_end, unit * Keys::rows, 0, seen.rows - 1,
          [&](const Keys& keys, int row, auto split) {
            constexpr bool is_split = decltype(split)::value;
            const bool edge = row + Keys::rows + head.evicted > seen.position + 1;
            KVPOLICY_NO_UNROLL
            for (int tile = 0; tile < tiles; ++tile) {
              float logits[Keys::parts][4];
              keys.template multiply<is_split>(queries + tile * Queries::bytes, logits);
              KVPOLICY_UNROLL
              for (int part = 0; part < Keys::parts; ++part) {
                KVPOLICY_UNROLL
                for (int i = 0; i < 4; ++i) {
                  float& logit = logits[part][i];
                  logit = capped(logit * p.scale_log2, p.softcap);
                  const int at = row + part * tile_rows + i / 2 * 8 + lane_index() / 4;
                  const int query = tile % seen.tiles * tile_columns + lane_index() % 4 * 2 + i % 2;
                  const bool hidden = edge && at + head.evicted > seen.position + query;
                  if (hidden || (is_split && part > 0)) logit = minus_infinity();
                }
              }
              LaneState& place = states[tile * observe_threads + thread_index()];
              LaneState state = place;
              state.add(logits);
              place = state;
            }
          });
    }
    sync_block();

    for (int column = thread_index(); column < tiles * tile_columns; column += observe_threads) {
      const LaneState* of_tile = states + column / tile_columns * observe_threads;
      const int first_lane = column % tile_columns / 2;
      PartialState all = nothing;
      for (int lane = first_lane; lane < observe_threads; lane += 4) {
        const float max = of_tile[lane].column[column % 2].max;
        all.max = max > all.max ? max : all.max;
      }
      for (int lane = first_lane; lane < observe_threads; lane += 4) {
        const PartialState part = of_tile[lane].column[column % 2];
        all.sum += part.sum * rescale_factor(part.max, all.max);
      }
      partial[from * seen.tiles * tile_columns + column] = all;
    }
  }

  fence_device();
  sync_block();
  auto* arrived = reinterpret_cast<std::uint32_t*>(shared_memory());
  if (thread_index() == 0) *arrived = atomic_add(p.tickets + kv_head, 1);
  sync_block();
  if (*arrived + 1 != static_cast<std::uint32_t>(grid_x())) return;
  fence_device();
  merge_observed(p, seen, kv_head);
  if (thread_index() == 0) p.tickets[kv_head] = 0;
}

/// For each of the rows [first, first + count), sums the pooled votes of `heads` query heads and
/// also the row's own votes; `votes` begin at row `votes_first`.
KVPOLICY_DEVICE void pool_votes(const Compression& how, const float* votes, int votes_first,
                                int heads, int first, int count, int candidates, float weight,
                                bool add, float* scores, float* unpooled) {
  for (int row = first + thread_index(); row < first + count; row += thread_count()) {
    const int from = larger(row - how.kernel / 2, 0) - votes_first;
    const int to = smaller(row + how.kernel / 2 + 1, candidates) - votes_first;
    float score = 0.0F;
    float own = add ? unpooled[row] : 0.0F;
    for (int head = 0; head < heads; ++head) {
      const float* near = votes + head * votes_rows;
      own += near[row - votes_first];
      float pooled = near[from];
      for (int i = from + 1; i < to; ++i) {
        pooled = how.average ? pooled + near[i] : near[i] > pooled ? near[i] : pooled;
      }
      score += pooled;
    }
    scores[row] = (add ? scores[row] : 0.0F) + score * weight;
    unpooled[row] = own;
  }
}

/// After observe_lse_kernel. Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim, bool Packed>
KVPOLICY_KERNEL(observe_threads, HeadDim <= 128 ? 3 : 2)
observe_score_kernel(const KVPOLICY_GRID_CONSTANT ObserveParams p) {
  using Keys = HeldKeys<E, HeadDim>;
  using Queries = QueryOperands<HeadDim, 1>;
  constexpr int warps = observe_threads / warp_lanes;
  const int kv_head = block_y();
  const HeadView& head = p.heads[kv_head];
  const Compression how = p.compressions[kv_head];
  if (how.window == 0) return;
  const Observation seen = observation_of(p, head, how);
  const int at_once = observe_heads_at_once<HeadDim>(p.group, p.window);
  // The window's own rows are neither ranked nor pooled into a neighbour. All other rows come
  // before the window's first query, so every query sees them.
  const int candidates = how.rule().candidates(seen.rows);
  const int half_width = how.kernel / 2;
  const int halo = quotient_up(half_width, 32) * 32;  // whole HeldKeys
  const int tile_candidates = votes_rows - 2 * halo;
  const float weight =
      1.0F / static_cast<float>(seen.queries * p.group * (how.average ? how.kernel : 1));
  float* scores = p.scores + kv_head * p.pitch;
  float* unpooled = p.unpooled + kv_head * p.pitch;

  for (int from = 0; from < p.group; from += at_once) {
    const int heads = smaller(at_once, p.group - from);
    const int columns = seen.tiles * tile_columns;
    std::byte* queries = shared_memory();
    auto* lse = reinterpret_cast<float*>(queries + heads * seen.tiles * Queries::bytes);
    float* votes = lse + heads * columns;
    sync_block();  // the previous heads are finished
    load_observing<HeadDim>(p, seen, kv_head * p.group + from, heads, queries);
    for (int i = thread_index(); i < heads * columns; i += observe_threads) {
      lse[i] = p.log_sum_exp[static_cast<long long>(kv_head) * observe_columns(p.group, p.window) +
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
        for_keys<E, HeadDim, Packed>(
            head, p.page_rows, seen.packed_end, unit_row, low, high,
            [&](const Keys& keys, int row, auto split) {
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
                      sums[part][i / 2] += exp2_approximate(logit - total);
                    }
                  }
                }
                KVPOLICY_UNROLL
                for (int part = 0; part < (is_split ? 1 : Keys::parts); ++part) {
                  KVPOLICY_UNROLL
                  for (int side = 0; side < 2; ++side) {
                    float sum = sums[part][side];
                    sum += shuffle_xor(sum, 1);
                    sum += shuffle_xor(sum, 2);
                    const int at =
                        row - first + halo + part * tile_rows + side * 8 + lane_index() / 4;
                    if (lane_index() % 4 == 0) votes[member * votes_rows + at] = sum;
                  }
                }
              }
            });
      }
      sync_block();
      pool_votes(how, votes, first - halo, heads, first, count, candidates, weight, from > 0,
                 scores, unpooled);
      sync_block();  // the votes may be overwritten
    }
  }
}

}  // namespace kvpolicy::cuda
