// SPDX-License-Identifier: Apache-2.0
//
// What a device cache in an engine's tensor refuses, and what it does when pages or device memory run out.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/engine_tensor.hpp"

using namespace kvpolicy;
using test::contains;
using test::EngineLayout;
using test::EngineTensor;
using test::thrown;

namespace {

using E = float16;
using Storage = EnginePageStorage<E>;
using Full = FullCache<Storage>;
using Cache = gpu::KvCache<E>;
using Options = gpu::CacheOptions;

constexpr ModelShape shape{2, 4, 2, 64};

// The message of the error that making a cache throws, and asking for its size.
template <class Config>
std::string refused(const Config& config, const Options& options, const ModelShape& model = shape) {
  const HeadPlan<E> plan{model, config};
  const std::string said = thrown<ConfigError>([&] { const Cache cache{plan, options}; });
  CHECK(thrown<ConfigError>([&] { static_cast<void>(gpu::memory_of(plan, 9, options)); }) == said);
  return said;
}

}  // namespace

TEST_CASE("pools and plans that do not fit an engine's tensor on a device") {
  const test::SmallDevice small;
  EngineTensor tensor{EngineLayout::vllm_nhd, 16, 40, 2, 1};
  PagePool& pool = tensor.pool();
  const Options fits{.page_rows = 16, .pool = &pool};
  CHECK(refused(Full::Config{}, fits).empty());
  CHECK(contains(refused(Full::Config{}, {}), "pool is null, but the plan has heads over EnginePageStorage"));
  gpu::DeviceProvider device;
  PagePool own{std::array<PageProvider*, 1>{&device}};
  CHECK(contains(refused(Full::Config{}, {.pool = &own}), "must be an engine's with keys and values"));
  CHECK(contains(refused(Full::Config{}, {.page_rows = 64, .pool = &pool}),
                 "have 16 rows of 128 bytes, the cache's 64 rows of 128"));
  using Fp8Rows = EnginePageStorage<E, Codebook::fp8>;
  CHECK(contains(refused(FullCache<Fp8Rows>::Config{}, fits),
                 "codes stand for 'fp8' numbers, which are read on the host"));
  CHECK(contains(refused(Full::Config{}, {.page_rows = 8, .pool = &pool}),
                 "page_rows is 8, must be a power of two from 16"));
  CHECK(contains(refused(Full::Config{}, {.page_rows = 24, .pool = &pool}),
                 "page_rows is 24, must be a power of two from 16"));
  CHECK(contains(refused(Full::Config{}, {.page_rows = 16}),
                 "page_rows is 16, must be a power of two from 64"));
  CHECK(contains(refused(Full::Config{}, {.kept_queries = 3, .page_rows = 16, .pool = &pool}),
                 "kept_queries is 3, must be 0"));
  gpu::PinnedMemory pinned;
  CHECK(contains(refused(Full::Config{}, {.page_rows = 16, .pool = &pool, .slow_memory = &pinned}),
                 "pool and slow_memory are both given"));
  PagePool with_slow{tensor.pages(), std::array<PageProvider*, 1>{&device}};
  CHECK(contains(refused(Full::Config{}, {.page_rows = 16, .pool = &with_slow}), "the pool has 2 tiers"));
  // Heads of other storages have pages of the cache's own, if these may be so small.
  CHECK(refused(FullCache<DenseStorage<E>>::Config{}, fits).empty());
  const auto too_small =
      "page_rows is 16, must be at least 64 where a head quantises, compresses or chooses chunks";
  CHECK(contains(refused(QuantizedResidualCache<E>::Config{.storage = {.bits = 4}}, fits), too_small));
  CHECK(contains(refused(HeadBudgetCache<Storage>::Config{.budget = 9}, fits), too_small));
  CHECK(contains(refused(ChunkRetrievalCache<Storage>::Config{.chunk = 8, .budget = 16}, fits), too_small));

  const test::DeviceArray<std::byte> bytes{100000};
  const auto strided = [&](std::size_t row_stride, std::size_t values_offset, std::size_t start) {
    PagePool odd{EnginePages{.arenas = {{bytes.data() + start, bytes.size() - start}},
                             .blocks = 4,
                             .block_stride = 12000,
                             .page_rows = 16,
                             .row_stride = row_stride,
                             .row_bytes = 128,
                             .values_offset = values_offset}};
    return refused(Full::Config{}, {.page_rows = 16, .pool = &odd}, ModelShape{1, 1, 1, 64});
  };
  CHECK(strided(144, 6000, 0).empty());
  CHECK(contains(strided(136, 6000, 0), "row_stride is 136"));
  CHECK(contains(strided(144, 6008, 0), "values_offset 6008"));
  CHECK(contains(strided(144, 0, 0), "must be an engine's with keys and values"));
}

TEST_CASE("an engine's pages that are not aligned are refused when they are taken") {
  const test::SmallDevice small;
  const test::DeviceArray<std::byte> bytes{100000};
  PagePool pool{vllm_nhd({bytes.data() + 8, 2 * 4 * 16 * 128},
                         {.blocks = 4, .block_size = 16, .kv_heads = 1, .row_bytes = 128})};
  Cache cache{HeadPlan<E>{ModelShape{1, 1, 1, 64}, Full::Config{}}, {.page_rows = 16, .pool = &pool}};
  CHECK(contains(thrown<ConfigError>([&] { cache.reserve(5); }), "lies at 8 bytes after a multiple of 16"));
  CHECK(pool.live_bytes() == 0);
  CHECK(cache.bytes() == 0);
}

TEST_CASE("a device cache goes on after an engine's pages ran out") {
  const test::SmallDevice small;
  for (const EngineLayout kind : test::engine_layouts) {
    EngineTensor tensor{kind, 16, 40, 2, 2};
    const HeadPlan<E> plan{shape, Full::Config{}};
    std::optional<Cache> cache{std::in_place, plan,
                               Options{.max_rollback = 3, .page_rows = 16, .pool = &tensor.pool()}};
    Cache control{HeadPlan<E>{shape, FullCache<DenseStorage<E>>::Config{}}, {.max_rollback = 3}};
    test::feed_device(*cache, 1, {20, 3});
    test::feed_device(control, 1, {20, 3});
    std::optional<Cache> other{std::in_place, plan, cache->options()};
    std::size_t tokens = 0;
    const auto live = [&] { return tensor.pool().live_bytes(); };
    for (;; tokens += 16) {
      const std::size_t before = live();
      const std::string error = thrown<OutOfMemory>([&] { other->reserve(tokens + 16); });
      if (error.empty()) continue;
      CHECK(contains(error, "pages of the engine's memory are in use"));
      CHECK(live() == before);
      CHECK(other->reserved() == tokens);
      break;
    }
    const auto before = test::dump_device(*cache);
    // The first layer that grows may still find pages.
    const std::string error = thrown<OutOfMemory>([&] { test::feed_device(*cache, 2, {300}); });
    CHECK(contains(error, "pages of the engine's memory are in use"));
    CHECK(!thrown<OutOfMemory>([&] { static_cast<void>(cache->fork()); }).empty());
    CHECK(test::dump_device(*cache) == before);
    other.reset();
    CHECK(test::same_bits(test::next_step(*cache, 3, 30), test::next_step(control, 3, 30)));
    const Cache fork = cache->fork();
    cache.reset();
    CHECK(live() == tensor.other_bytes() + fork.bytes());
    CHECK(test::dump_device(fork, false) == test::dump_device(control, false));
  }
}

#if !defined(__CUDACC__)  // a device does not fail on demand

TEST_CASE("no page of an engine is lost, whatever allocation or call of the runtime fails") {
  const test::SmallDevice small;
  test::CountingDeviceMemory memory;
  EngineTensor tensor{EngineLayout::flashinfer_nhd, 16, 150, 2, 3};
  const Options options{.max_rollback = 3, .page_rows = 16, .memory = &memory, .pool = &tensor.pool()};
  const HeadPlan<E> plan{shape, Full::Config{}};
  {
    Cache cache{plan, options};
    test::feed_device(cache, 1, {40});
    const auto before = test::dump_device(cache);
    const std::size_t live = tensor.pool().live_bytes();
    std::size_t failures = 0;
    for (bool done = false; !done; ++failures) {
      memory.fail_after(failures);
      try {
        const Cache fork = cache.fork();
        done = true;
      } catch (const std::bad_alloc&) {
      }
      memory.fail_after(test::never);
      CHECK(tensor.pool().live_bytes() == live);
      CHECK(test::dump_device(cache) == before);
    }
    CHECK(failures > 4);
    const std::size_t of_memory = failures;
    auto& device = gpu::simt::device();
    for (bool done = false; !done; ++failures) {
      device.fail_after(failures - of_memory + 1, cudaErrorUnknown);
      try {
        const Cache fork = cache.fork();
        done = true;
      } catch (const DeviceError&) {
      }
      device.fail_after(0, cudaSuccess);
      cudaGetLastError();
      CHECK(tensor.pool().live_bytes() == live);
    }
    CHECK(failures > of_memory + 10);
    CHECK(test::dump_device(cache) == before);
  }
  CHECK(memory.live_blocks() == 0);
}

#endif

TEST_CASE("a captured step writes to an engine's tensor") {
  const test::SmallDevice small;
  EngineTensor tensor{EngineLayout::flashinfer_hnd, 16, 60, 2, 4};
  const test::Stream stream;
  test::Random random{5};
  const test::DeviceChunk<E> chunk{random, shape, 1, stream};
  const auto run = [&](const HeadPlan<E>& plan, const Options& options) {
    Cache cache{plan, options, stream};
    cache.reserve(60, stream);
    test::feed_device(cache, 6, {30, 1}, {}, stream);
    const test::Graph graph{stream, [&] {
                              for (std::size_t l = 0; l < shape.layers; ++l) chunk.step(cache, l, {}, stream);
                            }};
    cache.replayed(20);
    for (int i = 0; i < 20; ++i) graph.launch(stream);
    auto results = chunk.results(stream);
    const auto rows = test::dump_device(cache, false, stream);
    results.insert(results.end(), rows.numbers.begin(), rows.numbers.end());
    return results;
  };
  CHECK(test::same_bits(run(HeadPlan<E>{shape, Full::Config{}}, {.page_rows = 16, .pool = &tensor.pool()}),
                        run(HeadPlan<E>{shape, FullCache<DenseStorage<E>>::Config{}}, {})));
}
