// SPDX-License-Identifier: Apache-2.0
//
// The kernels of an engine by their addresses, as functions of the rows' element type E, the head dimension D and, for those
// that read rows, whether heads may be quantised. Nothing else names a kernel, so that a program can compile them once:
// with KVPOLICY_SEPARATE_KERNELS these functions are only declared here, and defined where cuda/instances.hpp says so.
#pragma once

#include <cstddef>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/accept.cuh>
#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/bound.cuh>
#include <kvpolicy/cuda/kernels/choose_units.cuh>
#include <kvpolicy/cuda/kernels/column_sums.cuh>
#include <kvpolicy/cuda/kernels/compact.cuh>
#include <kvpolicy/cuda/kernels/decode.cuh>
#include <kvpolicy/cuda/kernels/expected_queries.cuh>
#include <kvpolicy/cuda/kernels/gather.cuh>
#include <kvpolicy/cuda/kernels/key_directions.cuh>
#include <kvpolicy/cuda/kernels/key_scores.cuh>
#include <kvpolicy/cuda/kernels/lift_scores.cuh>
#include <kvpolicy/cuda/kernels/observe.cuh>
#include <kvpolicy/cuda/kernels/prefill.cuh>
#include <kvpolicy/cuda/kernels/prefill_hopper.cuh>
#include <kvpolicy/cuda/kernels/queries.cuh>
#include <kvpolicy/cuda/kernels/scatter.cuh>
#include <kvpolicy/cuda/kernels/score.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/shared_budget.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>
#include <kvpolicy/cuda/kernels/stage.cuh>
#include <kvpolicy/cuda/kernels/votes.cuh>
#include <kvpolicy/cuda/kernels/weigh_outputs.cuh>
#include <kvpolicy/cuda/kernels/weigh_values.cuh>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>

namespace kvpolicy::gpu::detail {

/// What writes, moves and scores rows.
struct RowKernels {
  Kernel<AppendParams> append;  ///< is launched early
  Kernel<AppendParams> commit, flush, write;
  Kernel<CompactParams> compact;
  Kernel<ScoreParams> score;
  Kernel<KeyScoresParams> key_norms;
  Kernel<KeyDirectionsParams> sum_directions, score_directions;
  Kernel<ExpectedQueriesParams> expect_queries, expect_logits;
  Kernel<WeighValuesParams> weigh_values;
  Kernel<WeighOutputsParams> weigh_outputs;

  void visit(auto&& f) const {
    f(append), f(commit), f(flush), f(write), f(compact), f(score), f(key_norms), f(sum_directions);
    f(score_directions), f(expect_queries), f(expect_logits), f(weigh_values), f(weigh_outputs);
  }
};
template <Element E, int D>
[[nodiscard]] RowKernels row_kernels();

/// Attention of many queries, launched early.
struct PrefillKernel : Kernel<AttendParams> {
  int query_rows = 0;  ///< of a tile
};
/// Decode's, launched early; a block's shared memory grows with the heads of a call (decode_shared_bytes).
template <Element E, int D, int ColumnTiles, bool Packed>
[[nodiscard]] Kernel<AttendParams> decode_kernel_of();
template <Element E, int D, bool Packed>
[[nodiscard]] PrefillKernel prefill_kernel_of();
/// Null where Hopper has none of its own.
template <Element E, int D>
[[nodiscard]] PrefillKernel prefill_hopper_kernel_of();

/// What says how much attention queries pay; a block's shared memory is observe_shared_bytes.
struct ObserveKernels {
  Kernel<ObserveParams> log_sum_exps;
  Kernel<VotesParams> votes;
  Kernel<ColumnSumsParams> column_sums;
};
template <Element E, int D, bool Packed>
[[nodiscard]] ObserveKernels observe_kernels();

template <Element E, int D, int ColumnTiles>
[[nodiscard]] Kernel<BoundParams> bound_kernel_of();

/// What is the same for all elements and head dimensions.
struct CommonKernels {
  Kernel<StageParams> stage;
  Kernel<GatherParams> gather;
  Kernel<EnterParams> enter;
  Kernel<SetStateParams> set_state;
  Kernel<AcceptRowsParams> accept_rows;
  Kernel<AcceptQueriesParams> accept_queries;
  Kernel<KeepQueriesParams> keep_queries;
  Kernel<ScatterParams> scatter;
  Kernel<RefreshParams> refresh;
  Kernel<KeepParams> keep;
  Kernel<SharedBudgetParams> rank_shared, choose_shared, share_weighed;
  Kernel<ExpectedQueriesParams> expect_scores;
  Kernel<LiftScoresParams> lift_scores;
  Kernel<BoundParams> choose_units, choose_units_again;

  void visit(auto&& f) const {
    f(stage), f(gather), f(enter), f(set_state), f(accept_rows), f(accept_queries), f(keep_queries),
        f(scatter);
    f(refresh), f(keep), f(rank_shared), f(choose_shared), f(share_weighed), f(expect_scores), f(lift_scores);
    f(choose_units), f(choose_units_again);
  }
};
template <class = void>
[[nodiscard]] const CommonKernels& common_kernels();

}  // namespace kvpolicy::gpu::detail

#ifndef KVPOLICY_SEPARATE_KERNELS
#include <kvpolicy/cuda/kernel_tables-inl.hpp>
#endif
