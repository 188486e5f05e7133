// SPDX-License-Identifier: Apache-2.0
//
// A provider or a `new` fails at every point of a sequence of operations: the pool is unchanged, and can
// still be used.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <map>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>

#include "support/failing_new.hpp"
#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

struct State {
  std::map<PageId, std::byte> first_bytes;
  std::size_t live, obtained, asked;
  friend bool operator==(const State&, const State&) = default;
};

State state_of(const PagePool& pool, const std::vector<PageId>& pages, const test::CountingResource& memory) {
  State state{{}, pool.live_bytes(), pool.obtained_bytes(), memory.live_bytes()};
  for (const PageId page : pages) state.first_bytes[page] = *pool.address(page);
  return state;
}

// Allocates `count` pages of `bytes` while `fail(n)` makes the n-th attempt of some operation fail, for n =
// 0, 1, ... until nothing fails. Returns the number of failures.
template <class Fail>
std::size_t allocate_until_it_works(PagePool& pool, std::vector<PageId>& pages, std::size_t bytes,
                                    std::size_t count, const test::CountingResource& memory, Fail fail) {
  for (std::size_t failures = 0;; ++failures) {
    std::vector<PageId> more(count, 0);
    const State before = state_of(pool, pages, memory);
    bool failed = false;
    fail(failures, [&] {
      try {
        pool.allocate(bytes, more);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    });
    if (failed) {
      REQUIRE(state_of(pool, pages, memory) == before);
      REQUIRE(more == std::vector<PageId>(count, no_page));
      continue;
    }
    for (const PageId page : more) {
      *pool.address(page) = static_cast<std::byte>(pages.size());
      pages.push_back(page);
    }
    return failures;
  }
}

}  // namespace

TEST_CASE("a failed allocation of memory leaves the pool unchanged") {
  test::Random random{5};
  for (const std::size_t max_slab_bytes : {0U, 3000U, 65536U}) {
    CAPTURE(max_slab_bytes);
    test::CountingResource memory;
    PagePool pool{&memory, {.max_slab_bytes = max_slab_bytes}};
    std::vector<PageId> pages;
    std::size_t failures = 0;
    for (int i = 0; i < 60; ++i) {
      const std::size_t bytes = 64 * (1 + test::below(random, 20));
      failures += allocate_until_it_works(pool, pages, bytes, 1 + test::below(random, 50), memory,
                                          [&](std::size_t n, const auto& allocate) {
                                            memory.fail_after(n);
                                            allocate();
                                            memory.fail_after(test::never);
                                          });
      while (pages.size() > 300) {
        pool.release(pages.back());
        pages.pop_back();
      }
    }
    CHECK(failures > 60);
    for (const PageId page : pages) pool.release(page);
    CHECK(memory.live_bytes() == 0);
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("a failed allocation of bookkeeping leaves the pool unchanged") {
  test::CountingResource memory;
  ResourceProvider provider{&memory};
  const std::array<PageProvider*, 1> providers{&provider};
  PagePool pool{providers};
  std::vector<PageId> pages;
  std::size_t failures = 0;
  for (std::size_t bytes = 64; bytes < 64 * 40; bytes += 64) {  // many sizes need many slabs
    failures +=
        allocate_until_it_works(pool, pages, bytes, 20, memory, [&](std::size_t n, const auto& allocate) {
          const test::FailNew fail{n};
          allocate();
        });
  }
  CHECK(failures > 20);
  for (const PageId page : pages) pool.release(page);
  CHECK(memory.live_bytes() == 0);
}

TEST_CASE("a failed construction of a pool leaks nothing") {
  std::vector<std::byte> arena(1 << 16);
  const EnginePages engine =
      flashinfer_hnd(arena, {.blocks = 32, .block_size = 4, .kv_heads = 4, .row_bytes = 64});
  const std::size_t news = test::live_news;
  for (std::size_t n = 0;; ++n) {
    const test::FailNew fail{n};
    bool failed = false;
    try {
      const PagePool pool{engine};
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    CHECK(test::live_news == news);
    if (!failed) break;
  }
}
