// SPDX-License-Identifier: Apache-2.0
//
// A memory resource that counts, fails on demand and detects writes outside its allocations.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory_resource>
#include <new>

namespace test {

inline constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

/// Each allocation is between guard zones and filled with one byte, so that numbers that were never written are
/// detected: 0xA5 makes a large negative float, and no NaN of any type.
class CountingResource : public std::pmr::memory_resource {
 public:
  explicit CountingResource(std::byte fill = std::byte{0xA5}) : fill_{fill} {}
  CountingResource(const CountingResource&) = delete;
  CountingResource& operator=(const CountingResource&) = delete;
  ~CountingResource() override {
    for (const auto& [start, block] : blocks_) std::free(block.base);
  }

  [[nodiscard]] std::size_t live_bytes() const { return live_; }
  [[nodiscard]] std::size_t live_blocks() const { return blocks_.size(); }
  [[nodiscard]] std::size_t peak_bytes() const { return peak_; }
  [[nodiscard]] std::size_t allocations() const { return allocations_; }
  [[nodiscard]] std::size_t failures() const { return failures_; }
  /// Number of deallocations with a wrong size or address, and of allocations whose guard zones were written.
  [[nodiscard]] std::size_t faults() const {
    std::size_t faults = faults_;
    for (const auto& [start, block] : blocks_) faults += is_intact(start, block) ? 0 : 1;
    return faults;
  }

  /// Makes every allocation after the next `successes` ones fail, until it is called again.
  void fail_after(std::size_t successes) { left_ = successes; }
  void reset_peak() { peak_ = live_; }

 private:
  static constexpr std::size_t zone = 64;

  struct Block {
    std::byte* base;
    std::size_t bytes;
    std::size_t alignment;
  };

  static bool is_intact(std::byte* start, const Block& block) {
    for (std::size_t i = 0; i < zone; ++i) {
      if (start[block.bytes + i] != std::byte{0x5A} || *(start - 1 - i) != std::byte{0x5A}) return false;
    }
    return true;
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (left_ == 0) {
      ++failures_;
      throw std::bad_alloc{};
    }
    if (left_ != never) --left_;
    const std::size_t front = alignment > zone ? alignment : zone;
    const std::size_t total = (front + bytes + zone + front - 1) / front * front;
    auto* base = static_cast<std::byte*>(std::aligned_alloc(front, total));
    if (base == nullptr) throw std::bad_alloc{};
    std::memset(base, 0x5A, total);
    std::byte* start = base + front;
    std::memset(start, std::to_integer<int>(fill_), bytes);
    try {
      blocks_[start] = {base, bytes, alignment};
    } catch (...) {  // in tests `new` may fail as well
      std::free(base);
      throw;
    }
    live_ += bytes;
    peak_ = live_ > peak_ ? live_ : peak_;
    ++allocations_;
    return start;
  }

  void do_deallocate(void* address, std::size_t bytes, std::size_t alignment) override {
    const auto found = blocks_.find(static_cast<std::byte*>(address));
    if (found == blocks_.end()) {
      ++faults_;
      return;
    }
    const Block& block = found->second;
    if (block.bytes != bytes || block.alignment != alignment || !is_intact(found->first, block)) ++faults_;
    live_ -= block.bytes;
    std::free(block.base);
    blocks_.erase(found);
  }

  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  std::byte fill_;
  std::map<std::byte*, Block> blocks_;
  std::size_t live_ = 0;
  std::size_t peak_ = 0;
  std::size_t allocations_ = 0;
  std::size_t faults_ = 0;
  std::size_t failures_ = 0;
  std::size_t left_ = never;
};

}  // namespace test
