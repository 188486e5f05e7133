// SPDX-License-Identifier: Apache-2.0
//
// A memory resource that counts its allocations and can refuse to exceed a limit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory_resource>
#include <new>

namespace kvpolicy::testing {

class LimitedResource final : public std::pmr::memory_resource {
 public:
  explicit LimitedResource(std::size_t limit = std::numeric_limits<std::size_t>::max()) : limit_{limit} {}

  [[nodiscard]] std::size_t live() const { return live_; }
  [[nodiscard]] std::size_t peak() const { return peak_; }
  void forget_peak() { peak_ = live_; }

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (bytes > limit_ - live_) throw std::bad_alloc{};
    void* block = std::pmr::new_delete_resource()->allocate(bytes, alignment);
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    return block;
  }
  void do_deallocate(void* block, std::size_t bytes, std::size_t alignment) override {
    live_ -= bytes;
    std::pmr::new_delete_resource()->deallocate(block, bytes, alignment);
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::size_t limit_;
  std::size_t live_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace kvpolicy::testing
