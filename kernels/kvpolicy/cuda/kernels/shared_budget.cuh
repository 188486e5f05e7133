// SPDX-License-Identifier: Apache-2.0
//
// Chooses the surviving rows of heads that share a layer's budget (Ada-KV, arXiv:2407.11550, as
// policy/shared_rows.hpp defines it), or the model's (KVzip, arXiv:2505.23416): each head's best rows are safe,
// and the rows of all heads compete for what is left. Among equal ranks the lower layer wins, then the lower head,
// then the lower row.
//
// The candidates of all heads are numbered one head after the other. shared_ranks_kernel writes the ranks of one
// layer's, where a safe row's rank is above all others. shared_select_kernel then finds the highest ranks of
// all. How many rows each head keeps depends on the ranks, so the host must ask for it.
//
// Heads that choose a share of their rows before scores are weighed (CriticalKV, arXiv:2502.03805) compete by scores
// that are not weighed. share_weighed_kernel lets each of them choose as many rows again as it has won, in two steps.
#pragma once

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One of the heads that share, in the order of the layers and of their heads.
struct alignas(8) SharedHead {
  int head = 0;         ///< KV head
  int candidates = 0;   ///< rows that are ranked
  int first = 0;        ///< number of the first of them among the candidates of all heads
  int safe = 0;         ///< best rows, which stay whatever the others have
  int kept_rows = 0;    ///< latest rows that always stay
  int kept_before = 0;  ///< `kept_rows` of the heads before
  /// If not 0, share of the rows that go by scores before these are weighed; the head chooses its others again then.
  double unweighed_share = 0.0;
};

struct SharedBudgetParams {
  // For shared_ranks_kernel: of the layer whose heads are ranked.
  const HeadView* heads = nullptr;                    ///< [kv_heads]
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  RowScores scores = {};
  const SharedHead* shared = nullptr;  ///< [count]: of the layer, and for shared_select_kernel of all layers
  int count = 0;
  int candidates = 0;              ///< of all heads
  int budget = 0;                  ///< of them survive
  std::uint64_t* ranks = nullptr;  ///< [candidates]
  // Of heads with an `unweighed_share`, ranks by scores that are not weighed and by those that are; null without any.
  std::uint64_t* unweighed = nullptr;  ///< [candidates]
  std::uint64_t* weighed = nullptr;    ///< [candidates]
  int* chosen = nullptr;               ///< [budget]: numbers of candidates, ascending
  /// [count + 1]: how many candidates of the heads before survive.
  int* begins = nullptr;
  /// Row numbers of the survivors, ascending in each head. Those of head i begin at begins[i] +
  /// shared[i].kept_before.
  int* rows = nullptr;
};

inline constexpr std::uint64_t above_all = ~std::uint64_t{0};  ///< more than the rank of infinity

/// One block for each head of a layer that shares.
template <int Threads = select_threads>
KVPOLICY_KERNEL(Threads, 1)
shared_ranks_kernel(const KVPOLICY_GRID_CONSTANT SharedBudgetParams p) {
  const SharedHead own = p.shared[block_x()];
  const CompressionSettings how = p.compressions[own.head];
  const HeadView& head = p.heads[own.head];
  const bool in_two_steps = own.unweighed_share > 0.0;
  const RowRanks rank_at{p.scores, how, head, own.head, how.weighs_values && !in_two_steps};
  std::uint64_t* ranks = p.ranks + own.first;
  for (int row = thread_index(); row < own.candidates; row += Threads) ranks[row] = rank_at(row);
  if (in_two_steps) {
    const RowRanks weighed_at{p.scores, how, head, own.head, true};
    for (int row = thread_index(); row < own.candidates; row += Threads) {
      p.unweighed[own.first + row] = ranks[row];
      p.weighed[own.first + row] = weighed_at(row);
    }
  }
  sync_block();
  select_top<Threads>(rank_at, own.candidates, own.safe, [&](int, int row) { ranks[row] = above_all; });
}

/// After shared_ranks_kernel for each layer. One block.
template <int Threads = select_threads>
KVPOLICY_KERNEL(Threads, 1)
shared_select_kernel(const KVPOLICY_GRID_CONSTANT SharedBudgetParams p) {
  select_top<Threads>([&](long long i) { return p.ranks[i]; }, p.candidates, p.budget,
                      [&](int i, int candidate) { p.chosen[i] = candidate; });
  sync_block();
  for (int head = thread_index(); head <= p.count; head += Threads) {
    const int first = head < p.count ? p.shared[head].first : p.candidates;
    p.begins[head] = chunks_before(p.chosen, p.budget, 1, first);
  }
  sync_block();
  for (int head = 0; head < p.count; ++head) {
    const SharedHead own = p.shared[head];
    const int begin = p.begins[head];
    const int count = p.begins[head + 1] - begin;
    int* rows = p.rows + begin + own.kept_before;
    for (int i = thread_index(); i < count + own.kept_rows; i += Threads) {
      rows[i] = i < count ? p.chosen[begin + i] - own.first : own.candidates + i - count;
    }
  }
}

/// After shared_select_kernel, where a head has an `unweighed_share`. One block for each head of all layers.
template <int Threads = select_threads>
KVPOLICY_KERNEL(Threads, 1)
share_weighed_kernel(const KVPOLICY_GRID_CONSTANT SharedBudgetParams p) {
  const SharedHead own = p.shared[block_x()];
  if (!(own.unweighed_share > 0.0)) return;
  const int begin = p.begins[block_x()];
  const int count = p.begins[block_x() + 1] - begin;
  int* rows = p.rows + begin + own.kept_before;
  std::uint64_t* weighed = p.weighed + own.first;
  const auto ranks = [&](int step) {
    const std::uint64_t* of_step = step == 0 ? p.unweighed + own.first : weighed;
    return [of_step](long long row) { return of_step[row]; };
  };
  select_in_two_steps<Threads>(
      ranks, own.candidates, safe_rows(own.unweighed_share, count), count,
      [&](int row) { weighed[row] = above_all; }, [&](int i, int row) { rows[i] = row; });
}

}  // namespace kvpolicy::gpu
