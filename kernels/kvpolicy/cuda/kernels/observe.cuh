// SPDX-License-Identifier: Apache-2.0
//
// How much attention some queries pay to each row that a head shows: the sum over the queries of the
// row's probability, computed without storing the probabilities [heads, queries, rows].
//
// The keys are read twice. observe_lse_kernel computes the log-sum-exp of each query over all rows.
// With it, a second kernel computes each row's probabilities: votes.cuh pools and ranks them for a
// compression, column_sums.cuh adds them up. Products are S^T = K q^T, as in decode: a warp has rows of
// keys from global memory in registers, and all columns of queries are in shared memory in operand
// order. So a key is loaded once for any number of queries.
#pragma once

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/held_keys.cuh>
#include <kvpolicy/cuda/kernels/partials.cuh>
#include <kvpolicy/cuda/kernels/rotate.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One layer of one sequence. All pointers are device pointers.
struct ObserveParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  /// For a compression, [kv_heads]: each head is observed by its own number of latest queries. Null:
  /// every head by `queries` queries, the first of which comes `ahead` tokens before the end.
  const CompressionSettings* compressions = nullptr;
  bool accumulates = false;  ///< only heads with HeadView::sums are observed
  bool scores_rows = false;  ///< and of these those that wait for scoring passes, of which the call is part
  int kv_heads = 0;
  int group = 1;
  int page_rows = 64;
  int queries = 0;  ///< with `compressions`, the most queries of a head
  int ahead = 0;
  /// Which rows are shown. If the call's own rows are among them, `k` has their keys; without `k` its
  /// rows are left out.
  Request request = {};
  /// The queries, [1, tokens, kv_heads * group, head_dim]. They are those of the call that `request`
  /// describes, or, if `query_slots` > 0, a ring in which slot p % query_slots has that of the token at
  /// position p.
  Tensor q = {};
  int query_slots = 0;
  int first_query = 0;  ///< with `compressions`: position of the first known query; at least one is
  Tensor k = {};        ///< [1, request.queries, kv_heads, head_dim]
  /// Text positions of the first survivor_counts[head] rows, where an earlier compression made them
  /// irregular. Null: no query is older than any of them.
  const long long* const* survivors = nullptr;  ///< [kv_heads]
  const int* survivor_counts = nullptr;         ///< [kv_heads]
  const float* attention_sink_bias = nullptr;   ///< [kv_heads * group] or null
  float scale_log2 = 0.0F;
  float softcap = 0.0F;
  PartialState* partial = nullptr;   ///< [kv_heads, blocks of a head, observe_columns]
  std::uint32_t* tickets = nullptr;  ///< [kv_heads]; 0 before and after a call
  float* log_sum_exp = nullptr;      ///< [kv_heads, observe_columns], in units of log 2
};

inline constexpr int observe_threads = 128;

/// Tiles of columns for the queries of one query head; query heads do not share tiles.
KVPOLICY_HOST_DEVICE constexpr int observe_tiles(int queries) { return quotient_up(queries, tile_columns); }
/// Columns of a KV head.
KVPOLICY_HOST_DEVICE constexpr int observe_columns(int group, int queries) {
  return group * observe_tiles(queries) * tile_columns;
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

inline constexpr int votes_rows = 512;  ///< Rows that a block of votes.cuh pools at a time.

// Shared memory has the segments and the queries, and then either lane states [tiles, warps, lanes], or
// the columns' log-sum-exps and votes [heads, votes_rows].
inline constexpr int observed_list_bytes = (static_cast<int>(sizeof(DeviceSegmentList)) + 15) / 16 * 16;

template <int HeadDim>
KVPOLICY_HOST_DEVICE constexpr int observe_bytes_of_head(int queries) {
  constexpr int state_bytes = observe_threads * static_cast<int>(sizeof(LaneState));
  constexpr int lse_bytes = tile_columns * static_cast<int>(sizeof(float));
  const int tiles = observe_tiles(queries);
  const int states = tiles * state_bytes;
  const int votes = tiles * lse_bytes + votes_rows * static_cast<int>(sizeof(float));
  return tiles * QueryOperands<HeadDim, 1>::bytes + (states > votes ? states : votes);
}
/// Query heads of a group that a block observes at once: as many as leave room for a second block.
/// If these are not all, the keys are read again for the others.
template <int HeadDim>
KVPOLICY_HOST_DEVICE constexpr int observe_heads_at_once(int group, int queries) {
  const int most = 72 * 1024 / observe_bytes_of_head<HeadDim>(queries);
  const int rounds = most < 1 ? group : (group + most - 1) / most;
  return (group + rounds - 1) / rounds;
}
template <int HeadDim>
constexpr std::size_t observe_shared_bytes(int group, int queries) {
  return static_cast<std::size_t>(observed_list_bytes + observe_heads_at_once<HeadDim>(group, queries) *
                                                            observe_bytes_of_head<HeadDim>(queries));
}

/// What a block observes.
struct Observation {
  int queries;   ///< number of queries; 0: the head is not observed
  int position;  ///< text position of the first of them
  int tiles;     ///< tiles of queries in each query head
};
KVPOLICY_DEVICE Observation observation_of(const ObserveParams& p, int kv_head) {
  const int tokens = p.state->tokens;
  if (p.compressions != nullptr) {
    const CompressionSettings how = p.compressions[kv_head];
    const int queries = how.ranking == Ranking::attention ? smaller(how.queries, tokens - p.first_query) : 0;
    return {queries, tokens - queries, observe_tiles(queries)};
  }
  const HeadView& head = p.heads[kv_head];
  const bool adds_up = head.sums != nullptr && (p.scores_rows || !head.waits_for_scoring);
  const int queries = p.accumulates && !adds_up ? 0 : p.queries;
  const int end = tokens + (p.k.data != nullptr ? p.request.queries : 0);
  return {queries, end - p.ahead, observe_tiles(queries)};
}

/// Writes the segments that the queries look at to shared memory. Called by all threads.
KVPOLICY_DEVICE const DeviceSegmentList& list_observed(const ObserveParams& p, const HeadView& head) {
  auto* list = reinterpret_cast<DeviceSegmentList*>(shared_memory());
  if (thread_index() == 0) {
    list->count = 0;
    list_segments(head, *p.state, p.request, *list);
    // The call's own rows come last.
    while (p.k.data == nullptr && list->count > 0 &&
           list->segment[list->count - 1].source == DeviceSegment::Source::call) {
      --list->count;
    }
  }
  sync_block();
  return *list;
}

KVPOLICY_DEVICE KeyRows keys_of(const ObserveParams& p, const HeadView& head, int kv_head,
                                const DeviceSegment& segment) {
  KeyRows rows{.head = head, .page_rows = p.page_rows, .source = segment.source};
  if (segment.source == DeviceSegment::Source::call) {
    rows.call = reinterpret_cast<const std::byte*>(p.k.row(0, 0, kv_head));
    rows.call_stride = p.k.token_stride * 2;
  }
  return rows;
}

/// Which rows of one segment the queries see: those that are not later than the query. A window hides
/// no row that is shown, because it is shown to a query that is not earlier than any of these.
struct ObservedRows {
  int first;          ///< row number of the segment's first row
  int last;           ///< and of its last row that any query may see
  int offset;         ///< position minus row number, except for survivors
  int position;       ///< of the first query
  int last_position;  ///< of the last one
  int survivors = 0;
  const long long* survivor_positions = nullptr;

  KVPOLICY_DEVICE ObservedRows(const ObserveParams& p, const Observation& seen, const DeviceSegment& segment,
                               int kv_head)
      : first{segment.first},
        last{segment.first + segment.rows - 1},
        offset{segment.position - segment.first},
        position{seen.position},
        last_position{seen.position + seen.queries - 1} {
    if (p.survivors != nullptr && segment.source != DeviceSegment::Source::call) {
      survivors = p.survivor_counts[kv_head];
      survivor_positions = p.survivors[kv_head];
    }
    // Rows after the survivors have their number plus `offset` as position; survivors an earlier one.
    if (last_position - offset >= survivors - 1) last = smaller(last, last_position - offset);
  }

  /// Whether every query sees all of the rows [row, row + rows).
  KVPOLICY_DEVICE bool all_see(int row, int rows) const {
    return row >= first && row + rows - 1 <= last && row + rows - 1 + offset <= position;
  }
  KVPOLICY_DEVICE bool sees(int query, int row) const {
    if (row < first || row > last) return false;
    const int at = row < survivors ? static_cast<int>(survivor_positions[row]) : row + offset;
    return at <= position + query;
  }
};

/// Loads the queries of `heads` query heads from `first_head` on to shared memory; incomplete tiles
/// are filled with zeros. `rotated`: as rotated segments are read. Each thread loads 8 channels and
/// their partners.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void load_observing(const ObserveParams& p, const HeadView& head, const Observation& seen,
                                    int first_head, int heads, bool rotated, std::byte* tiles) {
  using Queries = QueryOperands<HeadDim, 1>;
  constexpr int pairs = HeadDim / 16;
  for (int i = thread_index(); i < heads * seen.tiles * tile_columns * pairs; i += thread_count()) {
    const int column = i / pairs;
    const int member = column / (seen.tiles * tile_columns);
    const int query = column % (seen.tiles * tile_columns);
    const int channel = i % pairs * 8;
    Words4 low = {};
    Words4 high = {};
    if (query < seen.queries) {
      const int position = seen.position + query;
      const int token = p.query_slots > 0 ? position % p.query_slots : p.request.queries - p.ahead + query;
      const std::uint16_t* row = p.q.row(0, token, first_head + member) + channel;
      low = *reinterpret_cast<const Words4*>(row);
      high = *reinterpret_cast<const Words4*>(row + HeadDim / 2);
      if (rotated) {
        rotate_channels<E>(low, high, smaller(head.rotation_limit - position, 0),
                           head.inverse_frequencies + channel);
      }
    }
    std::byte* tile = tiles + column / tile_columns * Queries::bytes;
    *Queries::place(tile, column % tile_columns, channel) = low;
    *Queries::place(tile, column % tile_columns, channel + HeadDim / 2) = high;
  }
}

/// Merges the results of a head's blocks, in the order of the rows.
KVPOLICY_DEVICE void merge_observed(const ObserveParams& p, const Observation& seen, int kv_head) {
  const int columns = observe_columns(p.group, p.queries);
  const int padded = seen.tiles * tile_columns;
  for (int column = thread_index(); column < p.group * padded; column += thread_count()) {
    PartialState all{minus_infinity(), 0.0F};
    for (int block = 0; block < grid_x(); ++block) {
      const PartialState* place =
          p.partial + (static_cast<long long>(kv_head) * grid_x() + block) * columns + column;
      const PartialState part{load_shared_by_blocks(&place->max), load_shared_by_blocks(&place->sum)};
      const float max = part.max > all.max ? part.max : all.max;
      all.sum = all.sum * rescale_factor(all.max, max) + part.sum * rescale_factor(part.max, max);
      all.max = max;
    }
    const float* sink = p.attention_sink_bias == nullptr
                            ? nullptr
                            : p.attention_sink_bias + kv_head * p.group + column / padded;
    // A column without a query gets probability 0.
    p.log_sum_exp[static_cast<long long>(kv_head) * columns + column] =
        column % padded < seen.queries ? finish_row(all, sink).log_sum_exp * log2_e : -minus_infinity();
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
  const Observation seen = observation_of(p, kv_head);
  if (seen.queries == 0) return;
  const DeviceSegmentList& list = list_observed(p, head);
  const int at_once = observe_heads_at_once<HeadDim>(p.group, p.queries);
  PartialState* partial = p.partial + (static_cast<long long>(kv_head) * grid_x() + block_x()) *
                                          observe_columns(p.group, p.queries);

  for (int from = 0; from < p.group; from += at_once) {
    const int heads = smaller(at_once, p.group - from);
    const int tiles = heads * seen.tiles;
    std::byte* queries = shared_memory() + observed_list_bytes;
    auto* states = reinterpret_cast<LaneState*>(queries + tiles * Queries::bytes);
    const PartialState nothing{minus_infinity(), 0.0F};
    sync_block();  // the previous heads are merged
    for (int tile = 0; tile < tiles; ++tile) {
      states[tile * observe_threads + thread_index()] = {{nothing, nothing}};
    }
    for (int s = 0; s < list.count; ++s) {
      const DeviceSegment& segment = list.segment[s];
      if (s == 0 || segment.rotated != list.segment[s - 1].rotated) {
        sync_block();  // the previous segment is read
        load_observing<E, HeadDim>(p, head, seen, kv_head * p.group + from, heads, segment.rotated, queries);
        sync_block();
      }
      const ObservedRows rows{p, seen, segment, kv_head};
      const KeyRows keys_from = keys_of(p, head, kv_head, segment);
      const int origin = keys_from.origin(rows.first);
      const int before = (rows.first - origin) / Keys::rows;
      const int units = larger(quotient_up(rows.last + 1 - origin, Keys::rows) - before, 0);
      const int first_unit = static_cast<int>(static_cast<long long>(units) * block_x() / grid_x());
      const int last_unit = static_cast<int>(static_cast<long long>(units) * (block_x() + 1) / grid_x());
      for (int unit = first_unit + warp_index(); unit < last_unit; unit += warps) {
        for_keys<E, HeadDim, Packed>(
            keys_from, origin + (before + unit) * Keys::rows, rows.first, rows.last,
            [&](const Keys& keys, int row, auto split) {
              constexpr bool is_split = decltype(split)::value;
              const bool edge = !rows.all_see(row, is_split ? tile_rows : Keys::rows);
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
                    if ((is_split && part > 0) || (edge && !rows.sees(query, at))) {
                      logit = minus_infinity();
                    }
                  }
                }
                LaneState& place = states[tile * observe_threads + thread_index()];
                LaneState state = place;
                state.add(logits);
                place = state;
              }
            });
      }
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

  auto& arrived = *reinterpret_cast<std::uint32_t*>(shared_memory());
  if (is_last_block(p.tickets + kv_head, grid_x(), arrived)) merge_observed(p, seen, kv_head);
}

}  // namespace kvpolicy::gpu
