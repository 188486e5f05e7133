// SPDX-License-Identifier: Apache-2.0
//
// HeadKV: after the prompt each head keeps a budget of rows, which is larger for heads that retrieve and
// reason. Within its budget a head keeps the rows that the prompt's last queries attend to most. It suits
// long prompts with short answers: `compress()` shrinks the cache once, to a fixed size.
//
//     auto plan = kvpolicy::headkv_plan<kvpolicy::float16>(shape, scores, {.capacity = 128});
//     kvpolicy::KvCache cache{plan};
//     …prefill…  cache.compress();  …decode…
//
// Method: Fu et al., arXiv:2410.19258, over SnapKV, arXiv:2404.14469. The main difference: budgets and rows
// are chosen per KV head, by the mean score of its query heads. The published code expands the cache and
// lets each query head choose its own rows. So a capacity here counts rows of a KV head; with four query
// heads per KV head it takes a quarter of the paper's bytes. On the shipped model this common ranking is
// what makes the method work (23 of 25 questions answered; 3 of 25 by the published rule), so do not expect
// the answers of the published code. Also, budgets sum to the capacity exactly (plan/headkv_budgets.hpp,
// which also computes the published numbers).
#pragma once

#include <cstddef>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy {

/// Settings of `headkv_plan`: how many rows there are, how they are divided among heads, and how a head
/// ranks its rows. A *capacity* includes the observation window, a *budget* (HeadBudgets, HeadBudgetCache)
/// does not.
struct HeadKvConfig {
  std::size_t capacity = 128;          ///< Rows per KV head on average, observation window included.
  std::size_t observation_window = 8;  ///< Latest rows, whose queries rank the rows.
  double beta = 1.005;                 ///< 1 / beta of the rows are divided by score.
  double score_power = 1.0;            ///< Scores are raised to this power first.
  Pooling pooling = Pooling::max;
  std::size_t kernel = 7;          ///< Neighbouring rows that are pooled; odd.
  std::size_t compress_every = 0;  ///< Rows decoded between compressions; 0: only on request.
  /// Whether a prompt shorter than `capacity` stays whole in every head, as in the published code. If
  /// false, a head whose budget is smaller than the prompt drops rows of it.
  bool keep_short_prompts = true;

  [[nodiscard]] std::size_t compress_from() const { return keep_short_prompts ? capacity : 0; }
  [[nodiscard]] HeadKvBudgetConfig budgets() const {
    return {capacity, observation_window, beta, score_power};
  }
  [[nodiscard]] SnapKvScorer::Config scorer() const { return {observation_window, pooling, kernel}; }
};

/// Gives every head a budget of `budgets(layer, head)` rows besides the observation window, and otherwise
/// `settings`.
/// @throws ConfigError if `budgets` does not fit the shape, or a setting does not work.
template <Element E, PolicyConfig Config>
[[nodiscard]] HeadPlan<E> plan_of_budgets(const ModelShape& shape, const HeadBudgets& budgets,
                                          Config settings) {
  HeadPlan<E> plan{shape, settings};
  detail::require_fits(budgets, shape, "plan_of_budgets");
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < budgets.heads(); ++head) {
      settings.budget = budgets(layer, head);
      plan.set(layer, head, settings);
    }
  }
  return plan;
}

/// The plan that follows from HeadKV's scores [layers, q_heads].
/// @throws ConfigError if the scores do not fit the shape or are negative, not finite or all zero,
/// or a setting does not work.
template <Element E = float>
[[nodiscard]] HeadPlan<E> headkv_plan(const ModelShape& shape, const HeadScores& scores,
                                      const HeadKvConfig& config = {}) {
  using Budget = HeadBudgetCache<DenseStorage<E>>;
  return plan_of_budgets<E>(
      shape, headkv_budgets(detail::checked_scores(scores, shape), shape.layer(0).kv_heads, config.budgets()),
      typename Budget::Config{.compress_from = config.compress_from(),
                              .compress_every = config.compress_every,
                              .scorer = config.scorer()});
}

/// Like `headkv_plan`, with quantised survivors: keys and values per token.
template <Element E = float>
[[nodiscard]] HeadPlan<E> quantized_headkv_plan(const ModelShape& shape, const HeadScores& scores,
                                                const HeadKvConfig& config = {},
                                                const ResidualConfig& quantized = {.residual = 0}) {
  using Budget = HeadBudgetCache<ResidualStorage<E, Granularity::per_token>>;
  return plan_of_budgets<E>(
      shape, headkv_budgets(detail::checked_scores(scores, shape), shape.layer(0).kv_heads, config.budgets()),
      typename Budget::Config{.compress_from = config.compress_from(),
                              .compress_every = config.compress_every,
                              .scorer = config.scorer(),
                              .storage = quantized});
}

}  // namespace kvpolicy
