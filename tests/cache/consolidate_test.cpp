// SPDX-License-Identifier: Apache-2.0
//
// Idle memory of a pool that many short texts share goes back when their caches let their pages move, and no
// cache reads other rows afterwards.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cache/consolidate.hpp>
#include <kvpolicy/kvpolicy.hpp>

#include "cache/dump.hpp"
#include "cache/random_operations.hpp"

using namespace kvpolicy;

namespace {

using Plan = HeadPlan<float>;
using Cache = KvCache<float>;
constexpr std::size_t kv_heads = 14;
constexpr ModelShape shape{.layers = 1, .q_heads = kv_heads, .kv_heads = kv_heads, .head_dim = 64};

Plan every_head() { return test::plan_of<float>(shape, test::some_heads(0, shape.kv_head_count(), false)); }

// The same text, in a cache over the pool and in one that has its pages for itself.
struct Text {
  Cache cache, control;
  Text(PagePool& pool, std::uint64_t seed, std::size_t tokens)
      : cache{every_head(), {.max_rollback = 3, .page_rows = 16, .pool = &pool}},
        control{every_head(), {.max_rollback = 3, .page_rows = 16}} {
    test::Random random{seed}, same{seed};
    test::feed(cache, random, {tokens});
    test::feed(control, same, {tokens});
  }
  void check_that_they_agree(test::Random& random) {
    test::Chunk<> chunk{random, shape, 3};
    test::Chunk<> other = chunk;
    chunk.step(cache, 0, {});
    other.step(control, 0, {});
    CHECK(test::same_bits(chunk.out.numbers(), other.out.numbers()));
    CHECK(test::dump(cache, false) == test::dump(control, false));
  }
};

}  // namespace

TEST_CASE("half of many short texts end: the others let their pages move, and idle memory goes back") {
  PagePool pool;
  std::vector<std::unique_ptr<Text>> texts;
  for (std::uint64_t seed = 0; seed < 160; ++seed) {
    texts.push_back(std::make_unique<Text>(pool, seed, 20 + 7 * seed % 41));
  }
  // Which texts end has nothing to do with the order in which they came.
  test::Random random{1};
  std::vector<std::unique_ptr<Text>> running;
  for (auto& text : texts) {
    if (test::below(random, 2) == 0) running.push_back(std::move(text));
  }
  texts.clear();
  const std::size_t live = pool.live_bytes();
  const auto idle = [&] { return pool.obtained_bytes() - pool.live_bytes(); };
  CHECK(idle() > live / 4);

  std::size_t moved = 0;
  for (auto& text : running) moved += consolidate(text->cache);
  CHECK(moved > 0);
  CHECK(pool.live_bytes() == live);
  CHECK(idle() <= live / 10);
  for (auto& text : running) CHECK(consolidate(text->cache) == 0);
  for (auto& text : running) text->check_that_they_agree(random);
  for (auto& text : running) text->cache.truncate(text->cache.tokens() - 2);
  running.clear();
  CHECK(pool.live_bytes() == 0);
  CHECK(pool.obtained_bytes() == 0);
}

TEST_CASE("pages that a fork shares stay where they are, and the fork reads them") {
  PagePool pool;
  Text text{pool, 3, 200};
  std::optional<Cache> fork = text.cache.fork();
  const auto before = test::dump(*fork, false);
  {
    // Leaves every slab with idle pages.
    std::vector<PageId> pages(400);
    for (const std::size_t bytes : {std::size_t{4096}, std::size_t{2048}}) {
      pool.allocate(bytes, pages);
      for (std::size_t i = 0; i < pages.size(); ++i) {
        if (i % 16 != 3) pool.release(pages[i]);
      }
    }
  }
  static_cast<void>(consolidate(text.cache));
  CHECK(test::dump(*fork, false) == before);
  test::Random random{4};
  text.check_that_they_agree(random);
  CHECK(test::dump(*fork, false) == before);
}

TEST_CASE("a pool that keeps no page idle has nothing to move") {
  PagePool pool{std::pmr::get_default_resource(), {.max_slab_bytes = 0}};
  Text text{pool, 5, 100};
  CHECK(consolidate(text.cache) == 0);
}
