// SPDX-License-Identifier: Apache-2.0
//
// Device memory runs out at every single allocation of every call, and every single call of the
// runtime fails: a call that lacked memory left everything as it was and works the next time;
// whatever happens, nothing leaks.
#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/tree_mask.hpp"

#if !defined(__CUDACC__)  // a device does not fail on demand

using namespace kvpolicy;
using test::DeviceChunk;

namespace {

using E = float16;
using PerToken = ResidualStorage<E, Granularity::per_token>;
using PerChannel = ResidualStorage<E, Granularity::per_channel>;
using Window = SinkRecentCache<PerToken>;
using Budget = HeadBudgetCache<PerToken>;
using Retrieval = ChunkRetrievalCache<PerChannel, MinMaxKey>;
using Plan = HeadPlan<E>;
using Cache = gpu::KvCache<E>;

Plan mixed_plan(std::size_t compress_every) {
  Plan plan{ModelShape{2, 8, 4, 64}};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    plan.set(layer, 1,
             Window::Config{.sinks = 3,
                            .recent = 20,
                            .rotary_in_cache = RotaryConfig{},
                            .storage = {.bits = 8, .residual = 4}});
    plan.set(layer, 2,
             Budget::Config{.budget = 70,
                            .compress_every = compress_every,
                            .scorer = {.observation_window = 4},
                            .storage = {.bits = 4, .residual = 2}});
    plan.set(layer, 3,
             Retrieval::Config{
                 .chunk = 16, .budget = 32, .storage = {.bits = 2, .key_group = 16, .residual = 10}});
  }
  return plan;
}

// A cache of 120 tokens, with room for 128.
struct State {
  test::CountingDeviceMemory memory;
  gpu::CacheOptions options;
  std::unique_ptr<Cache> cache;

  explicit State(std::size_t max_rollback, std::size_t compress_every = 0) {
    options = {.max_rollback = max_rollback, .max_append = 8, .memory = &memory};
    cache = std::make_unique<Cache>(mixed_plan(compress_every), options);
    test::feed_device(*cache, 7, {111, 1, 8}, {.refresh_selection = true});
  }
  [[nodiscard]] std::size_t counted() const {
    return cache->bytes() + cache->overhead_bytes() + cache->engine()->workspace_bytes();
  }
};

DeviceChunk<> chunk_of(const Cache& cache, std::size_t tokens) {
  test::Random random{8};
  return {random, cache.plan().shape(), tokens};
}

// `prepare(cache)` makes what `call(cache, prepared)` needs; the call lacks memory, again and again.
template <class Prepare, class Call>
void survive(const std::string& what, std::size_t max_rollback, std::size_t failures_at_least,
             Prepare prepare, Call call) {
  CAPTURE(what);
  const test::SmallDevice device;
  State state{max_rollback};
  const auto next = [](Cache& cache) {
    auto results = test::next_step(cache, 3, 5, {.read = Read::selected});
    const auto rows = test::dump_device(cache, false);
    results.insert(results.end(), rows.numbers.begin(), rows.numbers.end());
    return results;
  };
  test::Dump after;
  std::vector<float> after_next;
  {
    Cache control = state.cache->fork();
    auto prepared = prepare(control);
    call(control, prepared);
    after = test::dump_device(control, false);
    after_next = next(control);
  }
  auto prepared = prepare(*state.cache);
  const auto before = test::dump_device(*state.cache);
  std::size_t failures = 0;
  for (;; ++failures) {
    CAPTURE(failures);
    REQUIRE(failures < 1000);
    state.memory.fail_after(failures);
    bool failed = false;
    try {
      call(*state.cache, prepared);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    state.memory.fail_after(test::never);
    if (!failed) break;
    CHECK(state.memory.live_bytes() == state.counted());
    CHECK(test::dump_device(*state.cache) == before);
  }
  CHECK(failures >= failures_at_least);
  CHECK(test::dump_device(*state.cache, false) == after);
  CHECK(test::same_bits(next(*state.cache), after_next));
  CHECK(state.memory.live_bytes() == state.counted());
  state.cache.reset();
  CHECK(state.memory.live_blocks() == 0);
  CHECK(state.memory.faults() == 0);
}

const auto nothing = [](Cache&) { return 0; };

// The n-th call of the runtime fails, for every n: DeviceError or bad_alloc, and no leak. What the cache holds after a
// DeviceError nobody promised. A cache that the call makes goes afterwards: what fails while it goes is waited for, and
// not reported.
template <class Call>
void leaks_nothing(const std::string& what, std::size_t max_rollback, Call call) {
  CAPTURE(what);
  const test::SmallDevice device;
  const State state{max_rollback};
  const DeviceChunk<> chunk = chunk_of(*state.cache, 30);
  const std::size_t live = gpu::simt::live_bytes();
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorLaunchFailure}) {
    CAPTURE(static_cast<int>(error));
    bool done = false;
    // The first calls one by one, then fewer and fewer.
    for (std::uint64_t n = 1; !done; n += 1 + n / 8) {
      CAPTURE(n);
      REQUIRE(n < 100000);
      {
        Cache cache = state.cache->fork();
        std::optional<Cache> made;
        const std::uint64_t calls = gpu::simt::device().calls();
        gpu::simt::fail_after(n, error);
        bool failed = false;
        try {
          if constexpr (std::is_invocable_v<Call, Cache&, const DeviceChunk<>&, std::optional<Cache>&>) {
            call(cache, chunk, made);
          } else {
            call(cache, chunk);
          }
        } catch (const std::bad_alloc&) {
          failed = true;
          CHECK(error == cudaErrorMemoryAllocation);
        } catch (const DeviceError& e) {
          failed = true;
          CHECK(test::contains(e.what(), cudaGetErrorName(error)));
        }
        done = gpu::simt::device().calls() - calls < n;
        CHECK(failed != done);  // no failure goes unnoticed
        gpu::simt::fail_after(0);
        CHECK(cudaGetLastError() == cudaSuccess);
      }
      CHECK(gpu::simt::live_bytes() == live);
      CHECK(state.memory.faults() == 0);
    }
  }
}

}  // namespace

TEST_CASE("device memory runs out: growing") {
  // A table, a slab and scores are asked for at most, for each of four heads.
  survive(
      "a step", 0, 4, [](Cache& cache) { return chunk_of(cache, 37); },
      [](Cache& cache, auto& chunk) { chunk.step(cache, 0); });
  survive(
      "a step of a cache that rolls back", 6, 4, [](Cache& cache) { return chunk_of(cache, 37); },
      [](Cache& cache, auto& chunk) {
        chunk.step(cache, 1, {.read = Read::selected, .refresh_selection = true});
      });
  survive(
      "append", 6, 2,
      [](Cache& cache) {
        chunk_of(cache, 7).append(cache, 0);
        return chunk_of(cache, 6);
      },
      [](Cache& cache, auto& chunk) { chunk.append(cache, 0); });
  // Of both layers, and the tables as well.
  survive("reserve", 0, 18, nothing, [](Cache& cache, int) { cache.reserve(2000); });
}

TEST_CASE("device memory runs out: trees") {
  static const TokenTree tree = test::some_tree(8, 1, 5);
  // Rows, then the mask, which the second layer finds where the first one left it.
  survive(
      "a step of a tree", 20, 5, [](Cache& cache) { return chunk_of(cache, 20); },
      [](Cache& cache, auto& chunk) {
        const TokenTree large = test::some_tree(20, 2, 5);
        chunk.step(cache, 0, {.tree = &large});
        cache.truncate(cache.tokens());
      });
  survive(
      "attend to a tree, and accept", 8, 1,
      [](Cache& cache) {
        const DeviceChunk<> chunk = chunk_of(cache, 8);
        for (std::size_t l = 0; l < 2; ++l) chunk.append_part(cache, l, 0, 8, {.tree = &tree});
        return chunk_of(cache, 8);
      },
      [](Cache& cache, auto& chunk) {
        for (std::size_t l = 0; l < 2; ++l) chunk.attend(cache, l, {.tree = &tree});
        cache.accept(std::vector<std::size_t>{0});
      });
}

TEST_CASE("device memory runs out: compress and fork") {
  survive("compress", 0, 8, nothing, [](Cache& cache, int) { cache.compress(); });
  survive("compress one layer", 0, 4, nothing, [](Cache& cache, int) { cache.compress(1); });
  survive("compress rows that could still be taken back", 6, 8, nothing,
          [](Cache& cache, int) { cache.compress(); });
  survive(
      "compress again", 0, 8,
      [](Cache& cache) {
        cache.compress();
        test::feed_device(cache, 4, {80});
        return 0;
      },
      [](Cache& cache, int) { cache.compress(); });
  survive("fork", 3, 20, nothing, [](Cache& cache, int) {
    const Cache fork = cache.fork();
    CHECK(test::dump_device(fork, false) == test::dump_device(cache, false));
  });
  survive(
      "fork of what was compressed", 0, 20,
      [](Cache& cache) {
        cache.compress();
        return 0;
      },
      [](Cache& cache, int) {
        const Cache fork = cache.fork();
        CHECK(test::dump_device(fork, false) == test::dump_device(cache, false));
      });
}

TEST_CASE("device memory runs out: construction") {
  const test::SmallDevice device;
  test::CountingDeviceMemory memory;
  const Plan plan = mixed_plan(0);
  std::size_t failures = 0;
  for (std::optional<Cache> cache; !cache; ++failures) {
    REQUIRE(failures < 100);
    memory.fail_after(failures);
    try {
      cache.emplace(plan, gpu::CacheOptions{.memory = &memory});
      CHECK(memory.live_bytes() ==
            cache->bytes() + cache->overhead_bytes() + cache->engine()->workspace_bytes());
    } catch (const std::bad_alloc&) {
      CHECK(memory.live_blocks() == 0);
    }
  }
  // Workspace, counters; rotary table; queries, their sink logits and choices of each layer.
  CHECK(failures == 1 + 9);
  CHECK(memory.live_blocks() == 0);
}

TEST_CASE("a compression that follows a step waits for the next step if memory runs out") {
  const test::SmallDevice device;
  State control{0, 50};
  State state{0, 50};  // 124 rows are enough
  const DeviceChunk<> chunk = chunk_of(*state.cache, 5);
  chunk.step(*control.cache, 0);
  CHECK(control.cache->rows(0, 2).positions.size() == 74);
  state.memory.fail_after(0);
  CHECK_NOTHROW(chunk.step(*state.cache, 0));
  state.memory.fail_after(test::never);
  CHECK(state.cache->tokens(0) == 125);
  CHECK(state.cache->rows(0, 2).positions.size() == 125);
  CHECK(state.memory.live_bytes() == state.counted());
  chunk.step(*state.cache, 0);
  CHECK(state.cache->rows(0, 2).positions.size() == 74);
}

TEST_CASE("a runtime that fails leaks nothing") {
  leaks_nothing("a step", 0, [](Cache& cache, const DeviceChunk<>& chunk) {
    chunk.step(cache, 0, {.read = Read::selected, .refresh_selection = true});
  });
  leaks_nothing("reserve", 0, [](Cache& cache, const DeviceChunk<>&) { cache.reserve(2000); });
  leaks_nothing("compress", 3, [](Cache& cache, const DeviceChunk<>&) { cache.compress(); });
  leaks_nothing("fork", 3, [](Cache& cache, const DeviceChunk<>&, std::optional<Cache>& made) {
    made.emplace(cache.fork());
  });
  leaks_nothing("rows", 3, [](Cache& cache, const DeviceChunk<>&) {
    static_cast<void>(cache.rows(0, 3, Read::selected));
  });
  leaks_nothing("construction", 0,
                [](Cache& cache, const DeviceChunk<>&) { const Cache other{cache.plan(), cache.options()}; });
  leaks_nothing("a tree", 30, [](Cache& cache, const DeviceChunk<>& chunk) {
    const TokenTree tree = test::some_tree(30, 1, 5);
    for (std::size_t l = 0; l < 2; ++l) chunk.step(cache, l, {.tree = &tree});
    std::vector<std::size_t> path;
    for (std::size_t node = 29; node != TokenTree::text; node = tree.parent(node))
      path.insert(path.begin(), node);
    cache.accept(path);
  });
  leaks_nothing("truncate, commit", 4, [](Cache& cache, const DeviceChunk<>&) {
    cache.truncate(cache.tokens() - 2);
    cache.commit();
  });
}

TEST_CASE("what only runs out of the driver's memory is bad_alloc as well") {
  const test::SmallDevice device;
  gpu::simt::Device& emulated = gpu::simt::device();
  const std::size_t total = emulated.total_bytes;
  {
    Cache cache{mixed_plan(0)};
    test::feed_device(cache, 1, {100});
    const auto before = test::dump_device(cache);
    emulated.total_bytes = gpu::simt::live_bytes() + 100000;
    CHECK_THROWS_AS(cache.reserve(100000), std::bad_alloc);
    CHECK(test::dump_device(cache) == before);
    emulated.total_bytes = total;
    CHECK_NOTHROW(cache.reserve(1000));
  }
  emulated.total_bytes = total;
}

#endif
