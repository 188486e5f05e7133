// SPDX-License-Identifier: Apache-2.0
//
// Launches the kernels that score the rows of heads that are compressed by more than the votes of their latest queries
// or a function of their keys. The rest are the engine's own (cuda/engine.hpp).
#pragma once

#include <cstddef>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/kernel_tables.hpp>
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
  const Grid grid{.x = engine.observe_blocks(), .y = static_cast<int>(engine.shape().kv_heads)};
  launch(engine.row_kernels().sum_directions, grid, stream, params);
  launch(engine.row_kernels().score_directions, grid, stream, params);
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
  launch(engine.row_kernels().expect_queries, {.x = params.group, .y = kv_heads}, stream, params);
  launch(engine.row_kernels().expect_logits, {.x = engine.observe_blocks(), .y = kv_heads}, stream, params);
  launch(detail::common_kernels<>().expect_scores, {.x = kv_heads}, stream, params);
}

/// Lifts scores of heads that say so to a share of their mean. @throws DeviceError
template <Element E>
void lift_scores(const Engine<E>& engine, const LiftScoresParams& params, cudaStream_t stream) {
  launch(detail::common_kernels<>().lift_scores,
         {.x = 1 + params.group, .y = static_cast<int>(engine.shape().kv_heads)}, stream, params);
}

/// Multiplies scores by the lengths of values. @throws DeviceError
template <Element E>
void weigh_values(const Engine<E>& engine, const WeighValuesParams& params, cudaStream_t stream) {
  launch(engine.row_kernels().weigh_values,
         {.x = engine.observe_blocks(), .y = static_cast<int>(engine.shape().kv_heads)}, stream, params);
}

/// Multiplies scores by the norms of what values become in the output projection. @throws DeviceError
template <Element E>
void weigh_outputs(const Engine<E>& engine, const WeighOutputsParams& params, cudaStream_t stream) {
  launch(engine.row_kernels().weigh_outputs,
         {.x = engine.observe_blocks(), .y = static_cast<int>(engine.shape().kv_heads)}, stream, params);
}

}  // namespace kvpolicy::gpu
