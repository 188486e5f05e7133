// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <new>
#include <thread>
#include <vector>

#include <kvpolicy/memory/limited_memory.hpp>

TEST_CASE("limited memory keeps its limit whichever threads ask") {
  kvpolicy::LimitedMemory memory{10'000};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        try {
          void* block = memory.allocate(3'000);
          memory.deallocate(block, 3'000);
        } catch (const std::bad_alloc&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.peak_bytes() >= 3'000);
  CHECK(memory.peak_bytes() <= 10'000);
}
