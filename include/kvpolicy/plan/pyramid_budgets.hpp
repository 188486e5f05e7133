// SPDX-License-Identifier: Apache-2.0
//
// Computes how many rows each layer may keep. PyramidKV (Cai et al., arXiv:2406.02069) gives many to the
// lower layers, whose attention is spread out, and few to the upper ones, on a straight line:
//
//     first layer   2 b - b / beta            b = capacity - observation_window
//     last layer    b / beta
//
// All heads of a layer get the same. Where we differ: budgets belong to KV heads, the heads that are
// stored, and their average is exactly b. The published code rounds the difference between layers down, so
// its budgets sum to more or less than b per head.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/plan/rounding.hpp>

namespace kvpolicy {

/// Settings of `pyramid_budgets`: how many rows there are, and how steeply budgets fall from layer to
/// layer.
struct PyramidBudgetConfig {
  std::size_t capacity = 128;          ///< Rows per head on average, observation window included.
  std::size_t observation_window = 8;  ///< Latest rows that every head keeps; at most `capacity`.
  double beta = 20.0;                  ///< The last layer keeps b / beta rows: 1 makes all layers equal.
  /// Tokens of the prompt; 0: unknown. A short prompt has fewer rows than the first layer's budget. As in
  /// the published code, the line is then flatter and begins at the length of the prompt.
  std::size_t tokens = 0;

  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(capacity >= 1 && capacity <= most, "PyramidBudgetConfig: capacity is ", capacity,
            ", must be 1 to 2^40");
    require(observation_window <= capacity, "PyramidBudgetConfig: observation_window is ", observation_window,
            ", must be at most capacity = ", capacity);
    // Written so that NaN fails.
    require(beta >= 1.0, "PyramidBudgetConfig: beta is ", beta, ", must be at least 1");
  }
};

/// Budgets [layers, kv_heads] without the observation window. They never rise from one layer to the next,
/// and sum to (capacity - observation_window) x layers x kv_heads. @throws ConfigError
[[nodiscard]] inline HeadBudgets pyramid_budgets(const ModelShape& shape,
                                                 const PyramidBudgetConfig& config = {}) {
  const std::size_t kv_heads = same_heads(shape, "pyramid_budgets").kv_heads;
  config.validate();
  const std::size_t mean = config.capacity - config.observation_window;
  const auto rows = static_cast<double>(mean);
  double first = 2.0 * rows - rows / config.beta;
  if (config.tokens > 0) {
    const std::size_t room = config.tokens - std::min(config.tokens, config.observation_window);
    first = std::clamp(static_cast<double>(room), rows, std::max(first, rows));
  }
  std::vector<double> line(shape.layers, rows);
  for (std::size_t layer = 0; layer < shape.layers && shape.layers > 1; ++layer) {
    const double done = static_cast<double>(layer) / static_cast<double>(shape.layers - 1);
    line[layer] = first - done * 2.0 * (first - rows);
  }
  const std::vector<std::size_t> of_layer = round_to_sum(line, mean * shape.layers);
  HeadBudgets budgets{shape.layers, kv_heads};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < kv_heads; ++head) {
      budgets(layer, head) = of_layer[layer];
    }
  }
  return budgets;
}

}  // namespace kvpolicy
