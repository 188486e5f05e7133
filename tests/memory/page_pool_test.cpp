// SPDX-License-Identifier: Apache-2.0
//
// Tests one pool by hand: ids, owners, slabs, tiers, and refused calls.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>

#include "support/memory.hpp"

using namespace kvpolicy;

namespace {

// A slow tier that records the calls it gets.
class RecordingProvider final : public PageProvider {
 public:
  [[nodiscard]] std::byte* obtain(std::size_t bytes) override {
    return static_cast<std::byte*>(memory.allocate(bytes, page_alignment));
  }
  void give_back(std::byte* start, std::size_t bytes) noexcept override {
    memory.deallocate(start, bytes, page_alignment);
  }
  void fetch(std::span<const Range> ranges) override { fetched += ranges.size(); }

  test::CountingResource memory;
  std::size_t fetched = 0;
};

}  // namespace

TEST_CASE("pages are aligned, disjoint, and as large as requested") {
  test::CountingResource memory;
  {
    PagePool pool{&memory};
    std::vector<PageId> pages;
    for (const std::size_t bytes : {1U, 63U, 64U, 65U, 1000U, 4096U, 65536U, 65537U, 1U << 20}) {
      for (int i = 0; i < 40; ++i) {
        pages.push_back(pool.allocate(bytes));
        CHECK(pool.bytes(pages.back()) == bytes);
        CHECK(reinterpret_cast<std::uintptr_t>(pool.address(pages.back())) % 64 == 0);
        std::memset(pool.address(pages.back()), static_cast<int>(pages.size() % 251), bytes);
      }
    }
    CHECK(std::set<PageId>(pages.begin(), pages.end()).size() == pages.size());
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const auto wanted = static_cast<std::byte>((i + 1) % 251);
      const std::span page{pool.address(pages[i]), pool.bytes(pages[i])};
      CHECK(std::ranges::all_of(page, [&](std::byte found) { return found == wanted; }));
    }
    for (const PageId page : pages) pool.release(page);
    CHECK(pool.live_bytes() == 0);
    CHECK(memory.live_bytes() == 0);
  }
  CHECK(memory.faults() == 0);
}

TEST_CASE("a page is free after its last owner") {
  test::CountingResource memory;
  PagePool pool{&memory};
  const PageId page = pool.allocate(100);
  CHECK_FALSE(pool.is_shared(page));
  pool.retain(page);
  pool.retain(page);
  CHECK(pool.is_shared(page));
  CHECK(pool.live_bytes() == 100);
  pool.release(page);
  CHECK(pool.is_shared(page));
  pool.release(page);
  CHECK_FALSE(pool.is_shared(page));
  CHECK(memory.live_bytes() == 100);
  pool.release(page);
  CHECK(memory.live_bytes() == 0);
  CHECK(pool.allocate(100) == page);
}

TEST_CASE("many pages at once cost few allocations, and single ones few once there are many") {
  test::CountingResource memory;
  PagePool pool{&memory};
  std::vector<PageId> pages(160);
  pool.allocate(1024, pages);
  CHECK(memory.allocations() == 10);
  CHECK(memory.live_bytes() == pages.size() * 1024);
  CHECK(std::set<PageId>(pages.begin(), pages.end()).size() == pages.size());
  for (int i = 0; i < 1600; ++i) pages.push_back(pool.allocate(1024));
  CHECK(memory.allocations() < 10 + 1600 / 8);
  CHECK(pool.obtained_bytes() == memory.live_bytes());
  CHECK(pool.live_bytes() == pages.size() * 1024);
  CHECK(pool.obtained_bytes() <= pool.live_bytes() + pool.live_bytes() / 16);
  for (const PageId page : pages) pool.release(page);
  CHECK(memory.live_bytes() == 0);
}

TEST_CASE("with slabs of 0 bytes each page is an allocation of its own") {
  test::CountingResource memory;
  PagePool pool{&memory, {.max_slab_bytes = 0}};
  std::vector<PageId> pages(100);
  pool.allocate(1000, pages);
  CHECK(memory.allocations() == 100);
  for (std::size_t left = pages.size(); left > 0; --left) {
    CHECK(memory.live_bytes() == left * 1000);
    pool.release(pages[left - 1]);
  }
  CHECK(memory.live_bytes() == 0);
}

TEST_CASE("memory and bookkeeping of released pages serve pages of another size") {
  test::CountingResource memory;
  PagePool pool{&memory};
  std::size_t overhead = 0;
  for (std::size_t bytes = 64; bytes < 64 * 200; bytes += 64) {
    std::vector<PageId> pages(100);
    pool.allocate(bytes, pages);
    for (const PageId page : pages) pool.release(page);
    if (bytes == 64) overhead = pool.overhead_bytes();
    CHECK(memory.live_bytes() == 0);
    if (bytes <= 4096) CHECK(pool.overhead_bytes() == overhead);
  }
}

TEST_CASE("bookkeeping is small, per page and for a pool with a few pages") {
  PagePool pool;
  CHECK(pool.overhead_bytes() < 1024);
  std::vector<PageId> pages(16384);
  pool.allocate(256, pages);
  CHECK(pool.overhead_bytes() < 16 * pages.size());  // a chunk may be half empty
  for (const PageId page : pages) pool.release(page);
}

TEST_CASE("a destroyed pool returns all memory") {
  test::CountingResource memory;
  {
    PagePool pool{&memory};
    for (int i = 0; i < 100; ++i) CHECK(pool.allocate(100) >= 0);
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("a tier is a provider: pages move to a slow one by its own call") {
  RecordingProvider fast, slow;
  const std::array<PageProvider*, 2> providers{&fast, &slow};
  PagePool pool{providers};
  CHECK(pool.tiers() == 2);
  const PageId page = pool.allocate(300);
  const PageId there = pool.allocate(300, 1);
  CHECK(pool.tier(page) == 0);
  CHECK(pool.tier(there) == 1);
  CHECK(pool.provider(pool.tier(there)) == &slow);
  CHECK(fast.memory.live_bytes() == 300);
  CHECK(slow.memory.live_bytes() == 300);
  std::memset(pool.address(page), 7, 300);
  const PageProvider::Copy copy{pool.address(there), pool.address(page), 300};
  pool.provider(1)->write({&copy, 1});
  pool.release(page);
  CHECK(fast.memory.live_bytes() == 0);
  CHECK(pool.live_bytes(0) == 0);
  CHECK(pool.live_bytes(1) == 300);
  const PageProvider::Range range{pool.address(there), 300};
  pool.provider(1)->fetch({&range, 1});
  CHECK(slow.fetched == 1);
  CHECK(std::ranges::all_of(range, [](std::byte found) { return found == std::byte{7}; }));
  pool.release(there);
  CHECK(slow.memory.live_bytes() == 0);
}

TEST_CASE("consolidation moves pages of one owner until little is idle, and keeps their contents") {
  test::CountingResource memory;
  PagePool pool{&memory};
  std::vector<PageId> all(1600);
  pool.allocate(1024, all);
  std::vector<PageId> kept;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % 16 != 3) {
      pool.release(all[i]);
    } else {
      std::memset(pool.address(all[i]), static_cast<int>(kept.size()), 1024);
      kept.push_back(all[i]);
    }
  }
  CHECK(memory.live_bytes() == 1600 * 1024);  // each slab has one page left
  pool.retain(kept[5]);
  const PageId shared = kept[5];
  CHECK(pool.consolidate(kept) > 80);
  CHECK(kept[5] == shared);
  CHECK(pool.live_bytes() == 100 * 1024);
  CHECK(memory.live_bytes() <= (100 + 2 * 16) * 1024);  // one more slab for the shared page
  for (std::size_t i = 0; i < kept.size(); ++i) {
    CHECK(*pool.address(kept[i]) == static_cast<std::byte>(i));
    CHECK(*(pool.address(kept[i]) + 1023) == static_cast<std::byte>(i));
  }
  pool.release(shared);
  pool.consolidate(kept);
  CHECK(memory.live_bytes() <= 7 * 16 * 1024);
  CHECK(pool.consolidate(kept) == 0);
  for (const PageId page : kept) pool.release(page);
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("pages move to a slab that is only as full as their own") {
  for (const std::size_t own : {0U, 1U}) {
    PagePool pool;
    std::vector<PageId> pages(32);
    pool.allocate(1024, pages);
    for (const std::size_t slab : {0U, 16U}) {
      for (std::size_t i = 8; i < 16; ++i) pool.release(pages[slab + i]);
    }
    CHECK(pool.consolidate(std::span{pages}.subspan(own * 16, 8)) == 8);
    CHECK(pool.obtained_bytes() == 16 * 1024);
  }
}

TEST_CASE("no page moves while little is idle") {
  PagePool pool;
  std::vector<PageId> pages(160);
  pool.allocate(1024, pages);
  pool.release(pages[5]);
  pool.release(pages[100]);
  pages.erase(pages.begin() + 100);
  pages.erase(pages.begin() + 5);
  CHECK(pool.consolidate(pages) == 0);
  for (const PageId page : pages) pool.release(page);
}

TEST_CASE("calls that a pool refuses") {
  PagePool pool;
  CHECK_THROWS_WITH_AS(static_cast<void>(pool.allocate(0)),
                       "PagePool: a page of 0 bytes was asked for, must be at least 1", ConfigError);
  CHECK_THROWS_WITH_AS(static_cast<void>(pool.allocate(64, std::size_t{1})),
                       "PagePool: there is no tier 1, must be below 1", ConfigError);
  CHECK_THROWS_AS(static_cast<void>(pool.allocate(test::never)), std::bad_alloc);
  CHECK_THROWS_AS(static_cast<void>(pool.claim(0)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(pool.engine_page(0, 0, 0)), ShapeError);
  CHECK_THROWS_AS(PagePool(static_cast<std::pmr::memory_resource*>(nullptr)), ConfigError);
  CHECK_THROWS_AS(PagePool(std::span<PageProvider* const>{}), ConfigError);
  const std::array<PageProvider*, 1> none{nullptr};
  CHECK_THROWS_WITH_AS(PagePool{none}, "PagePool: the provider of tier 0 is null, must be a provider",
                       ConfigError);
  std::vector<PageId> no_pages;
  pool.allocate(64, no_pages);
  CHECK(pool.obtained_bytes() == 0);
}
