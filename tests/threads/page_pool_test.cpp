// SPDX-License-Identifier: Apache-2.0
//
// One pool used by several threads: each allocates, writes, shares, reads and releases pages, while another
// thread reads the statistics.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>

#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

struct Written {
  PageId page;
  int content;
};

bool is_as_written(const PagePool& pool, const Written& written) {
  const std::span found{pool.address(written.page), pool.bytes(written.page)};
  return std::ranges::all_of(found,
                             [&](std::byte b) { return b == static_cast<std::byte>(written.content); });
}

}  // namespace

TEST_CASE("a page that another thread released is written again") {
  PagePool pool;
  const PageId page = pool.allocate(256);
  for (int round = 0; round < 20; ++round) {
    const Written written{page, round};
    std::memset(pool.address(page), round, pool.bytes(page));
    pool.retain(page);
    bool found = false;
    std::atomic<bool> gone = false;
    std::thread reader{[&] {
      found = is_as_written(pool, written);
      pool.release(page);
      gone.store(true, std::memory_order_relaxed);  // a signal that orders no memory accesses
    }};
    while (!gone.load(std::memory_order_relaxed)) std::this_thread::yield();
    REQUIRE_FALSE(pool.is_shared(page));
    std::memset(pool.address(page), round + 1, pool.bytes(page));
    reader.join();
    CHECK(found);
  }
  pool.release(page);
}

TEST_CASE("a page that another thread owned last is allocated again") {
  test::CountingResource memory;
  PagePool pool{&memory};
  const PageId keeps_the_slab = pool.allocate(256);
  for (int round = 0; round < 20; ++round) {
    std::vector<PageId> pages(2);
    pool.allocate(256, pages);
    std::atomic<bool> gone = false;
    std::thread writer{[&] {
      for (const PageId page : pages) {
        std::memset(pool.address(page), round, 256);
        pool.release(page);
      }
      gone.store(true, std::memory_order_relaxed);
    }};
    while (!gone.load(std::memory_order_relaxed)) std::this_thread::yield();
    std::vector<PageId> others(2);
    pool.allocate(256, others);
    for (const PageId page : others) std::memset(pool.address(page), round + 1, 256);
    writer.join();
    for (const PageId page : others) pool.release(page);
  }
  pool.release(keeps_the_slab);
  CHECK(memory.live_bytes() == 0);
}

TEST_CASE("threads that share a pool and its pages read what was written") {
  test::CountingResource memory;  // guarded by the pool's lock
  PagePool pool{&memory};
  constexpr std::size_t threads = 4;
  // Pages that one thread hands over to any other; the list's mutex synchronises the threads.
  std::mutex handed_over_mutex;
  std::vector<Written> handed_over;
  std::array<std::size_t, threads> wrong{};
  std::atomic<bool> done = false;

  const auto work = [&](std::size_t number) {
    test::Random random{number + 1};
    std::vector<Written> own;
    std::vector<PageId> ids;
    for (int i = 0; i < 20000; ++i) {
      switch (test::below(random, 6)) {
        case 0:
        case 1: {
          const Written written{pool.allocate(64 * (1 + test::below(random, 8))), i % 256};
          std::memset(pool.address(written.page), written.content, pool.bytes(written.page));
          own.push_back(written);
          break;
        }
        case 2: {  // share a page
          if (own.empty()) break;
          const Written written = test::one_of(random, own);
          pool.retain(written.page);
          const std::lock_guard lock{handed_over_mutex};
          handed_over.push_back(written);
          break;
        }
        case 3: {  // take a shared page; write to it if its other owner has released it
          const std::lock_guard lock{handed_over_mutex};
          if (handed_over.empty()) break;
          own.push_back(handed_over.back());
          handed_over.pop_back();
          break;
        }
        case 4: {
          if (own.empty()) break;
          Written& written = own[test::below(random, own.size())];
          wrong[number] += is_as_written(pool, written) ? 0 : 1;
          if (!pool.is_shared(written.page)) {
            written.content = (written.content + 1) % 256;
            std::memset(pool.address(written.page), written.content, pool.bytes(written.page));
          }
          break;
        }
        default: {
          if (own.empty()) break;
          Written& written = own[test::below(random, own.size())];
          pool.release(written.page);
          written = own.back();
          own.pop_back();
          if (i % 20 != 0) break;
          // A page that this thread holds twice has two owners, so it must not move.
          ids.clear();
          for (const Written& one : own) ids.push_back(one.page);
          pool.consolidate(ids);
          for (std::size_t p = 0; p < own.size(); ++p) own[p].page = ids[p];
        }
      }
    }
    for (const Written& written : own) {
      wrong[number] += is_as_written(pool, written) ? 0 : 1;
      pool.release(written.page);
    }
  };
  std::thread reader{[&] {
    std::size_t largest = 0;
    while (!done.load(std::memory_order_relaxed)) {
      largest = std::max({largest, pool.live_bytes(), pool.obtained_bytes(), pool.overhead_bytes()});
      std::this_thread::yield();
    }
    CHECK(largest < std::size_t{1} << 30);
  }};
  std::vector<std::thread> workers;
  for (std::size_t i = 0; i < threads; ++i) workers.emplace_back(work, i);
  for (std::thread& worker : workers) worker.join();
  done = true;
  reader.join();
  for (const Written& written : handed_over) {
    CHECK(is_as_written(pool, written));
    pool.release(written.page);
  }
  for (const std::size_t count : wrong) CHECK(count == 0);
  CHECK(pool.live_bytes() == 0);
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}
