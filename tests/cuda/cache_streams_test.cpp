// SPDX-License-Identifier: Apache-2.0
//
// Caches, their forks and their engines on several streams that nobody makes wait for each other: the same results as
// on one stream, whatever streams do first.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;

namespace {

// Memory of which nothing can be read any more once the stream that gave it back comes to that.
class RuinedMemory final : public gpu::MemoryResource {
 public:
  RuinedMemory() = default;
  RuinedMemory(const RuinedMemory&) = delete;
  RuinedMemory& operator=(const RuinedMemory&) = delete;
  ~RuinedMemory() override {
    CHECK(live_ == 0);
    for (void* each : given_back_) test::succeed(cudaFree(each));
  }
  void* allocate(std::size_t bytes, cudaStream_t) override {
    void* memory = nullptr;
    test::succeed(cudaMalloc(&memory, bytes));
    ++live_;
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, cudaStream_t stream) noexcept override {
    --live_;
    given_back_.push_back(memory);
    static_cast<void>(cudaMemsetAsync(memory, 0x7e, bytes, stream));  // NaN, as a number of 16 bits
  }

 private:
  std::size_t live_ = 0;
  std::vector<void*> given_back_;
};

// What a test works with: three streams and the calls' tensors.
struct Work {
  static constexpr std::array<std::size_t, 6> lengths = {90, 1, 3, 1, 20, 2};
  DevicePlan plan;
  RuinedMemory memory;
  test::Stream streams[3];
  std::vector<DeviceChunk<>> chunks;

  explicit Work(DevicePlan heads) : plan{std::move(heads)} {
    test::Random random{11};
    for (const std::size_t tokens : lengths) chunks.emplace_back(random, plan.shape(), tokens);
  }
  [[nodiscard]] gpu::CacheOptions options() {
    return {.max_rollback = 4, .max_append = 4, .memory = &memory};
  }
  [[nodiscard]] std::vector<float> results() const {
    for (const test::Stream& stream : streams) stream.wait();
    std::vector<float> all;
    for (const DeviceChunk<>& chunk : chunks) {
      const std::vector<float> own = chunk.results();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
};

[[nodiscard]] DevicePlan small_plan() {
  return test::plan_of<float16>({1, 2, 2, 64}, {{}, {.kind = test::Kind::window, .sinks = 4, .recent = 37}});
}

// body(work, s) puts calls on the streams s[0..2]: one and the same at first, then three that work in many orders.
template <class Body>
void check_orders(const DevicePlan& plan, Body body) {
  const test::SmallDevice device;
  const auto run = [&](bool apart, std::uint64_t seed) {
    Work work{plan};
    const test::LateStreams late{apart, seed};
    const cudaStream_t own[3] = {work.streams[0], work.streams[apart ? 1 : 0], work.streams[apart ? 2 : 0]};
    body(work, own);
    return work.results();
  };
  const std::vector<float> in_order = run(false, 0);
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CAPTURE(seed);
    CHECK(test::same_bits(run(true, seed), in_order));
  }
}

TEST_CASE("forks on streams of their own that go in any order") {
  for (const int first : {0, 1, 2}) {
    CAPTURE(first);
    check_orders(small_plan(), [&](Work& work, const cudaStream_t* s) {
      std::optional<DeviceCache> caches[3];
      caches[0].emplace(work.plan, work.options(), s[0]);
      work.chunks[0].step(*caches[0], 0, {}, s[0]);
      for (int i = 1; i < 3; ++i) {
        const auto engine = std::make_shared<gpu::Engine<float16>>(work.plan.shape(), &work.memory, s[i]);
        caches[i].emplace(caches[0]->fork(s[i], engine));
      }
      for (std::size_t i = 0; i < 3; ++i) work.chunks[1 + i].step(*caches[i], 0, {}, s[i]);
      for (int i = 0; i < 3; ++i) caches[(first + i) % 3].reset();
    });
  }
}

TEST_CASE("a cache goes on with another stream, and so do an engine's caches") {
  const DevicePlan plan =
      test::plan_of<float16>({1, 4, 4, 64}, {{},
                                             {.bits = 4, .residual = 20},
                                             {.kind = test::Kind::retrieval, .budget = 32, .chunk = 8},
                                             {.kind = test::Kind::budget, .budget = 30, .window = 8}});
  check_orders(plan, [](Work& work, const cudaStream_t* s) {
    const auto engine = std::make_shared<gpu::Engine<float16>>(work.plan.shape(), &work.memory, s[2]);
    DeviceCache cache{work.plan, work.options(), s[0], engine};
    DeviceCache other{work.plan, work.options(), s[1], engine};
    work.chunks[0].step(cache, 0, {}, s[1]);
    work.chunks[1].step(other, 0, {}, s[2]);
    work.chunks[2].step(cache, 0, {}, s[0]);
    cache.truncate(cache.tokens() - 2, s[2]);
    work.chunks[3].step(cache, 0, {.read = Read::selected, .refresh_selection = true}, s[1]);
    cache.reserve(1000, s[0]);
    work.chunks[4].step(other, 0, {}, s[1]);
    cache.compress(s[1]);
    work.chunks[5].step(cache, 0, {}, s[2]);
  });
}

TEST_CASE("a graph of a cache whose making is still on another stream") {
  const test::SmallDevice device;
  const auto run = [&](bool apart) {
    Work work{small_plan()};
    const test::LateStreams late{apart};
    const cudaStream_t made_on = apart ? nullptr : cudaStream_t{work.streams[0]};
    DeviceCache cache{work.plan, work.options(), made_on};
    cache.reserve(400, made_on);
    const test::Graph graph{work.streams[0], [&] { work.chunks[1].step(cache, 0, {}, work.streams[0]); }};
    cache.replayed(1);
    graph.launch(work.streams[0]);
    work.chunks[2].step(cache, 0, {}, made_on);
    return work.results();
  };
  CHECK(test::same_bits(run(true), run(false)));
}

#if !defined(__CUDACC__)
// Streams that work late let such kernels begin before the ones before them have done anything.
TEST_CASE("kernels that are launched early, as from Hopper on, give the same bits") {
  const test::SmallDevice device;
  const auto run = [&](int major) {
    gpu::simt::device().major = major;
    Work work{small_plan()};
    const test::LateStreams late;
    DeviceCache cache{work.plan, work.options(), work.streams[0]};
    CHECK(cache.engine()->launches_early() == (major >= 9));
    for (const DeviceChunk<>& chunk : work.chunks) chunk.step(cache, 0, {}, work.streams[0]);
    return work.results();
  };
  CHECK(test::same_bits(run(10), run(8)));  // 9 has kernels of its own
}
#endif

TEST_CASE("an engine outlives the streams that used it") {
  const test::SmallDevice device;
  const auto run = [&](bool apart) {
    Work work{small_plan()};
    const test::LateStreams late{apart};
    const auto engine =
        std::make_shared<gpu::Engine<float16>>(work.plan.shape(), &work.memory, work.streams[0]);
    for (std::size_t i = 0; i < 3; ++i) {
      const test::Stream stream;
      DeviceCache cache{work.plan, work.options(), stream, engine};
      work.chunks[i].step(cache, 0, {}, stream);
    }
    return work.results();
  };
  CHECK(test::same_bits(run(true), run(false)));
}

}  // namespace
