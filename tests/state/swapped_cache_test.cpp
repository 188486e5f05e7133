// SPDX-License-Identifier: Apache-2.0
//
// A sequence that was moved out and came back goes on as if nothing had happened, and takes no fast memory
// meanwhile.
#include <doctest/doctest.h>

#include <cstddef>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cache/swapped_cache.hpp>
#include <kvpolicy/storage/engine_page_storage.hpp>

#include "state/twins.hpp"
#include "support/engine_memory.hpp"
#include "support/memory.hpp"

#ifdef __linux__
#include <kvpolicy/offload/file_resource.hpp>
#include "support/temporary_folder.hpp"
#endif

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

template <Element E>
void any_plans(std::uint64_t seed, PagePool& elsewhere, std::pmr::memory_resource* slow,
               std::size_t operations) {
  struct Case {
    std::size_t layers, kv_heads, group, max_rollback, max_append, page_rows, kept_queries;
  };
  const std::vector<Case> cases{
      {1, 16, 1, 0, 1, 32, 0}, {2, 6, 2, 0, 20, 64, 0}, {1, 14, 1, 7, 3, 32, 5}, {2, 5, 3, 40, 1, 64, 0}};
  for (const Case& one : cases) {
    test::RandomRun run{{one.layers, one.kv_heads * one.group, one.kv_heads, 64}, {}, false, &elsewhere};
    run.options.max_rollback = one.max_rollback;
    run.options.max_append = one.max_append;
    run.options.page_rows = one.page_rows;
    run.options.kept_queries = one.kept_queries;
    run.options.slow_memory = slow;
    ++seed;
    testing::Random random{static_cast<unsigned>(seed)};
    const auto plan = test::random_saved_plan<E>(run.shape, random, one.max_rollback > 0);
    test::random_twins(seed, plan, run, operations);
  }
}

}  // namespace

TEST_CASE("a cache that is moved out and back in between continues like one that is not") {
  test::CountingResource memory;
  {
    PagePool elsewhere{&memory};
    any_plans<float>(50, elsewhere, nullptr, 60);
    any_plans<bfloat16>(60, elsewhere, nullptr, 25);
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("rows in slow memory stay there") {
  test::CountingResource slow;
  std::pmr::unsynchronized_pool_resource memory;
  PagePool elsewhere{&memory};
  any_plans<float>(70, elsewhere, &slow, 60);
  CHECK(slow.faults() == 0);
}

#ifdef __linux__
TEST_CASE("a sequence waits in a file") {
  const testing::TemporaryFolder folder;
  offload::FileResource file{{.folder = folder.path(), .max_bytes = std::size_t{1} << 30}};
  PageProvider* providers[] = {&file};
  PagePool elsewhere{providers};
  any_plans<bfloat16>(80, elsewhere, nullptr, 20);
}
#endif

TEST_CASE("a waiting sequence takes no fast memory but its tables, and shares no page") {
  test::CountingResource fast;
  test::CountingResource other;
  PagePool elsewhere{&other, {.max_slab_bytes = 0}};
  CacheOptions options{.max_rollback = 4, .max_append = 8, .memory = &fast};
  test::Random random{1};
  auto cache = std::make_optional<test::SmallCache>(test::small_plan(), options);
  test::feed(*cache, random, {70, 30});
  const std::size_t alone = fast.live_bytes();
  REQUIRE(alone == cache->bytes());
  auto fork = cache->fork();
  const auto expected = test::dump(*cache);

  SwappedCache waiting{std::move(*cache), elsewhere};
  cache.reset();
  CHECK(fast.live_bytes() == fork.bytes());  // the fork's own rows, and nothing else
  CHECK(fork.shared_bytes() == 0);
  CHECK(other.live_bytes() == waiting.bytes());
  CHECK(waiting.fast_bytes() == alone);
  CHECK(test::dump(fork) == expected);

  SwappedCache moved = std::move(waiting);
  cache = moved.swap_in();
  CHECK(test::dump(*cache) == expected);
  CHECK(cache->shared_bytes() == 0);
  CHECK(other.live_bytes() == 0);
  CHECK(moved.bytes() == 0);
  CHECK(moved.fast_bytes() == 0);
}

TEST_CASE("a sequence that never comes back gives all its memory back") {
  test::CountingResource fast;
  test::CountingResource other;
  {
    PagePool elsewhere{&other};
    test::SmallCache cache{test::small_plan(), {.memory = &fast}};
    test::Random random{2};
    test::feed(cache, random, {50});
    SwappedCache waiting{std::move(cache), elsewhere};
    waiting = SwappedCache{test::SmallCache{test::small_plan(), {.memory = &fast}}, elsewhere};
    CHECK(waiting.tokens() == 0);
  }
  CHECK(fast.live_bytes() == 0);
  CHECK(other.live_bytes() == 0);
  CHECK(fast.faults() + other.faults() == 0);
}

TEST_CASE("without room, out or back, everything stays as it was") {
  test::CountingResource fast;
  test::CountingResource other;
  PagePool elsewhere{&other};
  test::SmallCache cache{test::small_plan(), {.max_rollback = 3, .memory = &fast}};
  test::Random random{3};
  test::feed(cache, random, {90});
  const auto expected = test::dump(cache);
  std::optional<SwappedCache<float16>> waiting;
  std::size_t failures = 0;
  for (std::size_t successes = 0; !waiting; ++successes) {
    other.fail_after(successes);
    try {
      waiting.emplace(std::move(cache), elsewhere);
    } catch (const std::bad_alloc&) {
      ++failures;
      REQUIRE(test::dump(cache) == expected);
      REQUIRE(elsewhere.live_bytes() == 0);
    }
  }
  CHECK(failures > 3);
  other.fail_after(test::never);
  failures = 0;
  std::optional<test::SmallCache> back;
  for (std::size_t successes = 0; !back; ++successes) {
    fast.fail_after(successes);
    try {
      back = waiting->swap_in();
    } catch (const std::bad_alloc&) {
      ++failures;
      REQUIRE(fast.live_bytes() == 0);
    }
  }
  CHECK(failures > 10);
  fast.fail_after(test::never);
  CHECK(test::dump(*back) == expected);
  CHECK(fast.faults() + other.faults() == 0);
}

TEST_CASE("what cannot be moved says so and stays") {
  PagePool elsewhere;
  {
    test::EngineMemory<float> engine{test::EngineLayout::vllm_nhd};
    PagePool pool{engine.pages()};
    HeadPlan<float> plan{{1, 1, 1, 64}, FullCache<EnginePageStorage<float>>::Config{}};
    KvCache<float> cache{plan, {.page_rows = 16, .pool = &pool}};
    test::Random random{4};
    test::feed(cache, random, {20});
    CHECK(contains(thrown<ConfigError>([&] { SwappedCache waiting{std::move(cache), elsewhere}; }),
                   "an inference engine's memory"));
    CHECK(cache.tokens() == 20);
    KvCache<float> other{HeadPlan<float>{{1, 1, 1, 64}}};
    CHECK(contains(thrown<ConfigError>([&] { SwappedCache waiting{std::move(other), pool}; }),
                   "the other pool is an inference engine's memory"));
  }
  PagePool own;
  KvCache<float> cache{HeadPlan<float>{{1, 1, 1, 64}}, {.pool = &own}};
  CHECK(contains(thrown<ConfigError>([&] { SwappedCache waiting{std::move(cache), own}; }), "already"));
  KvCache<float> gone = std::move(cache);
  CHECK(contains(thrown<ConfigError>([&] { SwappedCache waiting{std::move(cache), elsewhere}; }),
                 "moved from"));
  // Also where the cache had a pool of its own.
  KvCache<float> alone{HeadPlan<float>{{1, 1, 1, 64}}};
  SwappedCache away{std::move(alone), elsewhere};
  CHECK(contains(thrown<ConfigError>([&] { SwappedCache waiting{std::move(alone), elsewhere}; }),
                 "moved from"));
  alone = away.swap_in();
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(away.swap_in()); }), "moved from"));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(away.tokens()); }), "moved from"));
}
