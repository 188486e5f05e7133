// SPDX-License-Identifier: Apache-2.0
//
// Batches on the device: how many launches a step takes, who is left out when memory runs short, and what is
// refused before anything changes.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceCache;
using test::DeviceChunk;
using test::thrown;

namespace {

using E = float16;
using Sequence = BatchSequence<DeviceCache>;
constexpr ModelShape shape{2, 16, 8, 64};

// Caches of one engine, and the tensors of a batch of them.
struct Crowd {
  test::SmallDevice device;
  std::shared_ptr<gpu::Engine<E>> engine = std::make_shared<gpu::Engine<E>>(shape);
  gpu::Batch<E> batch{engine, 6};
  std::vector<std::unique_ptr<DeviceCache>> caches = {};
  std::vector<Sequence> sequences = {};
  test::Random random{5};

  DeviceCache& add(const test::DevicePlan& plan, const gpu::CacheOptions& options = {}) {
    caches.push_back(std::make_unique<DeviceCache>(plan, options, nullptr, engine));
    sequences.push_back({caches.back().get(), {}});
    return *caches.back();
  }
  // One step of a layer; sequence i has tokens[i] of them.
  std::span<const LeftOut> step(std::size_t layer, const std::vector<std::size_t>& tokens) {
    std::vector<std::int32_t> indptr{0};
    for (const std::size_t count : tokens) indptr.push_back(indptr.back() + static_cast<std::int32_t>(count));
    return step_at(layer, indptr, static_cast<std::size_t>(indptr.back()));
  }
  std::span<const LeftOut> step_at(std::size_t layer, const std::vector<std::int32_t>& indptr,
                                   std::size_t all) {
    const DeviceChunk<E> chunk{random, shape, all};
    const auto left_out =
        batch.step(layer, sequences, indptr, chunk.rows<const E>(chunk.q.data(), shape.q_heads, 0, all),
                   chunk.rows<const E>(chunk.k.data(), shape.kv_heads, 0, all),
                   chunk.rows<const E>(chunk.v.data(), shape.kv_heads, 0, all),
                   chunk.rows<E>(chunk.out.data(), shape.q_heads, 0, all));
    test::succeed(cudaStreamSynchronize(nullptr));
    return left_out;
  }
  [[nodiscard]] std::vector<test::Dump> dumps() const {
    std::vector<test::Dump> all;
    for (const auto& cache : caches) all.push_back(test::dump_device(*cache));
    return all;
  }
};

}  // namespace

#if !defined(__CUDACC__)  // only the emulation counts launches, and fails on demand
TEST_CASE(
    "a step of a batch is two launches, three with parts of prompts, however many sequences there are") {
  Crowd crowd;
  const auto launches = [&](const std::vector<std::size_t>& tokens) {
    const std::uint64_t before = gpu::simt::grid().launches;
    CHECK(crowd.step(0, tokens).empty());
    return gpu::simt::grid().launches - before;
  };
  // Of these heads those that choose chunks would need more.
  test::DevicePlan plan{shape};
  for (std::size_t head = 1; head < 8; ++head) {
    plan.set(0, head, SinkRecentCache<ResidualStorage<E>>::Config{.sinks = 4, .recent = 30});
  }
  for (std::size_t i = 0; i < 6; ++i) crowd.add(i % 2 == 0 ? plan : test::DevicePlan{shape}).reserve(300);
  const std::vector<std::size_t> one(6, 1);
  CHECK(launches(one) > 2);  // the table is written
  CHECK(launches(one) == 2);
  CHECK(launches(one) == 2);
  const std::vector<std::size_t> mixed{1, 12, 2, 0, 40, 1};
  CHECK(launches(mixed) > 3);
  CHECK(launches(mixed) == 3);
  CHECK(launches({30, 30, 30, 30, 30, 30}) > 2);
  CHECK(launches({30, 30, 30, 30, 30, 30}) == 2);
  CHECK(launches({0, 0, 0, 0, 0, 0}) == 0);
}

TEST_CASE("a sequence without memory is left out, the others go on") {
  test::CountingDeviceMemory memory;
  Crowd crowd;
  crowd.add(test::mixed_device_plan(shape));
  DeviceCache& poor = crowd.add(test::mixed_device_plan(shape), {.memory = &memory});
  crowd.add(test::mixed_device_plan(shape));
  for (std::size_t l = 0; l < shape.layers; ++l) CHECK(crowd.step(l, {20, 10, 30}).empty());
  const auto before = test::dump_device(poor);
  memory.fail_after(0);
  const auto left_out = crowd.step(0, {100, 100, 3});
  REQUIRE(left_out.size() == 1);
  CHECK(left_out[0].sequence == 1);
  CHECK_THROWS_AS(std::rethrow_exception(left_out[0].error), std::bad_alloc);
  CHECK(test::dump_device(poor) == before);
  CHECK(crowd.caches[0]->tokens(0) == 120);
  CHECK(crowd.caches[2]->tokens(0) == 33);
  memory.fail_after(test::never);
  CHECK(crowd.step(1, {100, 0, 3}).empty());
  CHECK(crowd.step(0, {0, 100, 0}).empty());
  CHECK(poor.tokens(0) == 110);
}
#endif

TEST_CASE("what does not fit a batch is refused, and no sequence has changed") {
  Crowd crowd;
  for (int i = 0; i < 3; ++i)
    crowd.add(test::mixed_device_plan(shape), {.max_rollback = 2, .max_tokens = 64});
  for (std::size_t l = 0; l < shape.layers; ++l) CHECK(crowd.step(l, {20, 10, 60}).empty());
  const auto before = crowd.dumps();
  const auto refused = [&]<class Error>(Error, const std::vector<std::size_t>& tokens,
                                        const std::string& says) {
    const std::string text = thrown<Error>([&] { crowd.step(0, tokens); });
    INFO(text);
    CHECK(contains(text, says));
    CHECK(crowd.dumps() == before);
  };
  refused(CapacityError{""}, {1, 1, 5}, "sequence 2");
  refused(ShapeError{""}, {1, 1}, "one more than the 3 sequences");
  CHECK(contains(thrown<ShapeError>([&] { crowd.step_at(0, {0, 2, 1, 3}, 3); }), "sequence 1: indptr falls"));
  CHECK(contains(thrown<ShapeError>([&] { crowd.step_at(0, {0, 1, 2, 3}, 4); }),
                 "must be from 0 to the 4 tokens"));
  crowd.sequences[1].options.softcap = 3.0F;
  refused(ConfigError{""}, {1, 1, 1}, "sequence 1 has another scale, soft cap or sink logits");
  crowd.sequences[1].options.softcap = 0.0F;
  crowd.sequences[1].options.selection_query = 7;
  refused(ShapeError{""}, {1, 1, 1}, "sequence 1");
  crowd.sequences[1].options.selection_query.reset();
  crowd.sequences[1].cache = crowd.sequences[0].cache;
  refused(ConfigError{""}, {1, 1, 1}, "a cache is listed twice");
  crowd.sequences[1].cache = nullptr;
  refused(ConfigError{""}, {1, 1, 1}, "sequence 1 has no cache");
  DeviceCache stranger{test::mixed_device_plan(shape)};
  crowd.sequences[1].cache = &stranger;
  refused(ConfigError{""}, {1, 1, 1}, "sequence 1 has another engine");
  DeviceCache other_pages{test::mixed_device_plan(shape), {.page_rows = 128}, nullptr, crowd.engine};
  crowd.sequences[1].cache = &other_pages;
  refused(ConfigError{""}, {1, 1, 1}, "sequence 1 has pages of 128 rows, sequence 0 of 64");
  crowd.sequences[1].cache = crowd.caches[1].get();
  const TokenTree tree = [] {
    TokenTree made;
    made.add(TokenTree::text);
    made.add(TokenTree::text);
    return made;
  }();
  crowd.sequences[1].options.tree = &tree;
  CHECK(crowd.step(0, {1, 2, 1}).empty());
  crowd.sequences[1].options.tree = nullptr;
  CHECK(contains(thrown<RollbackError>([&] { crowd.step(0, {1, 1, 1}); }), "sequence 1"));
  for (int i = 0; i < 4; ++i) crowd.add(test::mixed_device_plan(shape));
  CHECK(contains(thrown<ShapeError>([&] { crowd.step(0, {0, 0, 0, 0, 0, 0, 0}); }),
                 "7 sequences, the batch takes 6"));
  CHECK(contains(thrown<ConfigError>([&] { gpu::Batch<E>{crowd.engine, 0}; }),
                 "0 sequences in a call, must be 1 to 512"));
  CHECK(contains(thrown<ConfigError>([&] { gpu::Batch<E>{crowd.engine, 513}; }), "513 sequences in a call"));
  const test::Stream stream;
  test::succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const DeviceChunk<E> none{shape, 0};
  const std::vector<std::int32_t> indptr{0};
  CHECK(contains(thrown<CaptureError>([&] {
                   crowd.batch.step(0, {}, indptr, none.rows<const E>(none.q.data(), shape.q_heads, 0, 0),
                                    none.rows<const E>(none.k.data(), shape.kv_heads, 0, 0),
                                    none.rows<const E>(none.v.data(), shape.kv_heads, 0, 0),
                                    none.rows<E>(none.out.data(), shape.q_heads, 0, 0), stream);
                 }),
                 "a step of a batch cannot be part of a graph"));
  cudaGraph_t graph = nullptr;
  test::succeed(cudaStreamEndCapture(stream, &graph));
  test::succeed(cudaGraphDestroy(graph));
}
