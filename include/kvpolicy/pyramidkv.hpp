// SPDX-License-Identifier: Apache-2.0
//
// PyramidKV: after the prompt the lower layers keep many rows and the upper ones few, and each head keeps
// those rows that the prompt's last queries attend to most. It suits long prompts with short answers if
// nothing is known about single heads; if there are head scores, HeadKV (headkv.hpp) uses the same memory
// better.
//
//     auto plan = kvpolicy::pyramidkv_plan<kvpolicy::float16>(shape, {.capacity = 128});
//     kvpolicy::KvCache cache{plan};
//     …prefill…  cache.compress();  …decode…
//
// Method: Cai et al., arXiv:2406.02069, over SnapKV, arXiv:2404.14469. plan/pyramid_budgets.hpp and
// policy/snapkv_scorer.hpp say where we differ.
#pragma once

#include <cstddef>

#include <kvpolicy/headkv.hpp>
#include <kvpolicy/plan/pyramid_budgets.hpp>

namespace kvpolicy {

/// Settings of `pyramidkv_plan`: how many rows there are, how they are divided among layers, and how a head
/// ranks its rows.
struct PyramidKvConfig {
  std::size_t capacity = 128;          ///< Rows per head on average, observation window included.
  std::size_t observation_window = 8;  ///< Latest rows, whose queries rank the rows.
  double beta = 20.0;                  ///< The last layer keeps 1 / beta of the average budget.
  std::size_t tokens = 0;              ///< Tokens of the prompt; 0: unknown (plan/pyramid_budgets.hpp).
  Pooling pooling = Pooling::max;
  std::size_t kernel = 7;
  std::size_t compress_every = 0;  ///< Rows decoded between compressions; 0: only on request.
  /// Whether a prompt shorter than `capacity` stays whole in every layer, as in the published code. If
  /// false, a layer whose budget is smaller than the prompt drops rows of it.
  bool keep_short_prompts = true;

  [[nodiscard]] std::size_t compress_from() const { return keep_short_prompts ? capacity : 0; }
  [[nodiscard]] PyramidBudgetConfig budgets() const { return {capacity, observation_window, beta, tokens}; }
  [[nodiscard]] SnapKvScorer::Config scorer() const { return {observation_window, pooling, kernel}; }
};

/// The plan whose budgets fall from layer to layer.
/// @throws ConfigError if a setting does not work.
template <Element E = float>
[[nodiscard]] HeadPlan<E> pyramidkv_plan(const ModelShape& shape, const PyramidKvConfig& config = {}) {
  using Budget = HeadBudgetCache<DenseStorage<E>>;
  return plan_of_budgets<E>(shape, pyramid_budgets(shape, config.budgets()),
                            typename Budget::Config{.compress_from = config.compress_from(),
                                                    .compress_every = config.compress_every,
                                                    .scorer = config.scorer()});
}

}  // namespace kvpolicy
