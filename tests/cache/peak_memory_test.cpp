// SPDX-License-Identifier: Apache-2.0
//
// What `peak_memory` promises is never exceeded, whatever the calls are, and is not far from what is used.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/dump.hpp"
#include "cache/no_attention.hpp"
#include "support/memory.hpp"
#include "support/random_saved_plan.hpp"
#include "support/repeats.hpp"

using namespace kvpolicy;

namespace {

template <Element E>
void check_peak(std::uint64_t seed, const HeadPlan<E>& plan, CacheOptions options, bool compresses) {
  CAPTURE(seed);
  test::Random random{seed};
  test::CountingResource memory;
  test::CountingResource slow;
  options.memory = &memory;
  if (options.slow_memory != nullptr) options.slow_memory = &slow;
  const std::size_t tokens = 1 + test::below(random, 400);
  const std::size_t prompt = compresses ? test::below(random, tokens + 1) : tokens;
  const std::size_t bound = plan.peak_memory(tokens, options, prompt);
  KvCache<E, test::NoAttention> cache{plan, options};
  const auto read_to = [&](std::size_t end) {
    while (cache.tokens() < end) {
      const std::size_t most = test::below(random, 3) == 0 ? 120 : test::below(random, 2) == 0 ? 1 : 20;
      test::feed(cache, random, {std::min(end - cache.tokens(), 1 + test::below(random, most))},
                 {.scores_rows = true});
      if (options.max_rollback > 0 && test::below(random, 4) == 0) cache.commit();
      REQUIRE(memory.peak_bytes() + slow.peak_bytes() <= bound);
    }
  };
  if (compresses) {
    read_to(prompt);
    if (plan.at(0, 0).is_adaptive_in_model()) {
      cache.compress();
    } else {
      for (std::size_t layer = 0; layer < plan.shape().layers; ++layer) cache.compress(layer);
    }
  }
  read_to(tokens);
  REQUIRE(memory.peak_bytes() + slow.peak_bytes() <= bound);
}

// The layer that the peak has to spare must not hide what each head takes, so there are many of them.
template <class Storage>
void check_budgets(std::size_t heads, const std::vector<typename Storage::Config>& storages) {
  using Budget = HeadBudgetCache<Storage>;
  for (std::uint64_t seed = 0; seed < test::repeats(40U); ++seed) {
    test::Random random{seed};
    typename Budget::Config config;
    config.budget = test::below(random, 70);
    config.scorer = {.observation_window = 1 + test::below(random, 8), .kernel = 3};
    config.storage = storages[seed % storages.size()];
    if (seed % 4 >= 2) config.compress_every = 1 + test::below(random, 60);
    if (seed % 8 >= 6) config.after_first_compress = true;
    if (test::below(random, 3) == 0) config.compress_from = test::below(random, 150);
    config.adaptive_in_layer = heads > 1;
    config.adaptive_in_model = heads > 1 && seed % 5 < 2 && config.compress_every == 0;
    const HeadPlan<float> plan{ModelShape{heads > 1 ? 8U : 12U, heads, heads, 64}, config};
    check_peak(seed, plan, {.page_rows = 32}, seed % 3 > 0);
  }
}

}  // namespace

TEST_CASE("no call takes more than the peak, under any policies") {
  for (std::uint64_t seed = 0; seed < test::repeats(40U); ++seed) {
    const ModelShape shape{16 + seed % 3, 2, 2, 64};
    testing::Random random{static_cast<unsigned>(seed)};
    CacheOptions options;
    options.max_rollback = seed % 4 == 0 ? 9 : 0;
    options.max_append = 1 + seed % 3 * 20;
    options.page_rows = std::size_t{32} << (seed % 2);
    const auto plan = test::random_saved_plan<float>(shape, random, options.max_rollback > 0);
    check_peak(seed, plan, options, seed % 2 == 0);
    if (seed % 5 == 0) {
      options.slow_memory = std::pmr::get_default_resource();
      check_peak(seed, plan, options, false);
    }
  }
}

TEST_CASE("no call takes more than the peak where every head has a budget") {
  using Exact = DenseStorage<float>;
  using PerToken = ResidualStorage<float, Granularity::per_token>;
  for (const std::size_t heads : {1U, 3U}) {
    CAPTURE(heads);
    check_budgets<Exact>(heads, {{}});
    check_budgets<PerToken>(heads, {{.bits = 8, .residual = 0},
                                    {.bits = 2, .residual = 32},
                                    {.bits = 4, .residual = 50},
                                    {.bits = 8, .residual = 64, .flush = Flush::kivi}});
  }
}

TEST_CASE(
    "a plan that keeps every row exactly is promised what it takes at its end, however few layers it has") {
  using Chunks = ChunkRetrievalCache<DenseStorage<bfloat16>>;
  for (const std::size_t layers : {1U, 2U, 30U}) {
    const HeadPlan<bfloat16> full{ModelShape{layers, 9, 3, 64}};
    const HeadPlan<bfloat16> chunks{ModelShape{layers, 9, 3, 64}, Chunks::Config{.chunk = 8, .budget = 32}};
    for (const HeadPlan<bfloat16>* plan : {&full, &chunks}) {
      for (const std::size_t tokens : {1U, 63U, 64U, 65U, 1000U}) {
        CHECK(plan->peak_memory(tokens) == plan->memory(tokens).total());
      }
    }
  }
  for (std::uint64_t seed = 0; seed < test::repeats(24U); ++seed) {
    const ModelShape shape{1 + seed % 3, 2, 2, 64};
    CacheOptions options{.max_rollback = seed % 4 == 0 ? 9U : 0U, .page_rows = std::size_t{32} << (seed % 2)};
    HeadPlan<float> plan{shape};
    plan.set(0, 1, ChunkRetrievalCache<DenseStorage<float>>::Config{.chunk = 8, .budget = 32});
    check_peak(seed, plan, options, seed % 2 == 0);
    options.slow_memory = std::pmr::get_default_resource();
    check_peak(seed, plan, options, false);
  }
  // A commit goes through all layers at once, which are many here; where some heads share over the model, so does the
  // compression of all others.
  for (std::uint64_t seed = 0; seed < test::repeats(30U); ++seed) {
    QuantizedResidualCache<float>::Config codes;
    codes.storage = {.bits = 4, .residual = 16 * (seed % 5)};
    const HeadPlan<float> plan{ModelShape{20, 1, 1, 64}, codes};
    check_peak(seed, plan, {.max_rollback = 1 + seed % 40, .page_rows = 32}, false);
    HeadPlan<float> mixed{ModelShape{8, 2, 2, 64},
                          HeadBudgetCache<DenseStorage<float>>::Config{.budget = 100 + 20 * (seed % 9)}};
    for (std::size_t layer = 0; layer < 8; ++layer) {
      mixed.set(layer, 0,
                HeadBudgetCache<DenseStorage<float>, KeyDiffScorer>::Config{
                    .budget = 150, .adaptive_in_model = true, .safeguard = 0});
    }
    check_peak(seed, mixed, {.page_rows = 32}, true);
  }
  // Rows of few bits need room for their residual more than once, and no more, however long the text is.
  using Codes = QuantizedResidualCache<float, Granularity::per_channel>;
  for (std::uint64_t seed = 0; seed < test::repeats(60U); ++seed) {
    test::Random random{seed};
    Codes::Config config{.sinks = test::below(random, 3) * 20};
    config.storage = {.bits = seed % 2 == 0 ? 4U : 8U,
                      .key_group = std::size_t{16} << seed % 3,
                      .value_group = 32,
                      .residual = 64 * std::max<std::size_t>(test::below(random, 3), seed % 5 == 0 ? 1 : 0),
                      .flush = seed % 5 == 0 ? Flush::kivi : Flush::steady,
                      .halves = seed % 4 == 1};
    const HeadPlan<float> plan{ModelShape{1, 2, 2, 64}, config};
    check_peak(seed, plan, {.page_rows = 64}, false);
    const std::size_t slack = plan.peak_memory(100'000) - plan.memory(100'000).total();
    CHECK(slack < 2 * 2 * 64 * sizeof(float) * (2 * config.storage.residual + 64 + 5 * 64));
  }
  const HeadPlan<bfloat16> plan{ModelShape{30, 9, 3, 64}};
  CHECK_THROWS_AS(static_cast<void>(plan.peak_memory(10, {}, 11)), CapacityError);
  CHECK_THROWS_AS(static_cast<void>(plan.peak_memory(max_text_tokens + 1)), CapacityError);
}
