// SPDX-License-Identifier: Apache-2.0
//
// Scores the rows of heads that are compressed by the attention that queries to come can be expected to pay them
// (Expected Attention, arXiv:2510.00636), as core/expected_queries.hpp and policy/expected_attention_scorer.hpp define
// it: the latest queries, without their rotation, stand for a normal distribution, and the expectation of
// exp(scale * query . key) is exp(scale * k.m + scale^2 / 2 * k'Ck).
//
// expect_queries_kernel makes the mean m and the draws less the mean, rotated by the mean of the rotations to come.
// expect_logits_kernel multiplies each key with all of them, in float and in the order of the channels as the host
// does, and not on tensor cores, for which they would have to be rounded. expect_scores_kernel makes probabilities of
// the logits. A compression runs them once, and reads each key once.
#pragma once

#include <cfloat>

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/gather_row.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/join_block.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One layer of one sequence, whose rows are all committed.
struct ExpectedQueriesParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  int setting = 0;                                    ///< of the heads that this launch scores
  int group = 1;
  int page_rows = 64;
  // The latest queries, in a ring as that of ObserveParams.
  Tensor q = {};
  int query_slots = 1;
  int first_query = 0;
  int future = 1;                              ///< positions to come over which rotations are averaged
  const float* inverse_frequencies = nullptr;  ///< [head_dim / 2]
  double scale = 1.0;
  int columns = 0;            ///< expected_columns of the most queries of a head
  float* moments = nullptr;   ///< [kv_heads * group, head_dim, columns]: the mean, draws less the mean, zeros
  double* logits = nullptr;   ///< [kv_heads * group, pitch]
  float* scores = nullptr;    ///< [kv_heads, pitch]
  float* unpooled = nullptr;  ///< the same; decides between equal scores
  /// [kv_heads * group, pitch]: scores of each query head by itself; null where no head weighs outputs.
  float* of_query_heads = nullptr;
  long long pitch = 0;
};

inline constexpr int expected_threads = 128;
inline constexpr int expected_scores_threads = 1024;
inline constexpr int expected_rows = 32;            ///< rows of a tile in shared memory, one for each lane
inline constexpr int expected_columns_at_once = 8;  ///< columns of a warp

/// Columns of one query head: the mean and each draw, filled up.
KVPOLICY_HOST_DEVICE constexpr int expected_columns(int queries) {
  return quotient_up(queries + 1, expected_columns_at_once) * expected_columns_at_once;
}
template <int HeadDim>
constexpr std::size_t expect_logits_shared_bytes() {
  constexpr int warps = expected_threads / warp_lanes;
  return expected_rows * (warps * sizeof(double) + (HeadDim + 1) * sizeof(float));
}
constexpr std::size_t expect_scores_shared_bytes() { return 2 * join_block_bytes; }

/// Queries of a head that are known, at most as many as it asks.
KVPOLICY_DEVICE int known_queries(const ExpectedQueriesParams& p, const CompressionSettings& how) {
  return smaller(how.queries, p.state->tokens - p.first_query);
}
KVPOLICY_DEVICE bool is_expected(const ExpectedQueriesParams& p, const CompressionSettings& how) {
  return how.ranking == Ranking::expected && how.scorer == p.setting && how.queries > 0;
}

/// Grid (group, kv_heads). A thread has pairs of channels of its own.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(expected_threads, 4)
expect_queries_kernel(const KVPOLICY_GRID_CONSTANT ExpectedQueriesParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (!is_expected(p, how)) return;
  constexpr int pairs = HeadDim / 2;
  const int tokens = p.state->tokens;
  const int count = known_queries(p, how);
  const int q_head = block_y() * p.group + block_x();
  for (int pair = thread_index(); pair < pairs; pair += expected_threads) {
    const auto frequency = static_cast<double>(p.inverse_frequencies[pair]);
    float sine = 0.0F;
    float cosine = 0.0F;
    double mean_cosine = 0.0;
    double mean_sine = 0.0;
    for (int ahead = 0; ahead < p.future; ++ahead) {
      sine_cosine(static_cast<double>(tokens + ahead) * frequency, sine, cosine);
      mean_cosine += static_cast<double>(cosine) / static_cast<double>(p.future);
      mean_sine += static_cast<double>(sine) / static_cast<double>(p.future);
    }
    float* low = p.moments + (static_cast<long long>(q_head) * HeadDim + pair) * p.columns;
    float* high = low + static_cast<long long>(pairs) * p.columns;
    double mean_low = 0.0;
    double mean_high = 0.0;
    for (int i = 0; i < count; ++i) {
      const int position = tokens - count + i;
      const std::uint16_t* row = p.q.row(0, position % p.query_slots, q_head);
      const float x = to_float<E>(row[pair]);
      const float y = to_float<E>(row[pair + pairs]);
      sine_cosine(static_cast<double>(-position) * frequency, sine, cosine);
      low[i + 1] = x * cosine - y * sine;
      high[i + 1] = y * cosine + x * sine;
      mean_low += static_cast<double>(low[i + 1]) / static_cast<double>(count);
      mean_high += static_cast<double>(high[i + 1]) / static_cast<double>(count);
    }
    for (int i = 0; i <= count; ++i) {
      const double a = i == 0 ? mean_low : static_cast<double>(low[i]) - mean_low;
      const double b = i == 0 ? mean_high : static_cast<double>(high[i]) - mean_high;
      low[i] = static_cast<float>(a * mean_cosine - b * mean_sine);
      high[i] = static_cast<float>(b * mean_cosine + a * mean_sine);
    }
    for (int i = count + 1; i < p.columns; ++i) low[i] = high[i] = 0.0F;
  }
}

/// After expect_queries_kernel. Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(expected_threads, 4)
expect_logits_kernel(const KVPOLICY_GRID_CONSTANT ExpectedQueriesParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (!is_expected(p, how)) return;
  constexpr int warps = expected_threads / warp_lanes;
  constexpr int key_pitch = HeadDim + 1;  // so that lanes with a row each read from different banks
  const HeadView& head = p.heads[block_y()];
  const int rows = p.state->tokens - head.evicted;
  const int packed_end = head.packed_end(p.state->committed);
  const int count = known_queries(p, how);
  auto* squares_of_warps = reinterpret_cast<double*>(shared_memory());
  auto* keys = reinterpret_cast<float*>(squares_of_warps + warps * expected_rows);
  for (int first = block_x() * expected_rows; first < rows; first += grid_x() * expected_rows) {
    const int tile_rows_here = smaller(expected_rows, rows - first);
    sync_block();  // the previous tile is read
    load_keys<E, HeadDim>(head, p.page_rows, first, tile_rows_here, packed_end, keys, key_pitch);
    sync_block();
    const float* key = keys + smaller(lane_index(), tile_rows_here - 1) * key_pitch;
    for (int member = 0; member < p.group; ++member) {
      const int q_head = block_y() * p.group + member;
      const float* moments = p.moments + static_cast<long long>(q_head) * HeadDim * p.columns;
      double product = 0.0;
      double squares = 0.0;
      for (int column = warp_index() * expected_columns_at_once; column <= count;
           column += warps * expected_columns_at_once) {
        float products[expected_columns_at_once] = {};
        for (int channel = 0; channel < HeadDim; ++channel) {
          const float* numbers = moments + channel * p.columns + column;  // the same for all lanes
          const Words4 words[2] = {reinterpret_cast<const Words4*>(numbers)[0],
                                   reinterpret_cast<const Words4*>(numbers)[1]};
          KVPOLICY_UNROLL
          for (int i = 0; i < expected_columns_at_once; ++i) {
            products[i] += float_of_bits(words[i / 4].word[i % 4]) * key[channel];
          }
        }
        KVPOLICY_UNROLL
        for (int i = 0; i < expected_columns_at_once; ++i) {
          const auto one = static_cast<double>(products[i]);
          if (column + i == 0) {
            product = one;
          } else {
            squares += one * one;
          }
        }
      }
      squares_of_warps[warp_index() * expected_rows + lane_index()] = squares;
      sync_block();
      if (warp_index() == 0 && lane_index() < tile_rows_here) {
        double total = 0.0;
        for (int warp = 0; warp < warps; ++warp)
          total += squares_of_warps[warp * expected_rows + lane_index()];
        p.logits[q_head * p.pitch + first + lane_index()] =
            p.scale * product + 0.5 * p.scale * p.scale * total / static_cast<double>(count);
      }
      sync_block();  // the sums are read
    }
  }
}

/// After expect_logits_kernel. One block for each KV head.
template <int Threads = expected_scores_threads>
KVPOLICY_KERNEL(Threads, 1)
expect_scores_kernel(const KVPOLICY_GRID_CONSTANT ExpectedQueriesParams p) {
  const CompressionSettings how = p.compressions[block_x()];
  if (!is_expected(p, how)) return;
  const HeadView& head = p.heads[block_x()];
  const int rows = p.state->tokens - head.evicted;
  const int candidates = how.rule().candidates(rows);
  auto* of_warps = reinterpret_cast<double*>(shared_memory());
  float* scores = p.scores + block_x() * p.pitch;
  float* unpooled = p.unpooled + block_x() * p.pitch;
  for (int member = 0; member < p.group; ++member) {
    const double* logits = p.logits + (block_x() * p.group + member) * p.pitch;
    auto most = static_cast<double>(minus_infinity());
    for (int row = thread_index(); row < rows; row += Threads) most = logits[row] > most ? logits[row] : most;
    most = join_block(most, of_warps, [](double a, double b) { return b > a ? b : a; });
    double total = 0.0;
    for (int row = thread_index(); row < rows; row += Threads) total += exponential(logits[row] - most);
    total = join_block(total, of_warps + warp_lanes, [](double a, double b) { return a + b; });
    for (int row = thread_index(); row < candidates; row += Threads) {
      const auto share = static_cast<float>(exponential(logits[row] - most) / total);
      unpooled[row] = (member == 0 ? 0.0F : unpooled[row]) + share;
      scores[row] = (member == 0 ? 0.0F : scores[row]) + share / static_cast<float>(p.group);
      if (how.weighs_outputs()) p.of_query_heads[(block_x() * p.group + member) * p.pitch + row] = share;
    }
    sync_block();  // the joined numbers are read
  }
  // First rows stay first rows, because they are never dropped.
  for (int row = thread_index(); row < smaller(how.first_rows, candidates); row += Threads) {
    scores[row] = FLT_MAX;
  }
}

}  // namespace kvpolicy::gpu
