// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu/huge_pages.hpp>

#include "support/sanitizer.hpp"

namespace {
using kvpolicy::cpu::HugePages;

struct Block {
  std::byte* memory;
  std::size_t bytes;
  std::size_t alignment;
  std::byte filling;
};

bool holds(const Block& block) {
  return std::all_of(block.memory, block.memory + block.bytes,
                     [&](std::byte b) { return b == block.filling; });
}

TEST_CASE("allocations are aligned, do not overlap and keep their contents") {
  HugePages pages{1};
  std::mt19937 random{3};
  const std::vector<std::size_t> sizes{0, 1, 63, 64, 65, 4352, 16384, 16385, 300000, 3000000};
  const std::vector<std::size_t> alignments{1, 8, 64, 256, 4096};
  std::vector<Block> blocks;
  for (int i = 0; i < 3000; ++i) {
    if (blocks.empty() || random() % 5 < 3) {
      Block block{nullptr, sizes[random() % (i % 100 == 0 ? 10 : 9)],
                  alignments[random() % alignments.size()], static_cast<std::byte>(random())};
      block.memory = static_cast<std::byte*>(pages.allocate(block.bytes, block.alignment));
      REQUIRE(reinterpret_cast<std::uintptr_t>(block.memory) % block.alignment == 0);
      std::fill_n(block.memory, block.bytes, block.filling);
      blocks.push_back(block);
    } else {
      const std::size_t which = random() % blocks.size();
      REQUIRE(holds(blocks[which]));
      pages.deallocate(blocks[which].memory, blocks[which].bytes, blocks[which].alignment);
      blocks[which] = blocks.back();
      blocks.pop_back();
    }
  }
  for (const Block& block : blocks) CHECK(holds(block));
  std::map<std::byte*, std::byte*> ends;
  for (const Block& block : blocks) {
    if (block.bytes > 0) ends[block.memory] = block.memory + block.bytes;
  }
  const std::byte* end = nullptr;
  for (const auto& [first, last] : ends) {
    CHECK(first >= end);
    end = last;
  }
}

TEST_CASE("freed memory is reused for allocations of its size") {
  HugePages pages{HugePages::page_bytes};
  std::vector<void*> blocks;
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 100; ++i) blocks.push_back(pages.allocate(16384, 64));
    for (void* block : blocks) pages.deallocate(block, 16384, 64);
    blocks.clear();
  }
  CHECK(pages.reserved_bytes() == HugePages::page_bytes);
  void* large = pages.allocate(5 * HugePages::page_bytes + 1, 64);
  CHECK(pages.reserved_bytes() == 7 * HugePages::page_bytes);
  pages.deallocate(large, 5 * HugePages::page_bytes + 1, 64);
  CHECK(pages.allocate(5 * HugePages::page_bytes + 1, 64) == large);
  pages.deallocate(large, 5 * HugePages::page_bytes + 1, 64);
}

#if !defined(KVPOLICY_TEST_ASAN)  // which ends the program instead
TEST_CASE("too large an allocation is std::bad_alloc and changes nothing") {
  HugePages pages;
  for (const std::size_t bytes :
       {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() / 2}) {
    CHECK_THROWS_AS((void)pages.allocate(bytes, 64), std::bad_alloc);
  }
  CHECK(pages.reserved_bytes() == 0);
  void* block = pages.allocate(100, 64);
  std::memset(block, 1, 100);
  pages.deallocate(block, 100, 64);
}
#endif

TEST_CASE("many threads may allocate at once") {
  HugePages pages;
  std::vector<std::thread> threads;
  std::vector<char> right(4, 0);
  for (std::size_t t = 0; t < right.size(); ++t) {
    threads.emplace_back([&pages, &right, t] {
      bool all = true;
      for (int round = 0; round < 50; ++round) {
        std::vector<Block> blocks;
        for (std::size_t i = 1; i < 30; ++i) {
          blocks.push_back(
              {static_cast<std::byte*>(pages.allocate(i * 100, 64)), i * 100, 64, static_cast<std::byte>(t)});
          std::fill_n(blocks.back().memory, i * 100, blocks.back().filling);
        }
        for (const Block& block : blocks) {
          all = all && holds(block);
          pages.deallocate(block.memory, block.bytes, block.alignment);
        }
      }
      right[t] = all ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(std::count(right.begin(), right.end(), 1) == 4);
}

}  // namespace
