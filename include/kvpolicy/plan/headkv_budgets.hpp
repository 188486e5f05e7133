// SPDX-License-Identifier: Apache-2.0
//
// Computes how many rows each head may keep from HeadKV's head scores (Fu et al., arXiv:2410.19258). Every
// head gets a small base, and the rest is divided by score:
//
//     budget(h) = (b - b / beta) + score(h) * (b / beta) * heads        b = capacity - observation_window
//
// The published code gives budgets to query heads, after expanding the cache to them. `headkv_budgets`
// gives them to KV heads, the heads that are stored: a group's score is the mean of its query heads, and
// the budgets sum to exactly b per KV head. `published_headkv_budgets` reproduces the published integers.
// Neither function gives rows that a short text leaves unused to other heads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_table.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/plan/rounding.hpp>

namespace kvpolicy {

using HeadScores = HeadTable<double>;        ///< [layers, q_heads], not negative, any scale
using HeadBudgets = HeadTable<std::size_t>;  ///< rows besides the observation window

/// Settings of `headkv_budgets`: how many rows there are, and how they are divided among heads.
struct HeadKvBudgetConfig {
  std::size_t capacity = 128;          ///< Average rows per head, observation window included.
  std::size_t observation_window = 8;  ///< Latest rows that every head keeps; at most `capacity`.
  double beta = 1.005;                 ///< b / beta rows go by score; 1: all rows, infinity: none.
  double score_power = 1.0;            ///< Scores are raised to this power first; 0 makes all heads equal.

  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(capacity >= 1 && capacity <= most, "HeadKvBudgetConfig: capacity is ", capacity,
            ", must be 1 to 2^40");
    require(observation_window <= capacity, "HeadKvBudgetConfig: observation_window is ", observation_window,
            ", must be at most capacity = ", capacity);
    // Written so that NaN fails.
    require(beta >= 1.0, "HeadKvBudgetConfig: beta is ", beta, ", must be at least 1");
    require(score_power >= 0.0 && std::isfinite(score_power), "HeadKvBudgetConfig: score_power is ",
            score_power, ", must be 0 or positive");
  }
};

/// Checks that scores are usable.
/// @throws ConfigError for a score that is negative or not finite, or no scores.
inline void check_scores(const HeadScores& scores) {
  require(!scores.values().empty(), "HeadScores: there are none");
  for (std::size_t layer = 0; layer < scores.layers(); ++layer) {
    for (std::size_t head = 0; head < scores.heads(); ++head) {
      const double score = scores(layer, head);
      require(score >= 0.0 && std::isfinite(score), "HeadScores: the score of layer ", layer, ", head ", head,
              " is ", score, ", must be 0 or positive and finite");
    }
  }
}

/// Scores raised to `power`, then divided by their sum.
/// @throws ConfigError if all are zero, or as `check_scores` does.
[[nodiscard]] inline HeadScores normalized_scores(HeadScores scores, double power = 1.0) {
  check_scores(scores);
  const auto scale = [&] {
    const double sum = std::accumulate(scores.values().begin(), scores.values().end(), 0.0);
    require(sum > 0.0 && std::isfinite(sum), "HeadScores: the scores sum to ", sum,
            ", must be positive and finite");
    for (double& score : scores.values()) score /= sum;
  };
  scale();
  if (power == 1.0) return scores;
  for (double& score : scores.values()) score = std::pow(score, power);
  scale();
  return scores;
}

/// Scores of the KV heads, each the mean of the scores of the query heads that read it.
/// @throws ConfigError unless kv_heads divides the heads of the table, or as `check_scores` does.
[[nodiscard]] inline HeadScores group_scores(const HeadScores& scores, std::size_t kv_heads) {
  check_scores(scores);
  require(kv_heads > 0 && scores.heads() % kv_heads == 0, "HeadScores: scores for ", scores.heads(),
          " query heads do not fit ", kv_heads, " KV heads, which must divide them");
  const std::size_t group = scores.heads() / kv_heads;
  HeadScores means{scores.layers(), kv_heads};
  for (std::size_t layer = 0; layer < scores.layers(); ++layer) {
    for (std::size_t head = 0; head < scores.heads(); ++head) {
      means(layer, head / group) += scores(layer, head) / static_cast<double>(group);
    }
  }
  return means;
}

namespace detail {

/// Returns `scores` if they are [layers, q_heads] of the model.
/// @throws ConfigError
[[nodiscard]] inline const HeadScores& checked_scores(const HeadScores& scores, const ModelShape& shape) {
  const std::size_t q_heads = same_heads(shape, "HeadScores").q_heads;
  require(scores.layers() == shape.layers && scores.heads() == q_heads, "HeadScores: scores for ",
          scores.layers(), " layers x ", scores.heads(), " query heads do not fit a model of ", shape.layers,
          " layers x ", q_heads, " query heads");
  return scores;
}

}  // namespace detail

/// The integers of the published code, for query heads. The rows divided by score are b // beta, the floor
/// division of Python's floats. Budgets are rounded one by one, halves to even, so their sum is only near b
/// per head.
/// @throws ConfigError
[[nodiscard]] inline HeadBudgets published_headkv_budgets(const HeadScores& scores,
                                                          const HeadKvBudgetConfig& config = {}) {
  config.validate();
  const HeadScores shares = normalized_scores(scores, config.score_power);
  const auto rows = static_cast<double>(config.capacity - config.observation_window);
  // fmod gives the exact floor, the quotient does not: 110 / 1.1 rounds to 100, but 1.1 is stored as a
  // little more.
  const double remainder = std::isinf(config.beta) ? rows : std::fmod(rows, config.beta);
  const double per_head = std::round((rows - remainder) / config.beta);
  const double pool = per_head * static_cast<double>(shares.values().size());
  HeadBudgets budgets{scores.layers(), scores.heads()};
  std::ranges::transform(shares.values(), budgets.values().begin(),
                         [&](double share) { return round_half_even(share * pool + (rows - per_head)); });
  return budgets;
}

/// Budgets [layers, kv_heads] that sum to exactly (capacity - observation_window) x layers x kv_heads. Each
/// is rounded down, then those with the largest remainders are rounded up; a tie is spread over the layers.
/// @throws ConfigError
[[nodiscard]] inline HeadBudgets headkv_budgets(const HeadScores& scores, std::size_t kv_heads,
                                                const HeadKvBudgetConfig& config = {}) {
  config.validate();
  const HeadScores shares = normalized_scores(group_scores(scores, kv_heads), config.score_power);
  const std::size_t heads = shares.values().size();
  const std::size_t mean = config.capacity - config.observation_window;
  const auto rows = static_cast<double>(mean);
  const double shared = rows / config.beta;
  std::vector<double> budgets(heads);
  for (std::size_t i = 0; i < heads; ++i) {
    budgets[i] = (rows - shared) + shares.values()[i] * shared * static_cast<double>(heads);
  }
  return {scores.layers(), kv_heads, round_to_sum(budgets, mean * heads)};
}

}  // namespace kvpolicy
