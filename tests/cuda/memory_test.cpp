// SPDX-License-Identifier: Apache-2.0
//
// Blocks of device memory that several owners share, each on a stream of its own. On the emulation alone, which says
// what streams have done.
#if !defined(__CUDACC__)
#include <doctest/doctest.h>

#include <kvpolicy/cuda/memory.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t block_bytes = 256;

// Notes in which stream's order a block went back, and what was left to do then on the others.
class NotedMemory final : public gpu::MemoryResource {
 public:
  std::vector<cudaStream_t> given_back = {};

  void* allocate(std::size_t bytes, cudaStream_t) override {
    void* memory = nullptr;
    test::succeed(cudaMalloc(&memory, bytes));
    return memory;
  }
  void deallocate(void* memory, std::size_t, cudaStream_t stream) noexcept override {
    given_back.push_back(stream);
    test::succeed(cudaFreeAsync(memory, stream));
  }
};

// Puts work on the stream that sets `done`.
void work(const test::Stream& stream, bool& done) {
  test::succeed(cudaLaunchHostFunc(stream, [](void* flag) { *static_cast<bool*>(flag) = true; }, &done));
}

TEST_CASE("a block goes back after the work of all its owners, in the order of the last one's stream") {
  const test::LateStreams late;
  NotedMemory memory;
  const test::Stream a, b, c;
  bool done_a = false;
  bool done_b = false;
  bool unrelated = false;
  {
    gpu::DeviceBuffer first = gpu::allocate(&memory, block_bytes, a);
    CHECK_FALSE(first.is_shared());
    gpu::DeviceBuffer second = first.share(b);
    gpu::DeviceBuffer third = second.share(c);
    CHECK(first.is_shared());
    CHECK(third.get() == first.get());
    work(a, done_a);
    work(b, done_b);
    second = {};
    CHECK(first.is_shared());
    first = {};
    CHECK_FALSE(third.is_shared());
    work(b, unrelated);
    CHECK(memory.given_back.empty());
  }
  REQUIRE(memory.given_back.size() == 1);
  CHECK(memory.given_back[0] == c);
  CHECK_FALSE(done_a);
  c.wait();
  CHECK(done_a);
  CHECK(done_b);
  CHECK_FALSE(unrelated);
  CHECK(gpu::simt::live_bytes() == 0);
  b.wait();
}

TEST_CASE("the latest use of a stream counts, whoever let go of it") {
  const test::LateStreams late;
  NotedMemory memory;
  const test::Stream a, b;
  gpu::DeviceBuffer first = gpu::allocate(&memory, block_bytes, a);
  bool early = false;
  bool last = false;
  {
    const gpu::LastUse use = gpu::LastUse::of_many(b);
    gpu::DeviceBuffer blocks[3] = {first.share(b), first.share(b), first.share(b)};
    work(b, early);
    for (gpu::DeviceBuffer& block : blocks) block.give_back_on(use);
  }
  {
    const gpu::DeviceBuffer later = first.share(b);
    work(b, last);
  }
  first = {};
  a.wait();
  CHECK(early);
  CHECK(last);
  CHECK(gpu::simt::live_bytes() == 0);
}

TEST_CASE("where there can be no event, the host waits") {
  const test::LateStreams late;
  for (std::uint64_t n = 1; n <= 4; ++n) {
    CAPTURE(n);
    NotedMemory memory;
    const test::Stream a, b;
    bool done = false;
    {
      gpu::DeviceBuffer first = gpu::allocate(&memory, block_bytes, a);
      gpu::DeviceBuffer second = first.share(b);
      work(b, done);
      gpu::simt::fail_after(n, cudaErrorUnknown);
      second = {};
    }
    gpu::simt::fail_after(0);
    static_cast<void>(cudaGetLastError());
    a.wait();
    CHECK(done);
    CHECK(gpu::simt::live_bytes() == 0);
  }
}

TEST_CASE("a pool keeps what was given back, until it is trimmed") {
  gpu::StreamOrderedMemory* memory = gpu::default_memory();
  const test::Stream stream;
  static_cast<void>(gpu::allocate(memory, block_bytes, stream));
  memory->trim();
  const auto& pool = *gpu::simt::device().pools().back();
  const std::size_t before = pool.growths;
  for (int round = 0; round < 5; ++round) {
    {
      const gpu::DeviceBuffer block = gpu::allocate(memory, block_bytes, stream);
    }
    stream.wait();
  }
  CHECK(pool.growths == before + 1);
  CHECK(pool.reserved == block_bytes);
  memory->trim();
  CHECK(pool.reserved == 0);
  CHECK(pool.used == 0);
}

TEST_CASE("owners move; nothing is nothing") {
  NotedMemory memory;
  gpu::DeviceBuffer none;
  CHECK(none == nullptr);
  CHECK(none.get() == nullptr);
  CHECK(none.share(nullptr) == nullptr);
  CHECK_FALSE(none.is_shared());
  gpu::DeviceBuffer block = gpu::allocate(&memory, block_bytes, nullptr);
  std::byte* const place = block.get();
  none = std::move(block);
  CHECK(none.get() == place);
  CHECK(block == nullptr);  // NOLINT(bugprone-use-after-move)
  gpu::DeviceBuffer other = gpu::allocate(&memory, block_bytes, nullptr);
  other = std::move(none);
  CHECK(memory.given_back.size() == 1);
  other = {};
  CHECK(memory.given_back.size() == 2);
  CHECK(gpu::simt::live_bytes() == 0);
}

}  // namespace
#endif
