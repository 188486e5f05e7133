// SPDX-License-Identifier: Apache-2.0
//
// Finds the indices of a head's k highest ranks, in ascending order; of equal ranks the lower index
// wins, as in policy/top_rows.hpp. The ranks are scores of chunks, for a selection, or scores of
// rows, for a compression, where the row's own votes decide between equal scores.
//
// Only the set matters, so nothing is sorted. One block for each head finds the lowest selected
// rank by radix selection, eleven bits at a time from the top. Then it gathers, in one ordered
// pass, the indices of all ranks above it and of the first ones equal to it. Scores are read four
// times, those of a compression seven times; they were just written, so they come from the caches.
#pragma once

#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::gpu {

inline constexpr int select_threads = 1024;
inline constexpr int select_items = 4;  ///< Scores that a thread processes at a time.
inline constexpr int digit_bits = 11;
inline constexpr int select_digits = 1 << digit_bits;

struct SelectShared {
  std::uint32_t counts[select_digits];  ///< number of ranks with each digit
  std::uint32_t warps[2][warp_lanes];
  std::uint32_t digit;
  std::uint32_t left;  ///< how many of the ranks with this digit are still to be selected
};
constexpr std::size_t select_shared_bytes() { return sizeof(SelectShared); }

/// An integer that grows with the score; NaN is below everything, and both zeros are equal.
KVPOLICY_DEVICE std::uint32_t rank_of(float score) {
  const std::uint32_t bits = bits_of_float(score);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return 0;
  if (magnitude == 0) return 0x80000000U;
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

struct WarpSums {
  std::uint32_t before;  ///< sum over the warps before this one
  std::uint32_t total;
};
/// Sums one number per warp. A call must not reuse the `sums` of the previous call. CUB's BlockScan in its place made
/// the kernel 1,176 instructions of 1,064 and spilled 16 bytes of its 64 registers (sm_90).
KVPOLICY_DEVICE WarpSums scan_warps(std::uint32_t of_warp, std::uint32_t* sums) {
  if (lane_index() == 0) sums[warp_index()] = of_warp;
  sync_block();
  std::uint32_t sum = lane_index() < thread_count() / warp_lanes ? sums[lane_index()] : 0;
  KVPOLICY_UNROLL
  for (int step = 1; step < warp_lanes; step *= 2) {
    const std::uint32_t below = shuffle_up(sum, step);
    if (lane_index() >= step) sum += below;
  }
  const std::uint32_t inclusive = shuffle(sum, warp_index());
  return {inclusive - of_warp, shuffle(sum, warp_lanes - 1)};
}

/// Counts the digits at `shift` of the ranks whose higher bits equal `prefix`. `counts` must be
/// zeros before; all threads see them after the next barrier.
template <int Threads, class Rank, class RankAt>
KVPOLICY_DEVICE void count_digits(const RankAt& rank_at, int n, Rank prefix, int shift, int bits,
                                  std::uint32_t* counts) {
  constexpr int rank_bits = 8 * static_cast<int>(sizeof(Rank));
  for (long long base = 0; base < n; base += Threads * select_items) {
    Rank rank[select_items];
    KVPOLICY_UNROLL
    for (int j = 0; j < select_items; ++j) {
      const long long i = base + j * Threads + thread_index();
      rank[j] = i < n ? rank_at(i) : 0;
    }
    KVPOLICY_UNROLL
    for (int j = 0; j < select_items; ++j) {
      const long long i = base + j * Threads + thread_index();
      const bool counts_here =
          i < n && (shift + bits == rank_bits || rank[j] >> (shift + bits) == prefix >> (shift + bits));
      const int digit = counts_here ? static_cast<int>(rank[j] >> shift & (select_digits - 1)) : -1;
      // Scores of a head are similar, so lanes with the same digit as the first one add once.
      const int common = shuffle(digit, 0);
      const std::uint32_t agreeing = ballot(digit == common);
      if (digit >= 0) {
        if (digit != common) {
          atomic_add(counts + digit, 1);
        } else if (lane_index() == 0) {
          atomic_add(counts + digit, count_bits(agreeing));
        }
      }
    }
  }
}

/// Calls `emit(i, place)`, from any thread, for the indices `place` of the k highest of n ranks in
/// ascending order; i counts them. `rank_at(place)` is unsigned, of 32 or 64 bits. Called by all
/// threads of the block.
template <int Threads, class RankAt, class Emit>
KVPOLICY_DEVICE void select_top(const RankAt& rank_at, int n, int k, const Emit& emit) {
  if (k >= n) {
    for (int i = thread_index(); i < n; i += Threads) emit(i, i);
    return;
  }
  if (k <= 0) return;

  using Rank = decltype(rank_at(0LL));
  constexpr int rank_bits = 8 * static_cast<int>(sizeof(Rank));
  constexpr int own = select_digits / Threads;  // digits of each thread, from the highest down
  static_assert(own * Threads == select_digits && Threads % warp_lanes == 0);
  auto& shared = *reinterpret_cast<SelectShared*>(shared_memory());
  const int highest = select_digits - 1 - thread_index() * own;
  KVPOLICY_UNROLL
  for (int d = 0; d < own; ++d) shared.counts[highest - d] = 0;
  sync_block();

  Rank lowest = 0;                            // the lowest selected rank
  auto left = static_cast<std::uint32_t>(k);  // how many ranks equal to it are selected
  int parity = 0;
  for (int shift = rank_bits - digit_bits;;) {
    const int bits = shift > 0 ? digit_bits : rank_bits % digit_bits;
    count_digits<Threads>(rank_at, n, lowest, shift, bits, shared.counts);
    sync_block();
    std::uint32_t count[own];
    std::uint32_t sum = 0;
    KVPOLICY_UNROLL
    for (int d = 0; d < own; ++d) {
      sum += count[d] = shared.counts[highest - d];
      shared.counts[highest - d] = 0;
    }
    std::uint32_t up_to = sum;
    KVPOLICY_UNROLL
    for (int step = 1; step < warp_lanes; step *= 2) {
      const std::uint32_t below = shuffle_up(up_to, step);
      if (lane_index() >= step) up_to += below;
    }
    const WarpSums warps = scan_warps(shuffle(up_to, warp_lanes - 1), shared.warps[parity]);
    parity ^= 1;
    std::uint32_t above = warps.before + up_to - sum;
    KVPOLICY_UNROLL
    for (int d = 0; d < own; ++d) {
      if (above < left && left <= above + count[d]) {
        shared.digit = static_cast<std::uint32_t>(highest - d);
        shared.left = left - above;
      }
      above += count[d];
    }
    sync_block();
    lowest |= static_cast<Rank>(shared.digit) << shift;
    left = shared.left;
    if (shift == 0) break;
    shift = shift > digit_bits ? shift - digit_bits : 0;
  }

  // A warp takes neighbouring ranks, so that ballots count those before a lane.
  constexpr int tile = Threads * select_items;
  static_assert(tile < 1 << 16);  // because one word has two counts
  const std::uint32_t lanes_below = (1U << lane_index()) - 1U;
  std::uint32_t all_higher = 0;
  std::uint32_t all_equal = 0;
  for (long long base = 0; base < n; base += tile) {
    const long long first = base + warp_index() * (warp_lanes * select_items) + lane_index();
    std::uint32_t higher[select_items];
    std::uint32_t equal[select_items];
    std::uint32_t counts = 0;
    KVPOLICY_UNROLL
    for (int j = 0; j < select_items; ++j) {
      const long long i = first + j * warp_lanes;
      const Rank rank = i < n ? rank_at(i) : 0;
      higher[j] = ballot(i < n && rank > lowest);
      equal[j] = ballot(i < n && rank == lowest);
      counts += count_bits(higher[j]) + (count_bits(equal[j]) << 16);
    }
    const WarpSums warps = scan_warps(counts, shared.warps[parity]);
    parity ^= 1;
    std::uint32_t higher_before = all_higher + (warps.before & 0xffffU);
    std::uint32_t equal_before = all_equal + (warps.before >> 16);
    KVPOLICY_UNROLL
    for (int j = 0; j < select_items; ++j) {
      const std::uint32_t h = higher_before + count_bits(higher[j] & lanes_below);
      const std::uint32_t e = equal_before + count_bits(equal[j] & lanes_below);
      const bool is_higher = (higher[j] >> lane_index() & 1U) != 0;
      const bool is_equal = (equal[j] >> lane_index() & 1U) != 0;
      if (is_higher || (is_equal && e < left)) {
        emit(static_cast<int>(h + (e < left ? e : left)), static_cast<int>(first + j * warp_lanes));
      }
      higher_before += count_bits(higher[j]);
      equal_before += count_bits(equal[j]);
    }
    all_higher += warps.total & 0xffffU;
    all_equal += warps.total >> 16;
    if (all_higher + (all_equal < left ? all_equal : left) == static_cast<std::uint32_t>(k)) break;
  }
}

/// select_top in two steps, the second of which may rank otherwise (CriticalKV, arXiv:2502.03805): `raise(place)` puts
/// each of the `first` that are chosen by `ranks(0)` above all others in `ranks(1)`, by which the k are chosen. With
/// `first` 0 there is only the second step.
template <int Threads, class Ranks, class Raise, class Emit>
KVPOLICY_DEVICE void select_in_two_steps(const Ranks& ranks, int n, int first, int k, const Raise& raise,
                                         const Emit& emit) {
  KVPOLICY_NO_UNROLL
  for (int step = first > 0 ? 0 : 1; step < 2; ++step) {
    select_top<Threads>(ranks(step), n, step == 0 ? first : k, [&](int i, int place) {
      if (step == 0) {
        raise(place);
      } else {
        emit(i, place);
      }
    });
    sync_block();
  }
}

// ---- chunks ----------------------------------------------------------------------------------

/// Makes a new selection of chunks for each selecting head, by the scores of score.cuh.
struct RefreshParams {
  const HeadView* heads = nullptr;     ///< [sequences, kv_heads]
  const LayerState* states = nullptr;  ///< [sequences]
  int kv_heads = 0;
  int call_rows = 0;  ///< rows of the call, up to the selecting query, that `states` does not count
};

/// One block for each of the sequences * kv_heads heads.
template <int Threads = select_threads>
KVPOLICY_KERNEL(Threads, 1)
refresh_select_kernel(const KVPOLICY_GRID_CONSTANT RefreshParams p) {
  const HeadView& head = p.heads[block_x()];
  if (head.chunk_rows == 0) return;
  const LayerState state = p.states[block_x() / p.kv_heads];
  Selections& choices = *head.selections;
  const int tokens = state.tokens + p.call_rows;
  const ChoiceRing<int> ring = choices.ring().after_choice(tokens, choices.tokens);
  const int slot = ring.latest;
  const ChunkRule<int> rule = head.chunk_rule();
  const int rows = state.committed - head.evicted;
  const int n = rule.closed(rows);
  const int k = rule.chosen(rows);
  int* chunks = choices.chunks + static_cast<long long>(slot) * head.budget_chunks;
  select_top<Threads>([&](long long chunk) { return rank_of(head.scores[chunk]); }, n, k,
                      [&](int i, int chunk) { chunks[i] = chunk; });
  sync_block();  // every thread has read the index of the latest selection
  if (thread_index() == 0) {
    choices.tokens[slot] = tokens;
    choices.ends[slot] = rule.closed_rows(rows);
    choices.counts[slot] = k;
    choices.latest = ring.latest;
    choices.valid = ring.valid;
    if (head.slow != nullptr) head.slow->state->gathered = -1;
  }
}

// ---- rows ------------------------------------------------------------------------------------

using kvpolicy::Ranking;

/// Settings of a compression: what a head keeps, and how its candidates are scored.
/// Such a head has no sinks and no sliding window, and all its rows are committed.
struct alignas(8) CompressionSettings {
  Ranking ranking = Ranking::none;  ///< none: the head is not compressed
  bool average = false;             ///< pools by the mean instead of the maximum
  Votes votes = Votes::mean;        ///< What the votes of several queries and query heads come to.
  int scorer = 0;              ///< Whose function of the key it is (key_scores.cuh), or whose expectation.
  int queries = 0;             ///< Latest queries that vote; at most one more than `kept_rows`.
  int kept_rows = 0;           ///< Latest rows that are always kept.
  int first_rows = 0;          ///< First rows that rank above all others (expected_queries.cuh).
  int budget = 0;              ///< Rows kept besides these.
  int kernel = 1;              ///< Width of the pooling, in rows; odd.
  double prior_share = 0.0;    ///< Share of the mean score below which no score is (lift_scores.cuh).
  bool weighs_values = false;  ///< Scores are multiplied by norms of values,
  ValueNorm value_norm = ValueNorm::value_l2;  ///< these ones (weigh_values.cuh, weigh_outputs.cuh).
  double unweighed_share = 0.0;  ///< Share of the rows kept by rank that goes by scores before that.
  KeyNumbers key_numbers = {};

  KVPOLICY_HOST_DEVICE BudgetRule<int> rule() const { return {budget, kept_rows}; }
  KVPOLICY_HOST_DEVICE bool weighs_outputs() const {
    return weighs_values && value_norm == ValueNorm::output_l1;
  }
};

/// Scores of one layer's candidates.
struct RowScores {
  const float* scores = nullptr;    ///< [kv_heads, pitch], for the rows before those always kept
  const float* unpooled = nullptr;  ///< the same shape; decides between equal scores
  long long pitch = 0;
  float* weighed = nullptr;  ///< the same shape: scores times norms of values, of heads that weigh values
};

/// The rank of each candidate of a head, as policy/top_rows.hpp has it: by its scores, or by its weighed scores.
struct RowRanks {
  Ranking ranking;
  const float* scores;
  const float* unpooled;
  const double* sums;  ///< null: `scores` have what ranks the rows

  KVPOLICY_DEVICE RowRanks(const RowScores& all, const CompressionSettings& how, const HeadView& head,
                           int kv_head, bool weighed)
      : ranking{how.ranking},
        scores{(weighed ? all.weighed : all.scores) + kv_head * all.pitch},
        unpooled{all.unpooled + kv_head * all.pitch},
        sums{how.ranking == Ranking::accumulated && !weighed ? head.sums : nullptr} {}

  KVPOLICY_DEVICE std::uint64_t operator()(long long row) const {
    const float score = sums != nullptr ? static_cast<float>(sums[row]) : scores[row];
    // Only queries that vote can decide between equal scores.
    const bool asked = ranking == Ranking::attention || ranking == Ranking::expected;
    const float own = asked ? unpooled[row] : 0.0F;
    return std::uint64_t{rank_of(score)} << 32 | rank_of(own);
  }
};

/// Parameters to find the surviving rows of each compressing head of one sequence.
struct KeepParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  RowScores scores = {};
  int* const* kept = nullptr;  ///< [kv_heads] of [budget + kept_rows]: row numbers, ascending
  int* counts = nullptr;       ///< [kv_heads]; not written for other heads
};

/// One block for each KV head.
template <int Threads = select_threads>
KVPOLICY_KERNEL(Threads, 1)
keep_select_kernel(const KVPOLICY_GRID_CONSTANT KeepParams p) {
  const CompressionSettings how = p.compressions[block_x()];
  if (how.ranking == Ranking::none) return;
  const HeadView& head = p.heads[block_x()];
  const int rows = p.state->tokens - head.evicted;
  const int candidates = how.rule().candidates(rows);
  const int chosen = how.rule().chosen(rows);
  int* kept = p.kept[block_x()];
  const auto raise = [&](int row) {
    p.scores.weighed[block_x() * p.scores.pitch + row] = float_of_bits(0x7f800000U);  // infinity
  };
  const auto ranks = [&](int step) {
    return RowRanks{p.scores, how, head, block_x(), step == 1 && how.weighs_values};
  };
  const int by_unweighed = how.weighs_values ? safe_rows(how.unweighed_share, chosen) : 0;
  select_in_two_steps<Threads>(ranks, candidates, by_unweighed, chosen, raise,
                               [&](int i, int row) { kept[i] = row; });
  for (int row = candidates + thread_index(); row < rows; row += Threads) {
    kept[chosen + row - candidates] = row;
  }
  if (thread_index() == 0) p.counts[block_x()] = chosen + rows - candidates;
}

}  // namespace kvpolicy::gpu
