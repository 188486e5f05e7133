// SPDX-License-Identifier: Apache-2.0
//
// Threads that go on from prefixes while another one keeps new ones, lets old ones go and saves all: each says what it
// would have said alone, whatever the policies.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/cache/saved_prefixes.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/prefix_texts.hpp"

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{1, 2, 2, 16};

// In each plan the first head keeps every row.
HeadPlan<float> plan_with(const HeadSettings<float>& second) {
  HeadPlan<float> plan{shape};
  plan.set(0, 1, second);
  return plan;
}

// Texts that begin alike: number i has the first `step` * i tokens of all, then its own.
std::vector<test::Text> texts_of(std::size_t size, std::size_t step) {
  std::vector<test::Text> texts(6);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    for (std::size_t token = 0; token < size; ++token) {
      texts[i].add(static_cast<std::int32_t>(token < step * i ? token : 1000 * i + token));
    }
  }
  return texts;
}

// Three threads read texts under all plans, from the prefixes that a fourth keeps, lets go and saves.
void run_threads(const std::vector<HeadPlan<float>>& plans, const std::vector<test::Text>& texts,
                 const CacheOptions& options, int rounds) {
  PrefixCache<float> prefixes{options};
  const std::size_t size = texts.front().size();
  const auto cold = [&](const HeadPlan<float>& plan, const test::Text& text) {
    KvCache<float> cache{plan, options};
    return test::read_text(cache, text, 0, size, size - 1, [](std::size_t) {});
  };
  std::vector<std::vector<float>> expected;
  for (const auto& plan : plans) {
    for (const auto& text : texts) expected.push_back(cold(plan, text));
  }
  std::atomic<bool> done = false;
  std::atomic<std::size_t> wrong = 0;
  std::vector<std::atomic<std::size_t>> hits(plans.size());
  const auto read = [&](std::size_t seed) {
    test::Random random{seed};
    for (int round = 0; round < rounds; ++round) {
      const std::size_t plan = test::below(random, plans.size());
      const std::size_t text = test::below(random, texts.size());
      auto found = prefixes.find(plans[plan], texts[text].tokens().first(size - 1));
      if (found) ++hits[plan];
      const std::size_t from = found ? found->tokens : 0;
      KvCache<float> cache = found ? std::move(found->cache) : KvCache<float>{plans[plan], options};
      const auto said = test::read_text(cache, texts[text], from, size, size - 1, [](std::size_t) {});
      if (!test::same_bits(said, expected[plan * texts.size() + text])) ++wrong;
      static_cast<void>(prefixes.statistics());
      static_cast<void>(prefixes.list());
    }
  };
  std::atomic<std::size_t> saved = 0;
  std::thread writer{[&] {
    test::Random random{99};
    while (!done) {
      const std::size_t plan = test::below(random, plans.size());
      const test::Text& text = texts[test::below(random, texts.size())];
      KvCache<float> cache{plans[plan], options};
      test::read_text(cache, text, 0, size, size, [&](std::size_t tokens) {
        static_cast<void>(prefixes.keep(cache, text.tokens().first(tokens)));
      });
      static_cast<void>(prefixes.evict(test::below(random, 40'000)));
      std::ostringstream file;
      saved += save(prefixes, plans[plan], file);
    }
  }};
  std::vector<std::thread> readers;
  for (std::size_t i = 0; i < 3; ++i) readers.emplace_back(read, i);
  for (std::thread& reader : readers) reader.join();
  done = true;
  writer.join();
  CHECK(wrong == 0);
  for (std::size_t plan = 0; plan < plans.size(); ++plan) {
    CAPTURE(plan);
    CHECK(hits[plan] > 0);
  }
  CHECK(saved > 0);
}

// In a pool and without.
void run_with_pool_and_without(const std::vector<HeadPlan<float>>& plans,
                               const std::vector<test::Text>& texts, std::size_t page_rows, int rounds) {
  PagePool pool;
  for (PagePool* given : {static_cast<PagePool*>(nullptr), &pool}) {
    run_threads(plans, texts, {.page_rows = page_rows, .pool = given}, rounds);
    CHECK(pool.live_bytes() == 0);
  }
}

}  // namespace

TEST_CASE("many threads find prefixes while one keeps them and lets them go") {
  using Window = SinkRecentCache<DenseStorage<float>>;
  const std::vector<HeadPlan<float>> plans{plan_with(Window::Config{.sinks = 3, .recent = 20}),
                                           HeadPlan<float>{shape}};
  run_with_pool_and_without(plans, texts_of(70, 8), 16, 50);
}

TEST_CASE("the same of heads that drop rows by the attention they got, and of heads that choose chunks") {
  using H2o = HeadBudgetCache<DenseStorage<float>, H2oScorer>;
  using Retrieval = ChunkRetrievalCache<DenseStorage<float>>;
  H2o::Config h2o{.budget = 12, .compress_every = 8};
  h2o.scorer.recent = 4;
  const std::vector<HeadPlan<float>> plans{
      plan_with(h2o), plan_with(Retrieval::Config{.chunk = 4, .budget = 16, .refresh_every = 6})};
  run_with_pool_and_without(plans, texts_of(70, 8), 16, 50);
}

TEST_CASE("the same of 4 bits as int4 has them: keys per channel, exact first and latest rows") {
  // Beyond the latest rows, which are exact, there are two blocks of 64 that share their keys' scales, and texts part
  // in either.
  const auto format = LowBitFormat::of_text({4, 4}, shape, /*residual=*/32);
  REQUIRE(format.keys == KeyScales::channel);
  REQUIRE(format.sinks > 0);
  const HeadSettings<float> head = format.head<float>();
  HeadPlan<float> both{shape, head};
  const std::vector<HeadPlan<float>> plans{plan_with(head), both};
  run_with_pool_and_without(plans, texts_of(180, 33), 64, 25);
}
