// SPDX-License-Identifier: Apache-2.0
//
// Launches the kernels that score the rows of heads that are compressed by more than the votes of their latest queries
// or a function of their keys. The rest are the engine's own (cuda/engine.hpp).
#pragma once

#include <cstddef>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/dispatch.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/kernels/expected_queries.cuh>
#include <kvpolicy/cuda/kernels/key_directions.cuh>
#include <kvpolicy/cuda/kernels/lift_scores.cuh>
#include <kvpolicy/cuda/kernels/weigh_outputs.cuh>
#include <kvpolicy/cuda/kernels/weigh_values.cuh>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// Scores rows by how their keys differ from the mean direction of all keys. @throws DeviceError
template <Element E>
void score_directions(const Engine<E>& engine, const KeyDirectionsParams& params, cudaStream_t stream) {
  dispatch_head_dim(engine.shape().head_dim, [&]<int D>() {
    LaunchShape shape{.grid_x = engine.observe_blocks(),
                      .grid_y = static_cast<int>(engine.shape().kv_heads),
                      .threads = directions_threads,
                      .shared_bytes = sum_directions_shared_bytes<D>()};
    launch(sum_directions_kernel<E, D>, shape, stream, params, "sum_directions_kernel");
    shape.shared_bytes = score_directions_shared_bytes<D>();
    launch(score_directions_kernel<E, D>, shape, stream, params, "score_directions_kernel");
  });
}
/// Scratch memory for that: KeyDirectionsParams::sums.
template <Element E>
[[nodiscard]] double* directions_memory(const Engine<E>& engine, ArrayCarver& carver) {
  return carver.take<double>(engine.shape().kv_heads * static_cast<std::size_t>(engine.observe_blocks()) *
                             engine.shape().head_dim);
}

/// Scores rows by the attention that queries to come can be expected to pay, of the heads whose setting `params` names.
/// @throws DeviceError
template <Element E>
void score_expected(const Engine<E>& engine, const ExpectedQueriesParams& params, cudaStream_t stream) {
  const auto kv_heads = static_cast<int>(engine.shape().kv_heads);
  dispatch_head_dim(engine.shape().head_dim, [&]<int D>() {
    launch(expect_queries_kernel<E, D>,
           {.grid_x = params.group, .grid_y = kv_heads, .threads = expected_threads}, stream, params,
           "expect_queries_kernel");
    launch(expect_logits_kernel<E, D>,
           {.grid_x = engine.observe_blocks(),
            .grid_y = kv_heads,
            .threads = expected_threads,
            .shared_bytes = expect_logits_shared_bytes<D>()},
           stream, params, "expect_logits_kernel");
  });
  launch(
      expect_scores_kernel<>,
      {.grid_x = kv_heads, .threads = expected_scores_threads, .shared_bytes = expect_scores_shared_bytes()},
      stream, params, "expect_scores_kernel");
}

/// Lifts scores of heads that say so to a share of their mean. @throws DeviceError
template <Element E>
void lift_scores(const Engine<E>& engine, const LiftScoresParams& params, cudaStream_t stream) {
  launch(lift_scores_kernel<>,
         {.grid_x = 1 + params.group,
          .grid_y = static_cast<int>(engine.shape().kv_heads),
          .threads = lift_scores_threads,
          .shared_bytes = lift_scores_shared_bytes()},
         stream, params, "lift_scores_kernel");
}

/// Multiplies scores by the lengths of values. @throws DeviceError
template <Element E>
void weigh_values(const Engine<E>& engine, const WeighValuesParams& params, cudaStream_t stream) {
  dispatch_head_dim(engine.shape().head_dim, [&]<int D>() {
    launch(weigh_values_kernel<E, D>,
           {.grid_x = engine.observe_blocks(),
            .grid_y = static_cast<int>(engine.shape().kv_heads),
            .threads = weigh_values_threads},
           stream, params, "weigh_values_kernel");
  });
}

/// Multiplies scores by the norms of what values become in the output projection. @throws DeviceError
template <Element E>
void weigh_outputs(const Engine<E>& engine, const WeighOutputsParams& params, cudaStream_t stream) {
  dispatch_head_dim(engine.shape().head_dim, [&]<int D>() {
    launch(weigh_outputs_kernel<E, D>,
           {.grid_x = engine.observe_blocks(),
            .grid_y = static_cast<int>(engine.shape().kv_heads),
            .threads = weigh_outputs_threads,
            .shared_bytes = weigh_outputs_shared_bytes<D>()},
           stream, params, "weigh_outputs_kernel");
  });
}

}  // namespace kvpolicy::gpu
