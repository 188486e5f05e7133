// SPDX-License-Identifier: Apache-2.0
//
// The passes in which a model repeats its context, compared with the same passes written out by hand.
#include <reference_model/scoring_pass.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>

#include "model/golden.hpp"
#include "support/compare.hpp"

namespace kvpolicy::reference::scoring_pass_test {
namespace {

using Zip = HeadBudgetCache<DenseStorage<float>, KvZipScorer>;
using Scores = std::vector<std::vector<double>>;

Scores scores_of(const KvCache<float>& cache, std::size_t rows) {
  const ModelShape& shape = cache.plan().shape();
  Scores scores;
  for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
    const auto own = cache.head(head / shape.kv_heads, head % shape.kv_heads).accumulated();
    scores.emplace_back(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(rows));
  }
  return scores;
}

TEST_CASE("each part is repeated over a fork, after the words and the tokens where it starts") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  const std::vector<int> all = load_golden("gqa2_d80").tokens;
  const std::vector<int> text(all.begin(), all.begin() + 60);
  const RepeatRequest ask{.first = {7, 8, 9}, .further = {11, 12}, .part = 25, .overlap = 4};
  const HeadPlan<float> plan{model.config().shape(), Zip::Config{.budget = 20}};

  KvCache cache{plan};
  static_cast<void>(prefill(model, cache, text, 64));
  const KvCache before = cache.fork();
  score_by_repeating(model, cache, text, ask);
  CHECK(cache.tokens() == 60);

  Scores largest(plan.shape().kv_head_count(), std::vector<double>(60, 0.0));
  const std::vector<std::vector<int>> passes{[&] {
                                               std::vector<int> tokens{7, 8, 9};
                                               tokens.insert(tokens.end(), text.begin(), text.begin() + 25);
                                               return tokens;
                                             }(),
                                             [&] {
                                               std::vector<int> tokens{11, 12};
                                               tokens.insert(tokens.end(), text.begin() + 21,
                                                             text.begin() + 50);
                                               return tokens;
                                             }(),
                                             [&] {
                                               std::vector<int> tokens{11, 12};
                                               tokens.insert(tokens.end(), text.begin() + 46, text.end());
                                               return tokens;
                                             }()};
  for (const std::vector<int>& tokens : passes) {
    KvCache pass = before.fork();
    static_cast<void>(step(model, pass, tokens, LogitsOf::none, {.scores_rows = true}));
    const Scores found = scores_of(pass, 60);
    for (std::size_t head = 0; head < largest.size(); ++head) {
      for (std::size_t row = 0; row < 60; ++row) {
        largest[head][row] = std::max(largest[head][row], found[head][row]);
      }
    }
  }
  const Scores scores = scores_of(cache, 60);
  for (std::size_t head = 0; head < largest.size(); ++head) {
    CHECK(test::largest_difference(scores[head], largest[head]) <= 1e-6);
    CHECK(*std::ranges::min_element(scores[head]) > 0.0);
  }
  cache.compress();
  CHECK(cache.head(0, 0).rows() == 20);
}

TEST_CASE(
    "a text that leaves no room for its repetition is refused, one that leaves little is repeated in small "
    "parts") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  const std::size_t most = model.config().max_positions;
  REQUIRE(most >= 40);
  const HeadPlan<float> plan{model.config().shape(), Zip::Config{.budget = 20}};
  const auto scored = [&](std::size_t tokens) {
    const std::vector<int> text(tokens, 5);
    KvCache cache{plan};
    static_cast<void>(prefill(model, cache, text, 512));
    score_by_repeating(model, cache, text, {.first = {7, 8, 9}, .further = {11, 12}, .overlap = 4});
    return cache.head(0, 0).unscored_rows(0);
  };
  CHECK(scored(most - 80) == 0);
  CHECK(test::contains(test::thrown<ShapeError>([&] { static_cast<void>(scored(most - 6)); }),
                       "the model was trained for 512"));
}

}  // namespace
}  // namespace kvpolicy::reference::scoring_pass_test
