// SPDX-License-Identifier: Apache-2.0
//
// The model over ranks that are threads: every golden checkpoint, with heads whole and cut, in chunks and token by
// token, gives the logits of PyTorch transformers; under a plan of several policies it gives those of one process.
#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/rank_cache.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"
#include "parallel/thread_ranks.hpp"
#include "support/compare.hpp"
#include "support/repeats.hpp"

namespace kvpolicy::reference::parallel_llama_test {

using Window = SinkRecentCache<DenseStorage<float>>::Config;
using test::contains;

// The logits of all tokens, read in chunks, by every rank; they must be the same bits on all.
std::vector<float> logits_over_ranks(const Llama& model, const HeadPlan<float>& plan, const Shards& shards,
                                     std::span<const int> tokens, std::size_t chunk,
                                     const CacheOptions& options = {}) {
  std::vector<std::vector<float>> found(shards.ranks());
  const auto thrown = test::run_ranks(shards.ranks(), [&](Communicator& ranks) {
    ParallelLlama own{model, shards, ranks};
    RankCache<float> cache{plan, shards, ranks, options};
    std::vector<float>& logits = found[ranks.rank()];
    for (std::size_t first = 0; first < tokens.size(); first += chunk) {
      const auto part = tokens.subspan(first, std::min(chunk, tokens.size() - first));
      const std::vector<float> some = own.forward(part, cache, LogitsOf::all);
      logits.insert(logits.end(), some.begin(), some.end());
    }
  });
  for (const std::exception_ptr& one : thrown) {
    if (one) std::rethrow_exception(one);
  }
  for (const std::vector<float>& other : found) REQUIRE(test::same_bits(other, found[0]));
  return found[0];
}

std::string message_of(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

TEST_CASE("golden checkpoints over ranks, heads whole and cut") {
  std::size_t cut = 0;
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
      for (std::size_t layer = 0; layer < shards.layers(); ++layer) cut += shards.merges(layer).size();
      for (const std::size_t chunk : {150U, 64U, 7U}) {
        CAPTURE(chunk);
        const auto logits = logits_over_ranks(model, plan, shards, golden.tokens, chunk);
        CHECK(largest_error(logits, golden.logits) <= 1.5F * logit_tolerance);
      }
    }
    // Whole heads leave ranks without any in some layers.
    const Shards whole = balance(plan, 1000, {.ranks = 4, .cut_rows = false});
    CHECK(largest_error(logits_over_ranks(model, plan, whole, golden.tokens, 50), golden.logits) <=
          1.5F * logit_tolerance);
    const Shards shards = balance(plan, 1000, {.ranks = 3});
    const auto logits = logits_over_ranks(model, plan, shards, golden.tokens, 1);
    CHECK(largest_error(logits, golden.logits) <= 1.5F * logit_tolerance);
  }
  CHECK(cut > 0);
}

TEST_CASE("a plan of full heads and windows, with a rollback") {
  const Llama model = Llama::load(golden_folder("mha_d64"), {.weights = WeightFormat::float32});
  const ModelShape shape = model.config().shape();
  HeadPlan<float> plan{shape, Window{.sinks = 4, .recent = 20}};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    plan.set(layer, layer % shape.kv_heads, FullCache<DenseStorage<float>>::Config{});
  }
  const Golden golden = load_golden("mha_d64");
  const std::span<const int> tokens{golden.tokens};
  const CacheOptions options{.max_rollback = 8};
  KvCache<float> whole{plan, options};
  std::vector<float> expected = step(model, whole, tokens.first(100), LogitsOf::all);
  whole.truncate(95);
  const std::vector<float> more = step(model, whole, tokens.subspan(110, 30), LogitsOf::all);
  expected.insert(expected.end(), more.begin(), more.end());

  const Shards shards = balance(plan, 1000, {.ranks = 3});
  CHECK(shards.merges(0).size() == 1);
  std::vector<float> found;
  const auto thrown = test::run_ranks(3, [&](Communicator& ranks) {
    ParallelLlama own{model, shards, ranks};
    RankCache<float> cache{plan, shards, ranks, options};
    std::vector<float> logits = own.forward(tokens.first(100), cache, LogitsOf::all);
    cache.truncate(95);
    CHECK(cache.tokens() == 95);
    // Every rank refuses what one cache would, whatever it holds, and nothing changes.
    for (const std::size_t to : {96U, 91U, 0U, 1'000'000U}) {
      CHECK_THROWS_AS(cache.truncate(to), RollbackError);
      CHECK(cache.tokens() == 95);
    }
    const std::vector<float> rest = own.forward(tokens.subspan(110, 30), cache, LogitsOf::all);
    logits.insert(logits.end(), rest.begin(), rest.end());
    if (ranks.rank() == 0) found = std::move(logits);
  });
  for (const std::exception_ptr& one : thrown) CHECK(message_of(one).empty());
  CHECK(largest_error(found, expected) <= logit_tolerance);
}

TEST_CASE("ranks hold a share of weights and rows each") {
  const Llama model = Llama::load(golden_folder("mha_d64"), {.weights = WeightFormat::float32});
  HeadPlan<float> plan{model.config().shape()};
  const Shards shards = balance(plan, 1000, {.ranks = 2});
  std::size_t layers = 0;
  for (const LlamaLayer& layer : model.weights().layers) {
    for (const Linear* one : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      layers += one->weight.bytes();
    }
  }
  KvCache<float> whole{plan};
  const Golden golden = load_golden("mha_d64");
  static_cast<void>(step(model, whole, golden.tokens));
  std::vector<std::size_t> weights(2), rows(2);
  const auto thrown = test::run_ranks(2, [&](Communicator& ranks) {
    ParallelLlama own{model, shards, ranks};
    RankCache<float> cache{plan, shards, ranks};
    static_cast<void>(own.forward(golden.tokens, cache));
    weights[ranks.rank()] = own.layer_bytes();
    rows[ranks.rank()] = cache.bytes();
  });
  for (const std::exception_ptr& one : thrown) CHECK(message_of(one).empty());
  CHECK(weights[0] + weights[1] == layers);
  CHECK(rows[0] + rows[1] == whole.bytes());
}

TEST_CASE("ranks that disagree, or fail, end with an error on every rank") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  const HeadPlan<float> plan{model.config().shape()};
  const Shards shards = balance(plan, 1000, {.ranks = 3});
  const Shards whole = balance(plan, 1000, {.ranks = 3, .cut_rows = false});
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         ParallelLlama own{model, ranks.rank() == 2 ? whole : shards, ranks};
       })) {
    CHECK(contains(message_of(one), "ranks do not have the same shards: rank 0 has another than rank 2"));
  }
  const Llama other = Llama::load(golden_folder("tied_d64"), {.weights = WeightFormat::float32});
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         ParallelLlama own{ranks.rank() == 1 ? other : model, shards, ranks};
       })) {
    CHECK(contains(message_of(one), "the same model: rank 0 has another than rank 1"));
  }
  // A rank that ends in the middle: the others are told, and none waits.
  const std::vector<int> tokens(10, 1);
  const auto thrown = test::run_ranks(3, [&](Communicator& ranks) {
    ParallelLlama own{model, shards, ranks};
    RankCache<float> cache{plan, shards, ranks};
    if (ranks.rank() == 1) throw ConfigError{"this rank had enough"};
    static_cast<void>(own.forward(tokens, cache));
  });
  CHECK(message_of(thrown[1]) == "this rank had enough");
  CHECK(message_of(thrown[0]) == "a rank is gone");
  CHECK(message_of(thrown[2]) == "a rank is gone");
  // What a rank cannot hold is refused before anything is sent.
  const auto wrong =
      test::run_ranks(2, [&](Communicator& ranks) { RankCache<float> cache{plan, shards, ranks}; });
  for (const std::exception_ptr& one : wrong)
    CHECK(contains(message_of(one), "shards for 3 ranks, there are 2"));
  const HeadPlan<float> budgets{model.config().shape(),
                                HeadBudgetCache<DenseStorage<float>>::Config{.budget = 40}};
  const Shards cut_budgets = balance(budgets, 1000, {.ranks = 3, .cut_budgets = true});
  REQUIRE(!cut_budgets.merges(0).empty());
  const auto refused =
      test::run_ranks(3, [&](Communicator& ranks) { RankCache<float> cache{budgets, cut_budgets, ranks}; });
  for (const std::exception_ptr& one : refused) CHECK(contains(message_of(one), "is cut by rows"));
  // Tensors of other heads than the cache holds.
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         ParallelLlama own{model, shards, ranks};
         RankCache<float> cache{plan, whole, ranks};
         static_cast<void>(own.forward(tokens, cache));
       })) {
    CHECK((contains(message_of(one), "parts of") || contains(message_of(one), "a rank is gone")));
  }
  // A plan or options that differ.
  for (const std::exception_ptr& one : test::run_ranks(2, [&](Communicator& ranks) {
         HeadPlan<float> own{model.config().shape()};
         if (ranks.rank() == 1) own.set(0, 0, Window{.sinks = 4, .recent = 20});
         RankCache<float> cache{own, balance(plan, 1000, {.ranks = 2}), ranks};
       })) {
    CHECK(contains(message_of(one), "the same plan: rank 0 has another than rank 1"));
  }
  for (const std::exception_ptr& one : test::run_ranks(2, [&](Communicator& ranks) {
         const Shards two = balance(plan, 1000, {.ranks = 2});
         RankCache<float> cache{plan, two, ranks, {.max_rollback = ranks.rank()}};
       })) {
    CHECK(contains(message_of(one), "the same cache options: rank 0 has another than rank 1"));
  }
}

}  // namespace kvpolicy::reference::parallel_llama_test
