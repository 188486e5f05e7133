// SPDX-License-Identifier: Apache-2.0
//
// Rows in an inference engine's own memory, with the plain engine, and refused settings.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/cache/batch.hpp>

#include "support/compare.hpp"
#include "support/engine_fp8.hpp"
#include "support/engine_memory.hpp"

using namespace kvpolicy;
using test::contains;
using test::EngineLayout;
using test::thrown;

TEST_CASE("an engine's memory: a cache in it equals one over pages of its own") {
  std::uint64_t seed = 0;
  for (const EngineLayout kind :
       {EngineLayout::vllm_nhd, EngineLayout::flashinfer_nhd, EngineLayout::flashinfer_hnd}) {
    test::check_engine_memory<float, ScalarEngine>(kind, ++seed);
    test::check_engine_memory<bfloat16, ScalarEngine>(kind, ++seed);
  }
}

TEST_CASE("an engine's memory: when its pages run out, the call fails and the cache is unchanged") {
  std::vector<float> tensor(std::size_t{45} * 2 * 16 * 64);
  PagePool pool{flashinfer_hnd(std::as_writable_bytes(std::span{tensor}),
                               {.blocks = 45, .block_size = 16, .kv_heads = 1, .row_bytes = 256})};
  using Full = FullCache<EnginePageStorage<float>>;
  const HeadPlan plan{ModelShape{1, 1, 1, 64}, Full::Config{}};
  KvCache cache{plan, {.page_rows = 16, .pool = &pool}};
  KvCache other{plan, {.page_rows = 16, .pool = &pool}};
  test::Random random{1};
  test::feed(cache, random, {30 * 16});
  test::feed(other, random, {10 * 16});
  const auto before = test::dump(cache);
  test::Chunk<> chunk{random, plan.shape(), 6 * 16};
  CHECK_THROWS_AS(chunk.step(cache, 0), OutOfMemory);
  CHECK(test::dump(cache) == before);
  other.clear();
  chunk.step(cache, 0);
  CHECK(cache.bytes() == 36 * 16 * 2 * 64 * sizeof(float) + 2 * 64 * sizeof(float));
}

TEST_CASE("an engine's memory: of a batch, who finds no free page is left out, and the others go on") {
  constexpr std::size_t blocks = 12;
  std::vector<float> tensor(blocks * 2 * 16 * 64);
  PagePool pool{flashinfer_hnd(std::as_writable_bytes(std::span{tensor}),
                               {.blocks = blocks, .block_size = 16, .kv_heads = 1, .row_bytes = 256})};
  const HeadPlan plan{ModelShape{1, 1, 1, 64}, FullCache<EnginePageStorage<float>>::Config{}};
  using Cache = KvCache<float>;
  const CacheOptions options{.page_rows = 16, .pool = &pool};
  test::Random random{2};
  std::vector<Cache> caches;
  for (std::size_t i = 0; i < 3; ++i) {
    caches.emplace_back(plan, options);
    test::feed(caches.back(), random, {3 * 16});
  }
  Batch<float, ScalarEngine> batch;
  std::vector<BatchSequence<Cache>> sequences;
  for (Cache& cache : caches) sequences.push_back({&cache});
  test::Chunk<> chunk{random, plan.shape(), 1 + 64 + 16};  // 1 page, 4 and 1; there are 3
  const std::vector<std::int32_t> indptr{0, 1, 65, 81};
  const auto before = test::dump(caches[1]);
  const auto step = [&] {
    return batch.step(0, sequences, indptr, chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.out.view());
  };
  const std::span<const LeftOut> left_out = step();
  REQUIRE(left_out.size() == 1);
  CHECK(left_out[0].sequence == 1);
  CHECK(contains(thrown<OutOfMemory>([&] { std::rethrow_exception(left_out[0].error); }),
                 "12 pages of the engine's memory are in use"));
  CHECK(caches[0].tokens() == 3 * 16 + 1);
  CHECK(caches[2].tokens() == 4 * 16);
  CHECK(test::dump(caches[1]) == before);
  // Once pages are free it goes on.
  caches[0].clear();
  sequences.assign(1, {&caches[1]});
  test::Chunk<> again{random, plan.shape(), 64};
  CHECK(batch
            .step(0, sequences, std::vector<std::int32_t>{0, 64}, again.q.view(), again.k.view(),
                  again.v.view(), again.out.view())
            .empty());
  CHECK(caches[1].tokens() == 7 * 16);
}

TEST_CASE("an engine's memory: storages that do not fit it are refused") {
  test::EngineMemory<float> memory{EngineLayout::vllm_nhd};
  PagePool pool{memory.pages()};
  PagePool other;
  const auto error = [](const StorageContext& context) {
    return thrown<ConfigError>([&] { EnginePageStorage<float>{{}, context}; });
  };
  CHECK(error({64, 16, &pool}).empty());
  CHECK(contains(error({64, 16, &other}), "must be an engine's"));
  CHECK(contains(error({64, 16}), "must be an engine's"));
  CHECK(contains(error({64, 32, &pool}), "have 16 rows of 256 bytes, the cache's 32 rows of 256 bytes"));
  CHECK(contains(error({32, 16, &pool}), "the cache's 16 rows of 128 bytes"));
  std::vector<float> tensor(1 + 2 * 16 * 64);
  PagePool odd{vllm_nhd(std::as_writable_bytes(std::span{tensor}).subspan(2, 2 * 16 * 256),
                        {.blocks = 1, .block_size = 16, .kv_heads = 1, .row_bytes = 256})};
  CHECK(contains(error({64, 16, &odd}), "lie at multiples of 2 bytes, must lie at multiples of 4"));
  // Pages of other storages may have the same size, but their rows lie otherwise.
  for (const std::size_t page_rows : {16, 32}) {
    CHECK(contains(thrown<ConfigError>([&] { DenseStorage<float>{{}, {64, page_rows, &pool}}; }),
                   "only EnginePageStorage knows how rows lie"));
  }
}

TEST_CASE("an engine's memory: a layer with a window stays in it") {
  test::EngineMemory<float> memory{EngineLayout::vllm_nhd};
  PagePool pool{memory.pages()};
  ModelShape shape{.layers = 2, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  shape.change(1).window = 20;
  const HeadPlan plan{shape, FullCache<EnginePageStorage<float>>::Config{}};
  CHECK(plan.at(1, 0) ==
        HeadSettings<float>{SinkRecentCache<EnginePageStorage<float>>::Config{.sinks = 0, .recent = 20}});
  KvCache cache{plan, {.page_rows = 16, .pool = &pool}};
  test::Random random{1};
  test::feed(cache, random, {50, 1});
  CHECK(cache.head(0, 0).rows() == 51);
  CHECK(cache.head(1, 0).rows() < 51);
}

TEST_CASE("an engine's memory in FP8: codes where the engine looks for them, and attention over them") {
  std::uint64_t seed = 40;
  for (const EngineLayout kind :
       {EngineLayout::vllm_nhd, EngineLayout::flashinfer_nhd, EngineLayout::flashinfer_hnd}) {
    test::check_engine_fp8<float, ScalarEngine>(kind, ++seed);
    test::check_engine_fp8<bfloat16, ScalarEngine>(kind, ++seed);
  }
  test::check_engine_fp8_budget<bfloat16, ScalarEngine>(++seed);
}

TEST_CASE(
    "an engine's memory in FP8: what does not fit is refused, and layers with a window keep the scales") {
  using Rows = EnginePageStorage<float, Codebook::fp8>;
  test::EngineMemory<std::uint8_t> memory{EngineLayout::vllm_nhd};
  PagePool pool{memory.pages()};
  const auto error = [&](const Rows::Config& config, std::size_t head_dim = 64) {
    return thrown<ConfigError>([&] { Rows{config, {head_dim, 16, &pool}}; });
  };
  CHECK(error({}).empty());
  CHECK(contains(error({.key_scale = 0}), "key_scale is 0, must be from 2^-60 to 2^60"));
  CHECK(contains(error({.value_scale = std::nan("")}), "value_scale is nan"));
  CHECK(contains(error({}, 32), "have 16 rows of 64 bytes, the cache's 16 rows of 32 bytes"));
  test::EngineMemory<float> plain{EngineLayout::vllm_nhd};
  PagePool other{plain.pages()};
  CHECK(contains(thrown<ConfigError>([&] { Rows{{}, {64, 16, &other}}; }),
                 "have 16 rows of 256 bytes, the cache's 16 rows of 64 bytes"));

  ModelShape shape{.layers = 2, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  shape.change(1).window = 20;
  const Rows::Config scales{.key_scale = 0.5, .value_scale = 0.25};
  const HeadPlan plan{shape, FullCache<Rows>::Config{.storage = scales}};
  CHECK(plan.at(1, 0) ==
        HeadSettings<float>{SinkRecentCache<Rows>::Config{.sinks = 0, .recent = 20, .storage = scales}});
  const HeadRule rule = plan.at(0, 0).rule(64);
  CHECK(rule.engine_pages);
  CHECK(rule.key_codebook == Codebook::fp8);
  CHECK(rule.key_scale == 0.5);
  CHECK(rule.value_scale == 0.25);

  // A number that FP8 cannot stand for is refused before anything changes.
  KvCache cache{plan, {.page_rows = 16, .pool = &pool}};
  test::Random random{1};
  test::feed(cache, random, {20});
  const auto before = test::dump(cache);
  test::Chunk<> chunk{random, shape, 2};
  chunk.v.at(1, 0, 3) = std::numeric_limits<float>::infinity();
  const std::string said = thrown<ShapeError>([&] { chunk.step(cache, 0); });
  CHECK(contains(said, "EnginePageStorage: value at position 21, channel 3 is inf"));
  CHECK(test::dump(cache) == before);
}
