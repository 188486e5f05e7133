// SPDX-License-Identifier: Apache-2.0
//
// Slow memory when things go wrong: either memory runs out, calls of the runtime fail, a cache goes
// while its rows are on their way.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cuda/support/slow_twins.hpp"

#if !defined(__CUDACC__)  // a device does not fail on demand

using namespace kvpolicy;
using test::contains;
using test::DeviceCache;
using test::DeviceChunk;
using test::SlowTwins;

namespace {

using E = float16;
constexpr ModelShape shape{3, 3, 3, 64};
constexpr AttendOptions selecting{.read = Read::selected};
constexpr AttendOptions choosing_after{.refresh_selection = true};

// A cache of 200 tokens beside one that never saw a failure.
struct Failing {
  test::SmallDevice device;
  test::Stream stream;
  SlowTwins twins{test::plan_with(shape, test::slow_heads()), {.max_rollback = 3, .latest_rows = 0}, stream};
  test::Random random{9};

  Failing() { REQUIRE(twins.step(random, 200, choosing_after)); }
  // Both did the same.
  void check() {
    twins.check_rows();
    CHECK(twins.step(random, 2, {}));
    CHECK(twins.step(random, 1, selecting));
    auto& memory = twins.memory();
    const DeviceCache& cache = twins.slow();
    CHECK(memory.live_bytes() == cache.bytes() + cache.overhead_bytes() + cache.engine()->workspace_bytes());
    CHECK(memory.faults() == 0);
  }
};

// `call(cache)` lacks memory at its n-th demand, for every n; of `which` of the two memories.
template <class Call>
std::size_t survive_lack(Failing& state, test::CountingDeviceMemory& which, Call call) {
  const auto before = test::dump_device(state.twins.slow(), true, state.stream);
  for (std::size_t failures = 0;; ++failures) {
    CAPTURE(failures);
    REQUIRE(failures < 500);
    which.fail_after(failures);
    bool failed = false;
    try {
      call(state.twins.slow());
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    which.fail_after(test::never);
    if (!failed) return failures;
    CHECK(test::dump_device(state.twins.slow(), true, state.stream) == before);
  }
}

}  // namespace

TEST_CASE("either memory runs out: the call did nothing") {
  for (const bool slow : {false, true}) {
    CAPTURE(slow);
    Failing state;
    auto& memory = state.twins.memory();
    test::CountingDeviceMemory& which = slow ? memory.slow : static_cast<test::CountingDeviceMemory&>(memory);
    CHECK(survive_lack(state, which, [&](DeviceCache& cache) { cache.reserve(400, state.stream); }) >= 7);
    state.twins.near().reserve(400, state.stream);
    CHECK(survive_lack(state, which, [&](DeviceCache& cache) {
            const DeviceCache fork = cache.fork(state.stream);
            CHECK(test::dump_device(fork, false, state.stream) ==
                  test::dump_device(cache, false, state.stream));
          }) >= 3);
    const DeviceChunk<> chunk{state.random, shape, 290, state.stream};  // passes the 400 and the pages of 448
    CHECK(survive_lack(state, which, [&](DeviceCache& cache) { chunk.step(cache, 0, {}, state.stream); }) >=
          2);
    chunk.step(state.twins.near(), 0, {}, state.stream);
    state.twins.both([&](DeviceCache& cache) {
      for (const std::size_t l : std::initializer_list<std::size_t>{1, 2})
        chunk.step(cache, l, {}, state.stream);
    });
    state.check();
  }
}

TEST_CASE("a call of the runtime fails: a step of all rows did nothing, and works the next time") {
  Failing state;
  std::size_t failures = 0;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const DeviceChunk<> chunk{state.random, shape, 1, state.stream};
    const DeviceChunk<> other{shape, 1};
    other.q.upload(chunk.q.download(state.stream), state.stream);
    other.k.upload(chunk.k.download(state.stream), state.stream);
    other.v.upload(chunk.v.download(state.stream), state.stream);
    const auto before = test::dump_device(state.twins.slow(), true, state.stream);
    for (std::uint64_t n = 1;; ++n) {
      CAPTURE(l);
      CAPTURE(n);
      REQUIRE(n < 1000);
      const std::uint64_t calls = gpu::simt::device().calls();
      gpu::simt::fail_after(n, cudaErrorLaunchFailure);
      bool failed = false;
      try {
        chunk.step(state.twins.slow(), l, {}, state.stream);
      } catch (const DeviceError& error) {
        failed = true;
        CHECK(contains(error.what(), "cudaErrorLaunchFailure"));
      }
      const bool done = gpu::simt::device().calls() - calls < n;
      gpu::simt::fail_after(0);
      CHECK(failed != done);  // no failure goes unnoticed
      if (done) break;
      ++failures;
      CHECK(test::dump_device(state.twins.slow(), true, state.stream) == before);
    }
    other.step(state.twins.near(), l, {}, state.stream);
    CHECK(test::same_bits(chunk.results(state.stream), other.results(state.stream)));
  }
  CHECK(failures >= 15);
  state.check();
}

TEST_CASE("a step that fails half-way through the layers is taken back") {
  Failing state;
  const std::size_t tokens = state.twins.near().tokens();
  bool failed = true;
  for (std::uint64_t n = 1; failed; n += 2) {
    CAPTURE(n);
    REQUIRE(n < 1000);
    const DeviceChunk<> chunk{state.random, shape, 1, state.stream};
    chunk.step(state.twins.slow(), 0, {}, state.stream);
    gpu::simt::fail_after(n, cudaErrorLaunchFailure);
    failed = false;
    try {
      chunk.step(state.twins.slow(), 1, {}, state.stream);
    } catch (const DeviceError&) {
      failed = true;
    }
    gpu::simt::fail_after(0);
    state.twins.slow().truncate(tokens, state.stream);
    // Layer 0 may find its rows where layer 2's were to come.
    const bool equal = state.twins.step(state.random, 1, {});
    CHECK(equal);
    state.twins.both([&](DeviceCache& cache) { cache.truncate(tokens, state.stream); });
  }
  state.check();
}

TEST_CASE("a runtime that fails leaks nothing, wherever it does") {
  Failing state;
  const std::size_t live = gpu::simt::live_bytes();
  const std::size_t live_blocks = state.twins.memory().live_blocks();
  const std::size_t streams = gpu::simt::device().streams();
  const DeviceChunk<> chunk{state.random, shape, 2, state.stream};
  const std::size_t with_chunk = gpu::simt::live_bytes();
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorLaunchFailure}) {
    bool done = false;
    for (std::uint64_t n = 1; !done; n += 1 + n / 5) {
      CAPTURE(n);
      const std::uint64_t calls = gpu::simt::device().calls();
      gpu::simt::fail_after(n, error);
      try {
        DeviceCache fork = state.twins.slow().fork(
            state.stream,
            std::make_shared<gpu::Engine<E>>(shape, state.twins.slow().options().memory, state.stream));
        chunk.step(fork, 0, {}, state.stream);
        chunk.step(fork, 0, {.read = Read::selected, .refresh_selection = true}, state.stream);
      } catch (const std::bad_alloc&) {
      } catch (const DeviceError&) {
      }
      done = gpu::simt::device().calls() - calls < n;
      gpu::simt::fail_after(0);
      cudaGetLastError();
      state.stream.wait();
      CHECK(gpu::simt::live_bytes() == with_chunk);
      CHECK(state.twins.memory().live_blocks() == live_blocks);
      CHECK(gpu::simt::device().streams() == streams);
    }
  }
  CHECK(live < with_chunk);
  state.check();
}

TEST_CASE("a cache that goes while its rows are on their way") {
  const test::SmallDevice device;
  const test::Stream stream;
  gpu::simt::device().late = true;
  const auto engine = std::make_shared<gpu::Engine<E>>(shape, gpu::default_memory(), stream);
  test::Random random{1};
  const DeviceChunk<> chunk{random, shape, 250, stream};
  const DeviceChunk<> next{random, shape, 1, stream};
  {
    gpu::PinnedMemory pinned;  // gone before the copies are done, were they not waited for
    DeviceCache cache{test::plan_with(shape, test::slow_heads()),
                      {.slow_memory = &pinned, .latest_rows = 0},
                      stream,
                      engine};
    for (std::size_t l = 0; l < shape.layers; ++l) chunk.step(cache, l, {}, stream);
    next.step(cache, 0, {}, stream);
    stream.wait();
    next.step(cache, 1, {}, stream);  // layer 2 has fewer rows than the others
  }
  stream.wait();
  CHECK(engine->staging_bytes() > 0);
}

TEST_CASE("pinned memory that is given back is used until its stream says so") {
  const test::SmallDevice device;
  const test::Stream stream;
  gpu::simt::device().late = true;
  const std::size_t allocations = gpu::simt::device().allocations();
  {
    gpu::PinnedMemory pinned;
    void* memory = pinned.allocate(64, stream);
    std::memset(memory, 7, 64);
    void* copy = nullptr;
    test::succeed(cudaMalloc(&copy, 64));
    test::succeed(cudaMemcpyAsync(copy, memory, 64, cudaMemcpyHostToDevice, stream));
    pinned.deallocate(memory, 64, stream);
    void* other = pinned.allocate(64, stream);
    CHECK(gpu::simt::device().allocations() == allocations + 3);  // the first one is still there
    pinned.deallocate(other, 64, stream);
    std::vector<unsigned char> numbers(64);
    test::succeed(cudaMemcpyAsync(numbers.data(), copy, 64, cudaMemcpyDeviceToHost, stream));
    stream.wait();
    CHECK(numbers[63] == 7);
    test::succeed(cudaFree(copy));
    void* again = pinned.allocate(64, stream);
    CHECK(gpu::simt::device().allocations() == allocations + 1);
    test::succeed(cudaMemsetAsync(again, 0, 64, stream));
    pinned.deallocate(again, 64, stream);
    gpu::simt::fail_after(2, cudaErrorMemoryAllocation);  // after the question whether `again` is free
    CHECK_NOTHROW(again = pinned.allocate(64, stream));   // which is waited for
    gpu::simt::fail_after(0);
    CHECK(gpu::simt::device().allocations() == allocations + 1);
    pinned.deallocate(again, 64, stream);
    stream.wait();
  }
  CHECK(gpu::simt::device().allocations() == allocations);
  gpu::PinnedMemory pinned;
  gpu::simt::fail_after(1, cudaErrorMemoryAllocation);
  CHECK_THROWS_AS(static_cast<void>(pinned.allocate(64, stream)), std::bad_alloc);
  gpu::simt::fail_after(1, cudaErrorUnknown);
  CHECK_THROWS_AS(static_cast<void>(pinned.allocate(64, stream)), DeviceError);
  CHECK(cudaGetLastError() == cudaSuccess);
}

#endif
