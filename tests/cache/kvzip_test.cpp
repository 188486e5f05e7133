// SPDX-License-Identifier: Apache-2.0
//
// KVzip: scoring passes over forks, what becomes of their scores, and budgets that the whole model shares, compared
// with a slow model.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/slow_text.hpp"
#include "support/compare.hpp"

using namespace kvpolicy;
using namespace test::slow;

namespace {

using Snap = HeadBudgetCache<DenseStorage<E>>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using Zip = HeadBudgetCache<DenseStorage<E>, KvZipScorer>;
using Plan = HeadPlan<E>;

// Adds up the mean of votes, but in scoring passes alone.
struct AddedInPasses : H2oScorer {
  static constexpr bool waits_for_scoring = true;
};

// Brings the attention of scoring passes over a fork to the cache; `scores` [heads][rows] gets the largest.
void score(test::Random& random, Cache& cache, const SlowText& text, const std::vector<std::size_t>& calls,
           std::vector<std::vector<double>>& scores, const AttendOptions& options) {
  AttendOptions own = options;
  own.scores_rows = true;
  Cache pass = cache.fork();
  SlowText passed = text;
  for (const std::size_t tokens : calls) {
    const auto paid = passed.step(random, pass, tokens, own);
    for (std::size_t head = 0; head < scores.size(); ++head) {
      for (std::size_t r = 0; r < scores[head].size(); ++r) {
        scores[head][r] = std::max(scores[head][r], largest(paid[head][r]));
      }
    }
  }
  cache.take_scores(pass);
}

}  // namespace

TEST_CASE("kvzip: the rows that some query of a scoring pass looks at most stay, over the whole model") {
  test::Random random{71};
  for (int round = 0; round < 30; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + test::below(random, 3);
    const ModelShape shape{1 + test::below(random, 3), 2 * group, 2, 64};
    const bool in_model = round % 3 != 0;
    const double safe = round % 2 == 0 ? 0.0 : 0.3;
    Zip::Config config{.budget = 12, .safeguard = safe, .scorer = {.recent = test::below(random, 4)}};
    config.adaptive_in_model = in_model;
    config.adaptive_in_layer = round % 6 == 3;
    Plan plan{shape, config};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      for (std::size_t h = 0; h < 2; ++h) {
        config.budget = test::below(random, 40);  // some more than there are rows
        plan.set(l, h, config);
      }
    }
    Cache cache{plan};
    SlowText text{shape};
    const std::vector<float> sink(shape.q_heads, 0.5F);
    AttendOptions options;
    if (round % 4 == 1) options.softcap = 3.0F;
    if (round % 4 == 2) options.attention_sink_bias = sink;
    for (const std::size_t tokens : {17U, 1U, 12U})
      static_cast<void>(text.step(random, cache, tokens, options));
    const std::size_t rows = 30;
    std::vector<std::vector<double>> scores(2 * shape.layers, std::vector<double>(rows, 0.0));
    // Two passes over forks of their own; the larger score counts.
    score(random, cache, text, {9, 2}, scores, options);
    score(random, cache, text, {5}, scores, options);
    cache.compress();
    const auto survivors = all_held(cache);
    std::vector<SlowHead> heads;
    for (std::size_t head = 0; head < scores.size(); ++head) {
      const auto& own = plan.at(head / 2, head % 2).get<Zip>();
      heads.push_back(
          {scores[head], own.budget, own.scorer.recent, own.adaptive_in_layer || in_model ? safe : 0.0});
      CHECK(cache.head(head / 2, head % 2).unscored_rows(0) == 0);
    }
    if (in_model) {
      check_survivors(heads, survivors);
    } else {
      const std::size_t together = config.adaptive_in_layer ? 2 : 1;
      for (std::size_t first = 0; first < heads.size(); first += together) {
        check_survivors({heads.begin() + static_cast<std::ptrdiff_t>(first),
                         heads.begin() + static_cast<std::ptrdiff_t>(first + together)},
                        {survivors.begin() + static_cast<std::ptrdiff_t>(first),
                         survivors.begin() + static_cast<std::ptrdiff_t>(first + together)});
      }
    }
  }
}

TEST_CASE("kvzip: a cache compressed once answers through forks that hold the same rows") {
  test::Random random{72};
  const ModelShape shape{2, 4, 2, 64};
  Cache cache{Plan{shape, Zip::Config{.budget = 10, .adaptive_in_model = true, .safeguard = 0}}};
  SlowText text{shape};
  static_cast<void>(text.step(random, cache, 50));
  std::vector<std::vector<double>> scores(4, std::vector<double>(50, 0.0));
  score(random, cache, text, {50}, scores, {});
  cache.compress();
  const auto rows = all_held(cache);
  const auto before = test::dump(cache);
  for (int question = 0; question < 10; ++question) {
    Cache fork = cache.fork();
    test::feed(fork, random, {1 + test::below(random, 9), 1, 1});
    const auto own = all_held(fork);
    for (std::size_t head = 0; head < rows.size(); ++head) {
      CHECK(std::ranges::includes(own[head], rows[head]));
    }
  }
  CHECK(test::dump(cache) == before);
}

TEST_CASE("kvzip: rows that no pass has seen cannot be ranked, and nothing changes") {
  test::Random random{73};
  const ModelShape shape{2, 2, 2, 64};
  Plan plan{shape};
  plan.set(1, 1, Zip::Config{.budget = 4, .scorer = {.recent = 2}});
  plan.set(0, 0, H2o::Config{.budget = 3, .scorer = {.recent = 1}});
  Cache cache{plan};
  test::feed(cache, random, {20});
  const auto before = test::dump(cache);
  const std::string message = test::thrown<ShapeError>([&] { cache.compress(); });
  CHECK(test::contains(message,
                       "KvCache::compress: 18 of 20 rows of KV head 1 of layer 1 were in no scoring pass"));
  CHECK(test::dump(cache) == before);

  // Rows of the tail are not committed by a refused call.
  Cache tail{plan, {.max_append = 4}};
  test::feed(tail, random, {20});
  test::Chunk<E> more{random, shape, 3};
  for (std::size_t l = 0; l < 2; ++l) more.append(tail, l);
  const auto with_tail = test::dump(tail);
  const std::size_t committed = tail.commit_point();
  CHECK(test::contains(test::thrown<ShapeError>([&] { tail.compress(); }),
                       "21 of 23 rows of KV head 1 of layer 1"));
  CHECK(test::contains(test::thrown<ShapeError>([&] { tail.compress(1); }),
                       "21 of 23 rows of KV head 1 of layer 1"));
  CHECK(test::dump(tail) == with_tail);
  CHECK(tail.commit_point() == committed);

  // Calls that are not a scoring pass leave it at that.
  Cache reads = cache.fork();
  test::feed(reads, random, {5});
  cache.take_scores(reads);
  CHECK(cache.head(1, 1).unscored_rows(0) == 18);
  Cache pass = cache.fork();
  test::feed(pass, random, {1}, {.scores_rows = true});
  cache.take_scores(pass);
  CHECK(cache.head(1, 1).unscored_rows(0) == 0);
  cache.compress();
  CHECK(cache.head(1, 1).rows() == 6);
  CHECK(cache.head(0, 0).rows() == 4);
  CHECK(cache.head(0, 1).rows() == 20);

  // A text shorter than the capacity needs no scores.
  Cache small{Plan{shape, Zip::Config{.budget = 30}}};
  test::feed(small, random, {20});
  small.compress();
  CHECK(small.head(0, 0).rows() == 20);
}

TEST_CASE("take_scores: only of a fork that has read more since") {
  test::Random random{74};
  const ModelShape shape{1, 2, 2, 64};
  const Plan plan{shape, Zip::Config{.budget = 4}};
  Cache cache{plan};
  test::feed(cache, random, {10});
  const auto refusal = [&](const Cache& scored) {
    return test::thrown<Error>([&] { cache.take_scores(scored); });
  };
  Cache other{Plan{shape, Zip::Config{.budget = 5}}};
  test::feed(other, random, {12}, {.scores_rows = true});
  CHECK(test::contains(refusal(other), "take_scores: the scores are of a cache under another plan"));
  Cache shorter{plan};
  test::feed(shorter, random, {9}, {.scores_rows = true});
  CHECK(test::contains(refusal(shorter),
                       "KV head 0 of layer 0 holds 10 rows of 10 tokens, in the scored cache 9 of 9"));
  Cache dropped = cache.fork();
  test::feed(dropped, random, {3}, {.scores_rows = true});
  dropped.compress();
  CHECK(test::contains(refusal(dropped), "it must be a fork that has only read more since"));
  CHECK(cache.head(0, 0).unscored_rows(0) == 10);
  Cache good = cache.fork();
  test::feed(good, random, {3}, {.scores_rows = true});
  CHECK(refusal(good).empty());
  CHECK(cache.head(0, 0).unscored_rows(0) == 0);
}

TEST_CASE("take_scores: beside heads that hold few rows and heads that add up every call") {
  test::Random random{80};
  const ModelShape shape{1, 3, 3, 64};
  Plan plan{shape, Zip::Config{.budget = 4}};
  plan.set(0, 1, SinkRecentCache<DenseStorage<E>>::Config{.sinks = 2, .recent = 8});
  plan.set(0, 2, H2o::Config{.budget = 5, .scorer = {.recent = 5}});
  Cache cache{plan};
  test::feed(cache, random, {40});
  const auto sums = cache.head(0, 2).accumulated();
  const std::vector<double> before(sums.begin(), sums.end());
  Cache pass = cache.fork();
  test::feed(pass, random, {25}, {.scores_rows = true});
  cache.take_scores(pass);
  CHECK(cache.head(0, 0).unscored_rows(0) == 0);
  const auto after = cache.head(0, 2).accumulated();
  CHECK(test::largest_difference(after, before) == 0.0);  // the pass is no part of the text
  cache.compress();
  CHECK(cache.head(0, 0).rows() == 4);
  CHECK(cache.head(0, 2).rows() == 10);
}

TEST_CASE("fork_as: scores go along with the rows to another budget") {
  test::Random random{75};
  const ModelShape shape{2, 4, 2, 64};
  Cache cache{Plan{shape, Zip::Config{.budget = 1000}}};
  test::feed(cache, random, {40});
  const Plan target{shape, Zip::Config{.budget = 7, .adaptive_in_model = true, .safeguard = 0}};
  Cache unscored = cache.fork_as(target);
  CHECK(unscored.head(0, 0).unscored_rows(0) == 40);
  Cache pass = cache.fork();
  test::feed(pass, random, {20}, {.scores_rows = true});
  cache.take_scores(pass);
  Cache scored = cache.fork_as(target);
  scored.compress();
  CHECK(scored.head(0, 0).rows() + scored.head(0, 1).rows() + scored.head(1, 0).rows() +
            scored.head(1, 1).rows() ==
        28);
  // Sums that mean something else do not.
  CHECK(test::contains(test::thrown<ConfigError>(
                           [&] { static_cast<void>(cache.fork_as(Plan{shape, H2o::Config{.budget = 7}})); }),
                       "has not added up the attention"));
}

TEST_CASE(
    "adaptive_in_model: heads that compress by themselves leave it alone, and no query may be missing") {
  test::Random random{82};
  const ModelShape shape{1, 4, 4, 64};
  Plan plan{shape, Snap::Config{.budget = 6, .compress_every = 4, .adaptive_in_layer = true}};
  for (const std::size_t head : {2U, 3U})
    plan.set(0, head, Zip::Config{.budget = 5, .adaptive_in_model = true});
  Cache cache{plan};
  test::feed(cache, random, {20, 1, 1, 1, 9});
  CHECK(cache.head(0, 0).rows() + cache.head(0, 1).rows() < 2 * 24);
  CHECK(cache.head(0, 2).rows() == 32);
  CHECK(cache.head(0, 3).rows() == 32);

  // The head of layer 1 drops nothing of its own accord, but its rows compete.
  const ModelShape two{2, 1, 1, 64};
  Plan competing{two, Snap::Config{.budget = 2, .adaptive_in_model = true}};
  competing.set(1, 0, Snap::Config{.budget = 100, .adaptive_in_model = true});
  Cache apart{competing, {.max_append = 20}};
  test::Chunk<E> chunk{random, two, 20};
  chunk.step(apart, 0);
  chunk.append(apart, 1);
  CHECK(test::contains(test::thrown<ShapeError>([&] { apart.compress(); }), "not all queries are known"));
}

TEST_CASE("adaptive_in_model: what a plan and a call cannot have is refused by name") {
  const ModelShape shape{2, 2, 2, 64};
  Snap::Config shared{.budget = 9, .adaptive_in_model = true};
  Plan plan{shape, shared};
  CHECK(test::thrown<Error>([&] { Cache{plan}; }).empty());
  Cache cache{plan};
  test::Random random{78};
  test::feed(cache, random, {30});
  CHECK(test::contains(test::thrown<ConfigError>([&] { cache.compress(0); }),
                       "heads of layer 0 share their budgets"));
  cache.compress();
  std::size_t rows = 0;
  for (std::size_t head = 0; head < 4; ++head) rows += cache.head(head / 2, head % 2).rows();
  CHECK(rows == 4 * (9 + 8));
  plan.set(1, 0, Snap::Config{.budget = 9, .adaptive_in_model = true, .safeguard = 0.5});
  CHECK(test::contains(test::thrown<ConfigError>([&] { Cache{plan}; }),
                       "KV head 0 of layer 1 shares the model's budget"));
  // Heads that share in their layer are no part of it.
  plan.set(1, 0, Snap::Config{.budget = 9, .adaptive_in_layer = true});
  CHECK(test::thrown<ConfigError>([&] { Cache{plan}; }).empty());
  CHECK(test::contains(test::thrown<ConfigError>([&] {
                         Plan{shape,
                              Snap::Config{.budget = 9, .compress_every = 3, .adaptive_in_model = true}};
                       }),
                       "compress_every is 3, must be 0 with adaptive_in_model"));
  CHECK(test::contains(
      test::thrown<ConfigError>([&] { Plan{shape, Zip::Config{.budget = 9, .compress_every = 3}}; }),
      "must be 0 under a scorer that needs a scoring pass"));
  using Added = HeadBudgetCache<DenseStorage<E>, AddedInPasses>;
  CHECK(test::contains(test::thrown<ConfigError>([&] { Added::validate({.budget = 9}, {}); }),
                       "votes is 'mean', must be 'largest'"));
}
