// SPDX-License-Identifier: Apache-2.0
//
// Attention over some of the rows, in a form that can be merged with attention over other rows in
// any order: the online softmax of Milakov and Gimelshein (arXiv:1805.02867). An engine that
// computes a part of the rows itself merges its result with ours by the log-sum-exp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Softmax state of one query head over some rows: the greatest logit and the sum of weights.
/// The default is the identity of `merge`: no row was seen.
struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;  ///< sum of exp(logit - max)

  /// log(sum over rows of exp(logit)); -infinity where no row was seen.
  [[nodiscard]] float log_sum_exp() const {
    return sum == 0.0F ? -std::numeric_limits<float>::infinity() : max + std::log(sum);
  }
};

/// exp(from - to), or 1 if both are -infinity, so that merging an empty part never gives NaN.
[[nodiscard]] inline float rescale_factor(float from, float to) {
  return from == to ? 1.0F : std::exp(from - to);
}

/// Adds one row to a softmax state and to its unnormalised values [head_dim]: `row` is the row's value, and
/// its weight is exp(logit).
inline void accumulate(SoftmaxState& state, std::span<float> values, float logit,
                       std::span<const float> row) {
  KVPOLICY_ASSERT(values.size() == row.size());
  if (logit == -std::numeric_limits<float>::infinity()) return;  // its weight is 0
  if (logit > state.max) {
    const float factor = rescale_factor(state.max, logit);
    state.sum *= factor;
    for (float& value : values) value *= factor;
    state.max = logit;
  }
  const float weight = rescale_factor(logit, state.max);
  state.sum += weight;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += weight * row[i];
}

/// Merges the state `part` and its unnormalised values [head_dim] into `state` and `values`.
inline void merge(SoftmaxState& state, std::span<float> values, const SoftmaxState& part,
                  std::span<const float> part_values) {
  KVPOLICY_ASSERT(values.size() == part_values.size());
  const float max = std::max(state.max, part.max);
  const float keep = rescale_factor(state.max, max);
  const float add = rescale_factor(part.max, max);
  state.max = max;
  state.sum = state.sum * keep + part.sum * add;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = values[i] * keep + part_values[i] * add;
  }
}

/// Divides unnormalised values by the sum of weights, which gives attention's output; zeros if no row was
/// seen.
inline void normalize(const SoftmaxState& state, std::span<float> values) {
  const float factor = state.sum == 0.0F ? 0.0F : 1.0F / state.sum;  // NaN stays NaN
  for (float& value : values) value *= factor;
}

/// Merges two normalised outputs of one query head by their log-sum-exps, and returns the
/// log-sum-exp of both parts together.
inline float merge_outputs(std::span<float> out, float log_sum_exp, std::span<const float> part,
                           float part_log_sum_exp) {
  SoftmaxState state{log_sum_exp, log_sum_exp > -std::numeric_limits<float>::infinity() ? 1.0F : 0.0F};
  const SoftmaxState other{part_log_sum_exp,
                           part_log_sum_exp > -std::numeric_limits<float>::infinity() ? 1.0F : 0.0F};
  merge(state, out, other, part);
  normalize(state, out);
  return state.log_sum_exp();
}

}  // namespace kvpolicy
