// SPDX-License-Identifier: Apache-2.0
//
// Slow memory for tests: it counts, can fail at any of its calls, and checks its blocks.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <vector>

#include <kvpolicy/memory/slow_memory.hpp>

#include "support/memory.hpp"

namespace test {

/// Allocations, fetches and writes are numbered together. Read-aheads cannot fail.
class FailingSlowMemory : public kvpolicy::SlowMemory {
 public:
  FailingSlowMemory() = default;

  [[nodiscard]] std::size_t live_bytes() const { return blocks_.live_bytes(); }
  [[nodiscard]] std::size_t live_blocks() const { return blocks_.live_blocks(); }
  [[nodiscard]] std::size_t faults() const { return blocks_.faults(); }
  [[nodiscard]] std::size_t calls() const { return calls_; }
  [[nodiscard]] std::size_t failures() const { return failures_; }
  [[nodiscard]] std::size_t written_bytes() const { return written_; }
  /// Bytes fetched since the last call of this function.
  [[nodiscard]] std::size_t take_fetched_bytes() {
    const std::size_t bytes = fetched_;
    fetched_ = 0;
    return bytes;
  }

  /// Makes every call after the next `successes` ones fail, until it is called again.
  void fail_after(std::size_t successes) { left_ = successes; }

  [[nodiscard]] bool holds(const std::byte* address) const noexcept override {
    const auto after = starts_.upper_bound(address);
    if (after == starts_.begin()) return false;
    const auto block = std::prev(after);
    return address < block->first + block->second;
  }
  void fetch(std::span<const Range> ranges) override {
    if (ranges.empty()) return;
    count_call();
    for (const Range& range : ranges) fetched_ += range.size();
  }
  void fetch_ahead(std::span<const Range>) noexcept override {}
  void write(std::span<const Copy> copies) override {
    count_call();
    for (const Copy& copy : copies) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      written_ += copy.bytes;
    }
  }

 private:
  void count_call() {
    if (left_ == 0) {
      ++failures_;
      throw kvpolicy::StorageError{"FailingSlowMemory: told to fail"};
    }
    if (left_ != never) --left_;
    ++calls_;
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    count_call();
    auto* start = static_cast<std::byte*>(blocks_.allocate(bytes, alignment));
    try {
      starts_[start] = bytes;
    } catch (...) {
      blocks_.deallocate(start, bytes, alignment);
      throw;
    }
    return start;
  }
  void do_deallocate(void* start, std::size_t bytes, std::size_t alignment) override {
    starts_.erase(static_cast<std::byte*>(start));
    blocks_.deallocate(start, bytes, alignment);
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }

  CountingResource blocks_;
  std::map<const std::byte*, std::size_t> starts_;
  std::size_t calls_ = 0;
  std::size_t failures_ = 0;
  std::size_t written_ = 0;
  std::size_t fetched_ = 0;
  std::size_t left_ = never;
};

}  // namespace test
