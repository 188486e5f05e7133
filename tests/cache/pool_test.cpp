// SPDX-License-Identifier: Apache-2.0
//
// Caches over a pool that their options name: they give the results of caches with a pool of their own, share
// it with other caches, and return all its pages.
#include <doctest/doctest.h>

#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/dump.hpp"
#include "cache/random_operations.hpp"
#include "support/slow_memory.hpp"

using namespace kvpolicy;

namespace {

using Plan = HeadPlan<float>;
using Cache = KvCache<float>;
constexpr std::size_t kv_heads = 14;
constexpr ModelShape shape{.layers = 2, .q_heads = kv_heads, .kv_heads = kv_heads, .head_dim = 64};

Plan every_head() { return test::plan_of<float>(shape, test::some_heads(0, shape.kv_head_count(), false)); }

void same_step(Cache& a, Cache& b, test::Random& random, std::size_t tokens,
               const AttendOptions& options = {}) {
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    test::Chunk<> chunk{random, shape, tokens};
    test::Chunk<> other = chunk;
    chunk.step(a, layer, options);
    other.step(b, layer, options);
    REQUIRE(test::same_bits(chunk.out.numbers(), other.out.numbers()));
  }
}

}  // namespace

TEST_CASE("caches that share a pool give the results of caches with a pool of their own") {
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  ResourceProvider fast{&memory};
  for (const std::size_t slab : {std::size_t{0}, std::size_t{64} << 10}) {
    for (const bool is_slow : {false, true}) {
      CAPTURE(slab);
      CAPTURE(is_slow);
      const std::vector<PageProvider*> tiers{&fast, &slow};
      PagePool pool{std::span{tiers}.first(is_slow ? 2 : 1), {.max_slab_bytes = slab}};
      test::CountingResource own_memory;  // for everything besides pages
      {
        const CacheOptions options{.max_rollback = 3, .page_rows = 16, .memory = &own_memory, .pool = &pool};
        Cache first{every_head(), options}, second{every_head(), options};
        Cache control{every_head(), {.max_rollback = 3, .page_rows = 16}};
        test::Random random{5};
        test::Random control_random{6};
        test::feed(second, control_random, {90});
        std::optional<Cache> fork;
        for (std::size_t i = 0; i < 24; ++i) {
          same_step(first, control, random, 1 + i * 7 % 23,
                    {.read = i % 3 == 0 ? Read::selected : Read::all, .refresh_selection = i % 5 == 0});
          if (i == 10) fork = first.fork();
          if (i == 15) second = std::move(*fork);
          if (i == 20) fork = first.fork_as(every_head());
          const std::size_t fixed = own_memory.live_bytes();
          const std::size_t live = pool.live_bytes() + (is_slow ? pool.live_bytes(1) : 0);
          if (slab == 0) CHECK(memory.live_bytes() == pool.live_bytes());
          CHECK(memory.live_bytes() == pool.obtained_bytes());
          if (i < 10) CHECK(live + fixed == first.bytes() + second.bytes());
          if (is_slow) CHECK(pool.live_bytes(1) >= first.slow_bytes());
        }
        if (is_slow) CHECK(first.slow_bytes() > 0);
        CHECK(test::dump(first, false) == test::dump(control, false));
      }
      CHECK(pool.live_bytes() == 0);
      CHECK(own_memory.live_blocks() == 0);
      CHECK(memory.live_blocks() + slow.live_blocks() == 0);
    }
  }
}

TEST_CASE("a cache may outlive the cache whose pool it shares") {
  test::CountingResource memory;
  {
    std::optional<Cache> last, other;
    {
      Cache first{every_head(), {.memory = &memory}};
      test::Random random{1};
      test::feed(first, random, {100});
      Cache fork = first.fork();
      last = std::move(fork);
      fork = first.fork_as(every_head());
      other = first.fork_as(every_head());
      first = Cache{every_head(), {.memory = &memory}};  // has a pool of its own
    }
    test::Random random{2}, same_random{2};
    test::feed(*last, random, {100, 1});
    test::feed(*other, same_random, {100, 1});
    CHECK(test::dump(*last, false) == test::dump(*other, false));
    *last = Cache{every_head(), {.memory = &memory}};
    test::feed(*other, random, {40});
    CHECK(memory.live_bytes() == last->bytes() + other->bytes());
  }
  CHECK(memory.live_blocks() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("a pool together with slow memory is refused") {
  PagePool pool;
  test::FailingSlowMemory slow;
  const CacheOptions options{.slow_memory = &slow, .pool = &pool};
  CHECK_THROWS_AS((Cache{every_head(), options}), ConfigError);
}
