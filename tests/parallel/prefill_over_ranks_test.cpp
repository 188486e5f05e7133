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

}  // namespace kvpolicy::reference::prefill_over_ranks_test
