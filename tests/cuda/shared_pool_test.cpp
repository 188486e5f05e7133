// SPDX-License-Identifier: Apache-2.0
//
// Device caches that share a pool of pages, over device memory alone or with slow memory as its second tier.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using E = float16;
using Cache = gpu::KvCache<E>;

// A pool over device memory and, if asked for, memory of the host that is pinned.
template <bool Slow>
struct Pool {
  test::CountingDeviceMemory fast_memory;
  gpu::PinnedMemory pinned;
  test::CountingDeviceMemory slow_memory{&pinned};
  gpu::DeviceProvider fast{&fast_memory}, slow{&slow_memory};
  std::array<PageProvider*, 2> tiers{&fast, &slow};
  PagePool pages{std::span{tiers}.first(Slow ? 2 : 1)};

  [[nodiscard]] std::size_t live_bytes() const {
    return pages.live_bytes() + (Slow ? pages.live_bytes(1) : 0);
  }
  [[nodiscard]] std::size_t obtained_bytes() const {
    return fast_memory.live_bytes() + slow_memory.live_bytes();
  }
};

// As tests/cache/sequence.hpp drives a cache.
template <bool Slow>
struct PoolMemory : test::CountingDeviceMemory {
  Pool<Slow> from;
  PagePool& pool = from.pages;

  [[nodiscard]] std::size_t live_bytes() const {
    return CountingDeviceMemory::live_bytes() + from.live_bytes();
  }
  [[nodiscard]] std::size_t live_blocks() const {
    return CountingDeviceMemory::live_blocks() + from.fast_memory.live_blocks() +
           from.slow_memory.live_blocks();
  }
  [[nodiscard]] std::size_t faults() const {
    return CountingDeviceMemory::faults() + from.fast_memory.faults() + from.slow_memory.faults();
  }
};

template <kvpolicy::Element T, bool Slow>
struct PoolBackend : test::DeviceBackend<T> {
  using Memory = PoolMemory<Slow>;
};

}  // namespace

TEST_CASE("random operations with pages of a shared pool: every policy does what its model says") {
  test::random_device_sequences<E, PoolBackend<E, false>>(test::more_seeds(8), 25);
}

TEST_CASE("random operations with a pool whose second tier is slow memory") {
  test::random_device_sequences<test::OtherElement, PoolBackend<test::OtherElement, true>>(
      test::more_seeds(9), 25);
}

TEST_CASE("caches in a shared pool give what caches by themselves give, and leave their pages to others") {
  const test::SmallDevice small;
  const ModelShape shape{2, 16, 8, 64};
  const HeadPlan<E> plan = test::mixed_device_plan(shape);
  Pool<true> pool;
  const gpu::CacheOptions options{.max_rollback = 3, .pool = &pool.pages, .latest_rows = 64};
  gpu::CacheOptions alone = options;
  gpu::PinnedMemory pinned;
  alone.pool = nullptr;
  alone.slow_memory = &pinned;
  {
    Cache control{plan, alone};
    test::feed_device(control, 1, {300, 1, 1, 40, 5});
    std::vector<Cache> caches;
    for (int i = 0; i < 3; ++i) test::feed_device(caches.emplace_back(plan, options), 1, {300, 1, 1, 40, 5});
    std::size_t bytes = 0, slow = 0;
    for (const Cache& cache : caches) {
      CHECK(test::dump_device(cache, false) == test::dump_device(control, false));
      for (std::size_t l = 0; l < 2; ++l) {
        for (std::size_t h = 0; h < 8; ++h) {
          for (const PageId page : cache.page_ids(l, h)) CHECK(!pool.pages.is_shared(page));
        }
      }
      slow += cache.slow_bytes();
      bytes += cache.bytes();
    }
    CHECK(slow > 0);
    CHECK(pool.pages.live_bytes(1) == slow);
    CHECK(pool.live_bytes() < bytes);  // what lies near of slow rows, and kept queries, are no pages
    const std::size_t live = pool.live_bytes();
    {
      const Cache fork = caches[1].fork();
      std::size_t shared = 0;
      for (const PageId page : fork.page_ids(0, 0)) shared += pool.pages.is_shared(page) ? 1U : 0U;
      CHECK(shared == 5);  // 347 rows fill so many pages
      CHECK(fork.shared_bytes() > 0);
      CHECK(pool.live_bytes() - live < fork.bytes() - fork.shared_bytes() + 1);
    }
    CHECK(pool.live_bytes() == live);
    const std::size_t obtained = pool.obtained_bytes();
    caches.pop_back();
    CHECK(pool.live_bytes() < live);
    test::feed_device(caches.emplace_back(plan, options), 1, {300, 1, 1, 40, 5});
    CHECK(pool.live_bytes() == live);
    CHECK(pool.obtained_bytes() <= obtained + obtained / 16);
    for (Cache& cache : caches) {
      Cache other = control.fork();
      CHECK(test::same_bits(test::next_step(cache, 2, 70, {.read = Read::selected}),
                            test::next_step(other, 2, 70, {.read = Read::selected})));
    }
  }
  CHECK(pool.live_bytes() == 0);
  CHECK(pool.obtained_bytes() == 0);
}

TEST_CASE("pools that no device cache can use") {
  const test::SmallDevice small;
  const HeadPlan<E> plan{ModelShape{1, 1, 1, 64}};
  const auto refused = [&](const gpu::CacheOptions& options) {
    return thrown<ConfigError>([&] { const Cache cache{plan, options}; });
  };
  PagePool of_host;
  CHECK(contains(refused({.pool = &of_host}), "tier 0 of the pool is no memory that kernels can read"));
  gpu::DeviceProvider fast;
  ResourceProvider slow{std::pmr::get_default_resource()};
  PagePool half_of_host{std::array<PageProvider*, 2>{&fast, &slow}};
  CHECK(contains(refused({.pool = &half_of_host}), "tier 1 of the pool is no memory that kernels can read"));
  PagePool pool{std::array<PageProvider*, 1>{&fast}};
  CHECK(refused({.pool = &pool}).empty());
  gpu::PinnedMemory pinned;
  CHECK(contains(refused({.pool = &pool, .slow_memory = &pinned}), "pool and slow_memory are both given"));
  CHECK(contains(refused({.page_rows = 32, .pool = &pool}), "must be a power of two from 64"));
  CHECK(contains(thrown<ConfigError>([] { const gpu::DeviceProvider none{nullptr}; }), "memory is null"));
}
