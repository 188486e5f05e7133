// SPDX-License-Identifier: Apache-2.0
//
// A text that goes on from a known prefix says what it would have said had it been read from its beginning.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/duo.hpp>

#include "cache/prefix_texts.hpp"
#include "support/memory.hpp"
#include "support/random_saved_plan.hpp"
#include "support/random_tree.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using Full = FullCache<DenseStorage<float>>;
using Window = SinkRecentCache<DenseStorage<float>>;
using Int4 = QuantizedResidualCache<float, Granularity::per_token>;
using Tokens = std::vector<std::int32_t>;

template <Element E>
void any_plans(std::uint64_t seed, const CacheOptions& options, std::size_t longest, std::size_t operations,
               std::size_t max_bytes = 0) {
  CAPTURE(seed);
  const ModelShape shape{1 + seed % 2, 8, 8, 64};
  testing::Random random{static_cast<unsigned>(seed)};
  std::vector<HeadPlan<E>> plans;
  for (int i = 0; i < 2; ++i)
    plans.push_back(test::random_saved_plan<E>(shape, random, options.max_rollback > 0));
  plans.push_back(HeadPlan<E>{shape});
  test::RandomPrefixes<E> prefixes{seed, plans, options, longest, max_bytes};
  prefixes.run(operations);
  const PrefixStatistics statistics = prefixes.prefixes().statistics();
  CHECK(statistics.hits > operations / 10);
  CHECK(statistics.evicted > 0);
}

Tokens count_up(std::size_t size, std::int32_t first = 0) {
  Tokens tokens(size);
  for (std::size_t i = 0; i < size; ++i) tokens[i] = first + static_cast<std::int32_t>(i);
  return tokens;
}

// A cache that has read `tokens` random tokens.
KvCache<float> some_cache(const HeadPlan<float>& plan, const CacheOptions& options, std::size_t tokens,
                          std::uint64_t seed = 1) {
  KvCache<float> cache{plan, options};
  test::Random random{seed};
  test::feed(cache, random, {tokens});
  return cache;
}

constexpr ModelShape shape{2, 4, 2, 64};

}  // namespace

TEST_CASE("random texts over all policies go on from prefixes as they would from their beginning") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    any_plans<float>(seed, {.page_rows = 32}, 90, 60);
    any_plans<float>(10 + seed, {.max_rollback = 5, .max_append = 2, .kept_queries = 3, .page_rows = 32}, 60,
                     40);
  }
  any_plans<bfloat16>(20, {}, 200, 30);
}

TEST_CASE("the same in slow memory, in one pool, and with a limit") {
  test::CountingResource slow;
  any_plans<float>(30, {.page_rows = 32, .slow_memory = &slow}, 90, 60);
  CHECK(slow.live_bytes() == 0);
  CHECK(slow.faults() == 0);
  PagePool pool;
  any_plans<float>(40, {.page_rows = 32, .pool = &pool}, 90, 60);
  CHECK(pool.live_bytes() == 0);
  any_plans<float>(50, {.page_rows = 32}, 90, 60, 3'000'000);
}

TEST_CASE("heads that keep every row are found up to a page boundary, others up to a mark") {
  const CacheOptions options{.page_rows = 16};
  for (const bool has_window : {false, true}) {
    HeadPlan<float> plan{shape};
    if (has_window) plan.set(1, 1, Window::Config{.sinks = 2, .recent = 20});
    PrefixCache<float> prefixes{options};
    CHECK(!prefixes.find(plan, count_up(100)));
    CHECK(prefixes.keep(some_cache(plan, options, 40), count_up(40)));
    CHECK(prefixes.keep(some_cache(plan, options, 100), count_up(100)));
    const auto found = [&](const Tokens& tokens) {
      const auto one = prefixes.find(plan, tokens);
      if (one) CHECK(one->cache.tokens() == one->tokens);
      return one ? one->tokens : 0;
    };
    Tokens text = count_up(99);
    CHECK(found(text) == (has_window ? 40 : 96));
    text[70] = -1;
    CHECK(found(text) == (has_window ? 40 : 64));
    text[63] = -1;
    CHECK(found(text) == (has_window ? 40 : 48));
    text[47] = -1;
    CHECK(found(text) == 40);
    text[39] = -1;
    CHECK(found(text) == (has_window ? 0 : 32));
    text[15] = -1;
    CHECK(found(text) == 0);
    CHECK(found(count_up(120)) == 100);
    CHECK(found(count_up(100)) == 100);
    HeadPlan<float> other{shape, Int4::Config{}};
    CHECK(!prefixes.find(other, count_up(100)));
  }
}

TEST_CASE("32 texts over one prefix take one prefix and 32 tails") {
  const ModelShape large{2, 8, 4, 64};
  DuoConfig duo;
  duo.sinks = 16;
  duo.recent = 64;
  HeadPlan<float> windows{large, Int4::Config{.storage = {.bits = 4, .residual = 32}}};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t head = 0; head < 2; ++head)
      windows.set(layer, head, Window::Config{.sinks = 16, .recent = 64});
  }
  for (const HeadPlan<float>& plan : {HeadPlan<float>{large}, windows}) {
    test::CountingResource memory;
    const CacheOptions options{.memory = &memory};
    constexpr std::size_t length = 1000;
    constexpr std::size_t more = 20;
    PrefixCache<float> prefixes{options};
    const Tokens system = count_up(length);
    std::size_t prefix_bytes = 0;
    {
      auto cold = some_cache(plan, options, length);
      prefix_bytes = cold.bytes();
      CHECK(prefixes.keep(cold, system));
    }
    CHECK(memory.live_bytes() == prefixes.statistics().bytes);
    // What a text of its own takes, besides a page that is open in each head.
    const std::size_t tail = plan.memory(length + more, options).total() -
                             plan.memory(length, options).total() + some_cache(plan, options, 63).bytes();
    std::vector<KvCache<float>> texts;
    for (std::size_t i = 0; i < 32; ++i) {
      Tokens text = system;
      text.push_back(-1 - static_cast<std::int32_t>(i));
      auto found = prefixes.find(plan, text);
      REQUIRE(found);
      CHECK(found->tokens == length);
      test::Random random{i};
      test::feed(found->cache, random, {more});
      texts.push_back(std::move(found->cache));
    }
    CHECK(memory.live_bytes() <= prefix_bytes + prefix_bytes / 10 + 32 * tail);
    CHECK(prefixes.statistics().hits == 32);
    CHECK(prefixes.statistics().found_tokens == 32 * length);
  }
}

TEST_CASE("what is least recently used goes first, and only what frees memory") {
  test::CountingResource memory;
  const CacheOptions options{.page_rows = 16, .memory = &memory};
  const HeadPlan<float> plan{shape, Window::Config{.sinks = 0, .recent = 16}};
  PrefixCache<float> prefixes{options};
  std::vector<Tokens> texts;
  for (int i = 0; i < 5; ++i) {
    texts.push_back(count_up(40, 100 * i));
    CHECK(prefixes.keep(some_cache(plan, options, 40), texts.back()));
  }
  CHECK(!prefixes.keep(some_cache(plan, options, 40), texts[0]));  // is used now
  REQUIRE(prefixes.find(plan, texts[2]));
  auto in_use = prefixes.find(plan, texts[1]);
  REQUIRE(in_use);
  REQUIRE(prefixes.find(plan, texts[4]));
  // Used least recently: 3, 0, 2, 1, 4. A fork holds all full pages of 1, but not its open ones.
  const auto is_known = [&](int i) {
    return prefixes.find(plan, texts[static_cast<std::size_t>(i)]).has_value();
  };
  const std::size_t one = memory.live_bytes();
  const std::size_t freed = prefixes.evict(1);
  CHECK(freed > 0);
  CHECK(memory.live_bytes() == one - freed);
  std::vector<std::size_t> last_uses;
  for (const PrefixInfo& info : prefixes.list()) last_uses.push_back(info.last_use);
  CHECK(last_uses.size() == 4);
  CHECK(!is_known(3));
  CHECK(prefixes.evict(1) > 0);
  CHECK(!is_known(0));
  CHECK(is_known(2));
  const std::size_t before = memory.live_bytes();
  const std::size_t rest = prefixes.evict(memory.live_bytes());
  CHECK(memory.live_bytes() == before - rest);
  CHECK(prefixes.statistics().evicted == 5);
  CHECK(memory.live_bytes() == in_use->cache.bytes());
  in_use.reset();
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("a prefix whose pages are all in use elsewhere stays, because nothing would come free") {
  const CacheOptions options{.page_rows = 16};
  const HeadPlan<float> plan{shape};
  PrefixCache<float> prefixes{options};
  std::optional<KvCache<float>> running = some_cache(plan, options, 64);  // no page is open
  CHECK(prefixes.keep(*running, count_up(64)));
  CHECK(prefixes.evict(1000) == 0);
  CHECK(prefixes.list().front().freed_bytes == 0);
  CHECK(prefixes.statistics().prefixes == 1);
  running.reset();
  const std::size_t bytes = prefixes.statistics().bytes;
  CHECK(prefixes.list().front().freed_bytes == bytes);
  CHECK(prefixes.evict(1000) == bytes);
  CHECK(prefixes.statistics().prefixes == 0);
}

TEST_CASE("one prefix, or those of one plan, go by name") {
  const CacheOptions options{.page_rows = 16};
  const HeadPlan<float> plan{shape};
  const HeadPlan<float> other{shape, Window::Config{.sinks = 4, .recent = 30}};
  PrefixCache<float> prefixes{options};
  CHECK(prefixes.texts(plan).empty());
  const std::vector<Tokens> texts{count_up(40, 50), count_up(33, 7), count_up(50, 50)};
  for (const Tokens& text : texts) {
    CHECK(prefixes.keep(some_cache(plan, options, text.size()), text));
    CHECK(prefixes.keep(some_cache(other, options, text.size()), text));
  }
  // As `list` has them: ascending, and a text before those that begin with it.
  CHECK(prefixes.texts(plan) == std::vector<Tokens>{texts[1], texts[0], texts[2]});
  const PrefixInfo first = prefixes.list().front();
  CHECK(first.tokens == 33);
  const std::size_t bytes = prefixes.statistics().bytes;
  const std::size_t freed = prefixes.evict(first);
  CHECK(freed == first.freed_bytes);
  CHECK(freed > 0);
  CHECK(prefixes.statistics().bytes == bytes - freed);
  CHECK(prefixes.texts(plan) == std::vector<Tokens>{texts[0], texts[2]});
  CHECK(prefixes.texts(other).size() == 3);
  CHECK(prefixes.evict(first) == 0);  // it is gone
  const PrefixInfo used = prefixes.list().front();
  REQUIRE(prefixes.find(plan, texts[0]));
  CHECK(prefixes.evict(used) == 0);  // it was used since, so who chose it knew too little
  CHECK(prefixes.statistics().prefixes == 5);
  prefixes.clear(plan);
  CHECK(prefixes.texts(plan).empty());
  CHECK(prefixes.texts(other) == std::vector<Tokens>{texts[1], texts[0], texts[2]});
  prefixes.clear(plan);
  prefixes.clear(other);
  CHECK(prefixes.statistics().bytes == 0);
}

TEST_CASE("what a prefix cache holds counts each page once") {
  PagePool pool;
  const CacheOptions options{.page_rows = 16, .pool = &pool};
  HeadPlan<float> plan{shape};
  plan.set(0, 0, Window::Config{.sinks = 4, .recent = 30});
  PrefixCache<float> prefixes{options};
  {
    KvCache<float> cache{plan, options};
    test::Random random{1};
    for (std::size_t tokens = 10; tokens <= 200; tokens += 10) {
      test::feed(cache, random, {10});
      CHECK(prefixes.keep(cache, count_up(tokens)));
    }
    CHECK(prefixes.keep(some_cache(plan, options, 60, 2), count_up(60, 7)));
  }
  CHECK(prefixes.statistics().prefixes == 21);
  CHECK(prefixes.statistics().bytes == pool.live_bytes());
  while (prefixes.evict(1) > 0) CHECK(prefixes.statistics().bytes == pool.live_bytes());
  CHECK(pool.live_bytes() == 0);
}

TEST_CASE("a limit holds after every prefix, and one that is larger is not kept") {
  const CacheOptions options{.page_rows = 16};
  const HeadPlan<float> plan{shape};
  const std::size_t one = some_cache(plan, options, 48).bytes();
  PrefixCache<float> prefixes{options, {.max_bytes = 2 * one}};
  for (int i = 0; i < 5; ++i) {
    CHECK(prefixes.keep(some_cache(plan, options, 48), count_up(48, i)));
    CHECK(prefixes.statistics().bytes <= 2 * one);
  }
  CHECK(prefixes.statistics().prefixes == 2);
  CHECK(!prefixes.keep(some_cache(plan, options, 200), count_up(200, 9)));
  CHECK(prefixes.statistics().prefixes == 0);
}

TEST_CASE("what cannot be kept says so") {
  const CacheOptions options{.max_rollback = 8};
  HeadPlan<float> plan{shape};
  PrefixCache<float> prefixes{options};
  const auto refused = [&]<class Error>(const KvCache<float>& cache, const Tokens& tokens, const char* part) {
    CHECK(contains(thrown<Error>([&] { static_cast<void>(prefixes.keep(cache, tokens)); }), part));
    CHECK(prefixes.statistics().prefixes == 0);
  };
  refused.operator()<ConfigError>(some_cache(plan, {}, 10), count_up(10), "other options");
  refused.operator()<ShapeError>(some_cache(plan, options, 10), count_up(11),
                                 "has read 10 tokens, and 11 are given");
  refused.operator()<ShapeError>(KvCache<float>{plan, options}, {}, "at least one");

  auto cache = some_cache(plan, options, 10);
  test::Random random{2};
  test::Chunk<float> chunk{random, shape, 3};
  chunk.step(cache, 0);
  refused.operator()<RollbackError>(cache, count_up(10), "tokens");
  cache.truncate(10);
  const TokenTree tree = test::random_tree(random, 2);
  test::Chunk<float> guesses{random, shape, 2};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    AttendOptions call;
    call.tree = &tree;
    guesses.step(cache, layer, call);
  }
  refused.operator()<RollbackError>(cache, count_up(12), "PrefixCache::keep: a tree of 2 nodes waits");

  plan.set(1, 0,
           HeadBudgetCache<DenseStorage<float>>::Config{.budget = 4, .scorer = {.observation_window = 2}});
  auto asked = some_cache(plan, options, 20);
  asked.compress();
  refused.operator()<ConfigError>(asked, count_up(20), "KV head 0 of layer 1 has kept ");
  CHECK(prefixes.keep(some_cache(plan, options, 20), count_up(20)));

  plan.set(1, 0, HeadBudgetCache<DenseStorage<float>, KeyNormScorer>::Config{.budget = 4});
  auto by_key = some_cache(plan, options, 20);
  by_key.compress();
  CHECK(prefixes.keep(by_key, count_up(20)));
  CHECK(thrown<ConfigError>([] { PrefixCache<float>{CacheOptions{.max_append = 0}}; }) != "");
}

TEST_CASE("without memory a prefix cache stays as it was") {
  test::CountingResource memory;
  const CacheOptions options{.page_rows = 16, .memory = &memory};
  const HeadPlan<float> plan{shape};
  PrefixCache<float> prefixes{options};
  CHECK(prefixes.keep(some_cache(plan, options, 30), count_up(30)));
  const auto cache = some_cache(plan, options, 50);
  const PrefixStatistics before = prefixes.statistics();
  std::size_t failures = 0;
  for (std::size_t successes = 0;; ++successes, ++failures) {
    memory.fail_after(successes);
    try {
      const bool is_new = prefixes.keep(cache, count_up(50));
      CHECK(is_new);
      break;
    } catch (const std::bad_alloc&) {
      REQUIRE(prefixes.statistics().bytes == before.bytes);
      REQUIRE(prefixes.statistics().prefixes == 1);
    }
  }
  CHECK(failures > 2);
  failures = 0;
  for (std::size_t successes = 0;; ++successes, ++failures) {
    memory.fail_after(successes);
    try {
      const auto found = prefixes.find(plan, count_up(60));
      CHECK(found.has_value());
      break;
    } catch (const std::bad_alloc&) {
    }
  }
  CHECK(failures > 2);
}
