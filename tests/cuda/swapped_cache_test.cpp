// SPDX-License-Identifier: Apache-2.0
//
// Device caches that are moved to pinned memory and back in between: they do what the set-based models of their
// heads say, take no device memory for rows meanwhile, and graphs that were captured before stay valid.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceCache;
using test::thrown;

namespace {

/// Goes away and comes back before some of its calls.
template <Element E>
class TravellingCache : public test::WaitingCache<E> {
 public:
  using Base = test::WaitingCache<E>;
  using Base::Base;
  explicit TravellingCache(Base base) : Base{std::move(base)} {}

  [[nodiscard]] TravellingCache fork() const { return TravellingCache{Base::fork()}; }
  template <class... Arguments>
  void step(Arguments&&... arguments) {
    travel();
    Base::step(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  void append(Arguments&&... arguments) {
    travel();
    Base::append(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  void attend(Arguments&&... arguments) {
    travel();
    Base::attend(std::forward<Arguments>(arguments)...);
  }

 private:
  void travel() {
    if (test::below(random_, 2) == 0) return;
    gpu::KvCache<E>& here = *this;
    const test::Dump before = test::dump_device(here, false);
    const std::size_t bytes = here.bytes();
    gpu::SwappedCache<E> away{std::move(here), *pinned_};
    CHECK(away.bytes() <= bytes);
    here = away.swap_in();
    CHECK(away.bytes() == 0);
    CHECK(here.bytes() <= bytes);
    CHECK(here.shared_bytes() == 0);
    CHECK(test::dump_device(here, false) == before);
  }

  std::shared_ptr<gpu::PinnedMemory> pinned_ = std::make_shared<gpu::PinnedMemory>();
  test::Random random_{99};
};

template <Element E>
struct TravellingBackend : test::DeviceBackend<E> {
  using Base = test::DeviceBackend<E>;
  using Cache = TravellingCache<E>;

  static std::size_t live_bytes(const std::vector<const Cache*>& caches) {
    std::size_t total = caches.front()->engine()->workspace_bytes();
    for (const Cache* cache : caches) total += cache->bytes() + cache->overhead_bytes();
    // A fork that went away and came back shares no page, and then the other one holds its pages alone.
    return total - (caches.size() > 1 ? caches.front()->shared_bytes() : 0);
  }
};

constexpr ModelShape shape{2, 16, 8, 64};

}  // namespace

TEST_CASE(
    "random operations on device caches that go away in between: every policy does what its model says") {
  const test::SmallDevice small;
  test::random_device_sequences<float16, TravellingBackend<float16>>(test::more_seeds(5), 14);
  test::random_device_sequences<test::OtherElement, TravellingBackend<test::OtherElement>>(
      test::more_seeds(6), 8);
}

TEST_CASE("a sequence that waits takes its tables alone, and comes back only where there is room") {
  const test::SmallDevice small;
  test::CountingDeviceMemory memory;
  gpu::PinnedMemory pinned;
  test::CountingDeviceMemory elsewhere{&pinned};
  const test::Stream stream;
  {
    DeviceCache cache{test::mixed_device_plan(shape), {.max_rollback = 3, .memory = &memory}, stream};
    test::feed_device(cache, 1, {150, 1, 1}, {.refresh_selection = true}, stream);
    cache.compress(stream);
    const auto before = test::dump_device(cache, true, stream);
    DeviceCache fork = cache.fork(stream);
    // Of each layer one head observes 8 queries, which stay.
    const std::size_t queries =
        shape.layers * (8 + cache.options().tail_rows()) * shape.q_heads * shape.head_dim * sizeof(float16);
    const std::size_t rows = cache.bytes() - queries;
    // Without room for the copy nothing changes.
    elsewhere.fail_after(0);
    CHECK_THROWS_AS((gpu::SwappedCache<float16>{std::move(cache), elsewhere, stream}), std::bad_alloc);
    elsewhere.fail_after(test::never);
    CHECK(test::dump_device(cache, true, stream) == before);
    fork.truncate(fork.tokens(), stream);
    const std::size_t together = memory.live_bytes();
    const std::size_t shared = cache.shared_bytes();
    CHECK(shared > 0);
    gpu::SwappedCache<float16> away{std::move(cache), elsewhere, stream};
    CHECK(away.tokens() == 152);
    CHECK(away.bytes() == rows);
    CHECK(elsewhere.live_bytes() == rows);
    // What both shared is the fork's alone; the rest of the rows is gone.
    CHECK(memory.live_bytes() == together - (rows - shared));
    const std::size_t waiting = memory.live_bytes();
    const std::size_t allocations = memory.allocations();
    for (std::size_t successes = 0;; ++successes) {
      memory.fail_after(successes);
      std::optional<DeviceCache> back;
      try {
        back.emplace(away.swap_in(stream));
      } catch (const std::bad_alloc&) {
        CHECK(memory.live_bytes() == waiting);
        CHECK(away.bytes() == rows);
        continue;
      }
      memory.fail_after(test::never);
      CHECK(successes > 10);
      CHECK(memory.allocations() > allocations);
      CHECK(back->bytes() == rows + queries);
      CHECK(back->shared_bytes() == 0);
      CHECK(elsewhere.live_bytes() == 0);
      CHECK(test::dump_device(*back, true, stream) == before);
      CHECK(test::same_bits(test::next_step(*back, 4, 9, {.read = Read::selected}, stream),
                            test::next_step(fork, 4, 9, {.read = Read::selected}, stream)));
      break;
    }
  }
  stream.wait();
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("a graph captured before a sequence went away serves it when it is back") {
  const test::SmallDevice small;
  gpu::PinnedMemory pinned;
  const test::Stream stream;
  DeviceCache cache{test::mixed_device_plan(shape), {}, stream};
  DeviceCache twin{test::mixed_device_plan(shape), {}, stream};
  for (DeviceCache* each : {&cache, &twin}) {
    test::feed_device(*each, 1, {70}, {.refresh_selection = true}, stream);
    each->compress(stream);
    each->reserve(200, stream);
  }
  test::Random random{2};
  const test::DeviceChunk<> chunk{random, shape, 1, stream};
  const auto put = [&](DeviceCache& to) {
    for (std::size_t l = 0; l < shape.layers; ++l) chunk.step(to, l, {.read = Read::selected}, stream);
  };
  const test::Graph graph{stream, [&] { put(cache); }};
  for (int i = 0; i < 6; ++i) {
    chunk.randomize(random, stream);
    gpu::SwappedCache<float16> away{std::move(cache), pinned, stream};
    cache = away.swap_in(stream);
    cache.replayed();
    graph.launch(stream);
    const std::vector<float> said = chunk.results(stream);
    put(twin);
    CHECK(test::same_bits(chunk.results(stream), said));
  }
  CHECK(test::dump_device(cache, false, stream) == test::dump_device(twin, false, stream));
}

TEST_CASE("pages of a pool go back to it, and come from it") {
  const test::SmallDevice small;
  gpu::PinnedMemory pinned;
  gpu::DeviceProvider provider;
  PagePool pool{std::array<PageProvider*, 1>{&provider}};
  DeviceCache cache{test::mixed_device_plan(shape), {.pool = &pool}};
  test::feed_device(cache, 1, {150});
  const auto before = test::dump_device(cache);
  const std::size_t live = pool.live_bytes();
  gpu::SwappedCache<float16> away{std::move(cache), pinned};
  CHECK(pool.live_bytes() == 0);
  cache = away.swap_in();
  CHECK(pool.live_bytes() == live);
  CHECK(test::dump_device(cache) == before);
}

TEST_CASE("what cannot be moved out is refused and stays") {
  const test::SmallDevice small;
  gpu::PinnedMemory pinned;
  const test::Stream stream;
  DeviceCache slow{test::DevicePlan{shape}, {.slow_memory = &pinned}, stream};
  test::feed_device(slow, 1, {70}, {}, stream);
  CHECK(contains(thrown<ConfigError>([&] { gpu::SwappedCache<float16>{std::move(slow), pinned, stream}; }),
                 "may have rows in slow memory"));
  CHECK(slow.tokens() == 70);
  DeviceCache cache{test::DevicePlan{shape}, {}, stream};
  test::succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(contains(thrown<CaptureError>([&] { gpu::SwappedCache<float16>{std::move(cache), pinned, stream}; }),
                 "moving a sequence out cannot be part of a graph"));
  cudaGraph_t graph = nullptr;
  test::succeed(cudaStreamEndCapture(stream, &graph));
  test::succeed(cudaGraphDestroy(graph));
  gpu::SwappedCache<float16> away{std::move(cache), pinned, stream};
  CHECK(thrown<ConfigError>([&] { static_cast<void>(cache.tokens()); }) != "");
  cache = away.swap_in(stream);
  CHECK_THROWS_AS(static_cast<void>(away.swap_in(stream)), ConfigError);
  CHECK(cache.tokens() == 0);
  // A sequence that never comes back.
  test::feed_device(cache, 1, {70}, {}, stream);
  const gpu::SwappedCache<float16> never{std::move(cache), pinned, stream};
  CHECK(never.bytes() > 0);
}
