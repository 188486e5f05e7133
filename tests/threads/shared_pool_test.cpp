// SPDX-License-Identifier: Apache-2.0
//
// Caches of several threads that share one pool, without any lock of their own: pages go from one cache to
// another, and each cache gives the results of one with a pool of its own.
#include <doctest/doctest.h>

#include <cstddef>
#include <thread>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"

using namespace kvpolicy;

TEST_CASE("caches in separate threads share a pool") {
  using Full = FullCache<DenseStorage<float>>;
  using Window = SinkRecentCache<DenseStorage<float>>;
  HeadPlan<float> plan{ModelShape{1, 2, 2, 64}, Full::Config{}};
  plan.set(0, 1, Window::Config{.sinks = 3, .recent = 20});
  const auto run = [&](PagePool* pool, std::size_t number) {
    std::vector<float> all;
    test::Random random{number};
    for (std::size_t text = 0; text < 3; ++text) {
      KvCache<float> cache{plan, {.page_rows = 16, .pool = pool}};
      for (std::size_t step = 0; step < 20; ++step) {
        test::Chunk<> chunk{random, plan.shape(), 1 + (number + step * 7) % 11};
        chunk.step(cache, 0);
        all.insert(all.end(), chunk.log_sum_exp.begin(), chunk.log_sum_exp.end());
      }
    }
    return all;
  };
  PagePool pool;
  std::vector<std::vector<float>> found(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = run(&pool, i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(test::same_bits(found[i], run(nullptr, i)));
  CHECK(pool.live_bytes() == 0);
}
