// SPDX-License-Identifier: Apache-2.0
//
// A prompt that all ranks read at once gives the logits of one process that reads it in one call, on every golden
// checkpoint and under plans of several policies; what follows it is read token by token over the same ranks.
#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/prompt_moves.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/prefill_over_ranks.hpp>
#include <reference_model/parallel/rank_cache.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"
#include "parallel/thread_ranks.hpp"
#include "support/compare.hpp"
#include "support/repeats.hpp"

namespace kvpolicy::reference::prefill_over_ranks_test {

using Window = SinkRecentCache<DenseStorage<float>>::Config;
using test::contains;

std::string message_of(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// The logits of a prompt's tokens and then of each token after it, by every rank; the same bits on all.
std::vector<float> logits_over_ranks(const Llama& model, const HeadPlan<float>& plan, const Shards& shards,
                                     std::span<const int> tokens, std::size_t prompt,
                                     const CacheOptions& options = {}) {
  std::vector<std::vector<float>> found(shards.ranks());
  const auto thrown = test::run_ranks(shards.ranks(), [&](Communicator& ranks) {
    RankCache<float> cache{plan, shards, ranks, options};
    std::vector<float>& logits = found[ranks.rank()];
    logits = prefill_over_ranks(model, cache, tokens.first(prompt), LogitsOf::all);
    ParallelLlama own{model, shards, ranks};
    for (std::size_t at = prompt; at < tokens.size(); ++at) {
      const std::vector<float> some = own.forward(tokens.subspan(at, 1), cache);
      logits.insert(logits.end(), some.begin(), some.end());
    }
  });
  for (const std::exception_ptr& one : thrown) {
    if (one) std::rethrow_exception(one);
  }
  for (const std::vector<float>& other : found) REQUIRE(test::same_bits(other, found[0]));
  return found[0];
}

TEST_CASE("golden checkpoints, a prompt over ranks and then token by token") {
  for (std::size_t number = 0; number < test::repeats(golden_names.size()); ++number) {
    const std::string name = golden_names[number];
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name), {.weights = WeightFormat::float32});
    const Golden golden = load_golden(name);
    HeadPlan<float> plan{model.config().shape()};
    limit_windows(plan, model.config());
    for (std::size_t ranks = 1; ranks <= test::repeats(4U); ++ranks) {
      CAPTURE(ranks);
      const Shards shards = balance(plan, 1000, {.ranks = ranks});
      const auto logits = logits_over_ranks(model, plan, shards, golden.tokens, golden.tokens.size() - 9);
      CHECK(largest_error(logits, golden.logits) <= 1.5F * logit_tolerance);
    }
  }
}

TEST_CASE("prompts of all sizes under a plan of several policies, with a rollback") {
  const Llama model = Llama::load(golden_folder("mha_d64"), {.weights = WeightFormat::float32});
  const ModelShape shape = model.config().shape();
  HeadPlan<float> plan{shape, Window{.sinks = 4, .recent = 20}};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    plan.set(layer, layer % shape.kv_heads, FullCache<DenseStorage<float>>::Config{});
    plan.set(layer, (layer + 1) % shape.kv_heads, Window{.sinks = 0, .recent = 3});
    plan.set(layer, (layer + 2) % shape.kv_heads,
             Window{.sinks = 2, .recent = 9, .rotary_in_cache = model.config().rotary});
  }
  const Golden golden = load_golden("mha_d64");
  const std::span<const int> tokens{golden.tokens};
  const CacheOptions options{.max_rollback = 4};
  for (const std::size_t prompt : {1U, 2U, 3U, 5U, 7U, 31U, 97U}) {
    CAPTURE(prompt);
    KvCache<float> whole{plan, options};
    std::vector<float> expected = step(model, whole, tokens.first(prompt));
    const std::size_t back = prompt - std::min<std::size_t>(prompt, 3);
    whole.truncate(back);
    for (std::size_t at = 0; at < 5; ++at) {
      const std::vector<float> more = step(model, whole, tokens.subspan(110 + at, 1));
      expected.insert(expected.end(), more.begin(), more.end());
    }
    for (const std::size_t ranks : {1U, 2U, 4U, 5U}) {
      CAPTURE(ranks);
      const Shards shards = balance(plan, 1000, {.ranks = ranks});
      std::vector<float> found;
      const auto thrown = test::run_ranks(ranks, [&](Communicator& own) {
        RankCache<float> cache{plan, shards, own, options};
        std::vector<float> logits = prefill_over_ranks(model, cache, tokens.first(prompt));
        CHECK(cache.tokens() == prompt);
        cache.truncate(back);
        ParallelLlama parallel{model, shards, own};
        for (std::size_t at = 0; at < 5; ++at) {
          const std::vector<float> more = parallel.forward(tokens.subspan(110 + at, 1), cache);
          logits.insert(logits.end(), more.begin(), more.end());
        }
        if (own.rank() + 1 == own.size()) found = std::move(logits);
      });
      for (const std::exception_ptr& one : thrown) CHECK(message_of(one).empty());
      CHECK(largest_error(found, expected) <= logit_tolerance);
    }
  }
}

TEST_CASE("prompts that cannot be read are refused on every rank, and the cache can still be used") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  const HeadPlan<float> plan{model.config().shape()};
  const Shards shards = balance(plan, 1000, {.ranks = 3});
  const std::vector<int> tokens(10, 1);
  const auto refused = [&](const CacheOptions& options, auto call, const char* expected) {
    for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
           RankCache<float> cache{plan, shards, ranks, options};
           call(cache, ranks.rank());
         })) {
      CAPTURE(message_of(one));
      CHECK(contains(message_of(one), expected));
    }
  };
  using Cache = RankCache<float>;
  const auto read = [&](Cache& cache, std::span<const int> some) {
    return prefill_over_ranks(model, cache, some);
  };
  refused(
      {}, [&](Cache& cache, std::size_t) { static_cast<void>(read(cache, {})); },
      "no tokens, expected at least 1");
  refused(
      {}, [&](Cache& cache, std::size_t) { static_cast<void>(read(cache, std::vector<int>{1, 100'000})); },
      "token 100000 is outside the vocabulary");
  refused(
      {},
      [&](Cache& cache, std::size_t rank) { static_cast<void>(read(cache, std::vector<int>(4 + rank, 1))); },
      "the same tokens: rank 0 has another than rank 1, 2");
  refused(
      {},
      [&](Cache& cache, std::size_t) {
        static_cast<void>(read(cache, tokens));
        CHECK(cache.tokens() == 10);
        static_cast<void>(read(cache, tokens));
      },
      "the cache holds 10 tokens, must be empty");
  refused(
      {.max_tokens = 9}, [&](Cache& cache, std::size_t) { static_cast<void>(read(cache, tokens)); },
      "10 tokens, must be at most max_tokens = 9");
  refused(
      {.kept_queries = 4}, [&](Cache& cache, std::size_t) { static_cast<void>(read(cache, tokens)); },
      "kept_queries is 4, must be 0");
  // The same cache afterwards.
  refused(
      {.max_tokens = 10},
      [&](Cache& cache, std::size_t) {
        CHECK_THROWS_AS(static_cast<void>(read(cache, std::vector<int>(11, 1))), CapacityError);
        CHECK(cache.tokens() == 0);
        CHECK(read(cache, tokens).size() == model.config().vocabulary);
      },
      "");
  // Budgets, by name.
  HeadPlan<float> budgets{model.config().shape()};
  budgets.set(1, 1, HeadBudgetCache<DenseStorage<float>>::Config{.budget = 40});
  const Shards of_budgets = balance(budgets, 1000, {.ranks = 3});
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         Cache cache{budgets, of_budgets, ranks};
         static_cast<void>(prefill_over_ranks(model, cache, tokens));
       })) {
    CHECK(contains(message_of(one), "head 1 of layer 1 has a budget"));
  }
  // Another model than the plan's, and other models on the ranks.
  const Llama other = Llama::load(golden_folder("tied_d64"), {.weights = WeightFormat::float32});
  for (const bool all : {true, false}) {
    for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
           Cache cache{plan, shards, ranks};
           static_cast<void>(prefill_over_ranks(all || ranks.rank() == 1 ? other : model, cache, tokens));
         })) {
      CHECK(contains(message_of(one), all ? "the plan is of another shape than the model"
                                          : "the same model: rank 0 has another than rank 1"));
    }
  }
}

}  // namespace kvpolicy::reference::prefill_over_ranks_test
