// SPDX-License-Identifier: Apache-2.0
//
// Forks used by separate threads without any lock: pages are shared, released and written again across
// threads. Where ThreadSanitizer works (tests/CMakeLists.txt) this test runs under it, and a page that is
// written before its other readers are done is an error.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

#include "support/sanitizer.hpp"
#include "support/small_cache.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t head_dim = 64;

template <class Storage>
void append_rows(Storage& storage, std::size_t rows, std::size_t window) {
  const std::vector<float> numbers(rows * head_dim, static_cast<float>(storage.end()));
  const Plane plane{.base = reinterpret_cast<const std::byte*>(numbers.data()),
                    .row_stride = head_dim * sizeof(float)};
  storage.append({.keys = plane, .values = plane, .rows = rows}, window);
}

template <class Storage>
double sum_of(const Storage& storage) {
  SegmentList list;
  storage.show(storage.begin(), storage.end() - storage.begin(), {}, list);
  std::vector<float> row(head_dim);
  double sum = 0;
  for (const Segment& segment : list) {
    for (std::size_t i = 0; i < segment.rows; ++i) {
      load_row(segment.keys, i, row);
      for (const float x : row) sum += static_cast<double>(x);
    }
  }
  return sum;
}

// A fork reads the window's pages in its thread and releases them; then its origin writes them again.
template <class Storage>
void write_again(const typename Storage::Config& config) {
  Storage storage{config, {.head_dim = head_dim, .page_rows = 16}};
  append_rows(storage, 64, 32);
  for (int round = 0; round < 20; ++round) {
    const double expected = sum_of(storage);
    double read = -1;
    std::atomic<bool> gone = false;
    std::thread reader{[&, fork = std::optional{storage}]() mutable {
      read = sum_of(*fork);
      fork.reset();
      gone.store(true, std::memory_order_relaxed);  // a signal that orders no memory accesses
    }};
    while (!gone.load(std::memory_order_relaxed)) std::this_thread::yield();
    append_rows(storage, 40, 32);
    reader.join();
    CHECK(read == expected);
  }
}

}  // namespace

TEST_CASE("a page that a fork in another thread released is written again") {
#if defined(KVPOLICY_TEST_TSAN)
  MESSAGE("forks are checked by ThreadSanitizer");
#endif
  write_again<DenseStorage<float>>({});
  write_again<ResidualStorage<float16>>({.bits = 4, .residual = 20});
}

TEST_CASE("forks of one cache in separate threads give the results of a single thread") {
  const test::SmallCache origin = test::small_cache();
  constexpr std::size_t forks = 4;
  const auto go_on = [](test::SmallCache& cache, std::size_t number) {
    std::vector<float> all;
    for (std::size_t step = 0; step < 12; ++step) {
      const auto out = test::small_step(
          cache, 1 + (number + step) % 5,
          {.read = step % 2 == 0 ? Read::all : Read::selected, .refresh_selection = step % 3 == 0});
      all.insert(all.end(), out.begin(), out.end());
      if (step == 7) cache.compress();
    }
    return all;
  };
  std::vector<std::vector<float>> expected, found(forks);
  for (std::size_t i = 0; i < forks; ++i) {
    test::SmallCache cache = origin.fork();
    expected.push_back(go_on(cache, i));
  }
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < forks; ++i) {
    threads.emplace_back([&, i, cache = origin.fork()]() mutable {
      test::SmallCache mine = cache.fork();  // a fork of a fork, made in this thread
      found[i] = go_on(mine, i);
      static_cast<void>(test::saved(cache));
    });
  }
  static_cast<void>(test::saved(origin));
  for (std::thread& thread : threads) thread.join();
  CHECK(found == expected);
}
