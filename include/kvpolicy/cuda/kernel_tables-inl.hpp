// SPDX-License-Identifier: Apache-2.0
//
// Defines what cuda/kernel_tables.hpp declares: here kernels are instantiated, and nowhere else.
#pragma once

#include <kvpolicy/cuda/kernel_tables.hpp>

namespace kvpolicy::gpu::detail {

template <Element E, int D>
RowKernels row_kernels() {
  return {
      .append = {append_kernel<E, D>, "append_kernel", write_threads, append_shared_bytes<D>()},
      .commit = {commit_kernel<E, D>, "commit_kernel", write_threads, append_shared_bytes<D>()},
      .flush = {flush_kernel<E, D>, "flush_kernel", write_threads, append_shared_bytes<D>()},
      .write = {write_kernel<E, D>, "write_kernel", write_threads},
      .compact = {compact_kernel<E, D>, "compact_kernel", write_threads, compact_shared_bytes<D>()},
      .score = {score_kernel<E, D>, "score_kernel", score_threads, score_shared_bytes<D>()},
      .key_norms = {key_scores_kernel<E, D, KeyNormScorer::Gather>, "key_scores_kernel", key_scores_threads},
      .sum_directions = {sum_directions_kernel<E, D>, "sum_directions_kernel", directions_threads,
                         sum_directions_shared_bytes<D>()},
      .score_directions = {score_directions_kernel<E, D>, "score_directions_kernel", directions_threads,
                           score_directions_shared_bytes<D>()},
      .expect_queries = {expect_queries_kernel<E, D>, "expect_queries_kernel", expected_threads},
      .expect_logits = {expect_logits_kernel<E, D>, "expect_logits_kernel", expected_threads,
                        expect_logits_shared_bytes<D>()},
      .weigh_values = {weigh_values_kernel<E, D>, "weigh_values_kernel", weigh_values_threads},
      .weigh_outputs = {weigh_outputs_kernel<E, D>, "weigh_outputs_kernel", weigh_outputs_threads,
                        weigh_outputs_shared_bytes<D>()},
  };
}

template <Element E, int D, int ColumnTiles, bool Packed>
Kernel<AttendParams> decode_kernel_of() {
  if constexpr (Packed && !can_quantize<D>) {
    return {};
  } else {
    return {decode_kernel<E, D, ColumnTiles, Packed>, "decode_kernel", decode_threads<D, ColumnTiles, Packed>,
            decode_shared_bytes<E, D, ColumnTiles, Packed>(1)};
  }
}

template <Element E, int D, bool Packed>
PrefillKernel prefill_kernel_of() {
  if constexpr (Packed && !can_quantize<D>) {
    return {};
  } else {
    return {
        {prefill_kernel<E, D, Packed>, "prefill_kernel", PrefillShape<D>::threads, prefill_shared_bytes<D>()},
        PrefillShape<D>::query_rows};
  }
}

template <Element E, int D>
PrefillKernel prefill_hopper_kernel_of() {
  if constexpr (has_hopper_prefill<D>) {
    // One block of it on a multiprocessor, where the other kernel has two.
    static_assert(HopperShape<D>::query_rows <= 2 * PrefillShape<D>::query_rows);
    return {{prefill_hopper_kernel<E, D>, "prefill_hopper_kernel", HopperShape<D>::threads,
             prefill_hopper_shared_bytes<D>()},
            HopperShape<D>::query_rows};
  } else {
    return {};
  }
}

template <Element E, int D, bool Packed>
ObserveKernels observe_kernels() {
  if constexpr (Packed && !can_quantize<D>) {
    return {};
  } else {
    constexpr std::size_t some = observe_shared_bytes<D>(1, 1);
    return {.log_sum_exps = {observe_lse_kernel<E, D, Packed>, "observe_lse_kernel", observe_threads, some},
            .votes = {votes_kernel<E, D, Packed>, "votes_kernel", observe_threads, some},
            .column_sums = {column_sums_kernel<E, D, Packed>, "column_sums_kernel", observe_threads, some}};
  }
}

template <Element E, int D, int ColumnTiles>
Kernel<BoundParams> bound_kernel_of() {
  if constexpr (can_quantize<D>) {
    return {bound_kernel<E, D, ColumnTiles>, "bound_kernel", bound_threads,
            bound_shared_bytes<E, D, ColumnTiles>()};
  } else {
    return {};
  }
}

template <class>
const CommonKernels& common_kernels() {
  constexpr std::size_t select = select_shared_bytes();
  static const CommonKernels kernels{
      .stage = {stage_kernel<>, "stage_kernel", stage_threads},
      .gather = {gather_kernel<>, "gather_kernel", gather_threads, gather_shared_bytes()},
      .enter = {enter_kernel<>, "enter_kernel", enter_threads},
      .set_state = {set_state_kernel<>, "set_state_kernel", set_state_threads},
      .accept_rows = {accept_rows_kernel<>, "accept_rows_kernel", accept_threads},
      .accept_queries = {accept_queries_kernel<>, "accept_queries_kernel", accept_threads},
      .keep_queries = {keep_queries_kernel<>, "keep_queries_kernel", keep_queries_threads},
      .scatter = {scatter_kernel<>, "scatter_kernel", scatter_threads},
      .refresh = {refresh_select_kernel<>, "refresh_select_kernel", select_threads, select},
      .keep = {keep_select_kernel<>, "keep_select_kernel", select_threads, select},
      .rank_shared = {shared_ranks_kernel<>, "shared_ranks_kernel", select_threads, select},
      .choose_shared = {shared_select_kernel<>, "shared_select_kernel", select_threads, select},
      .share_weighed = {share_weighed_kernel<>, "share_weighed_kernel", select_threads, select},
      .expect_scores = {expect_scores_kernel<>, "expect_scores_kernel", expected_scores_threads,
                        expect_scores_shared_bytes()},
      .lift_scores = {lift_scores_kernel<>, "lift_scores_kernel", lift_scores_threads,
                      lift_scores_shared_bytes()},
      .choose_units = {choose_units_kernel<true>, "choose_units_kernel", choose_threads,
                       choose_shared_bytes()},
      .choose_units_again = {choose_units_kernel<false>, "choose_units_kernel", choose_threads,
                             choose_shared_bytes()},
  };
  return kernels;
}

}  // namespace kvpolicy::gpu::detail
