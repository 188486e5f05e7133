// SPDX-License-Identifier: Apache-2.0
//
// One block of a memory resource, given back when its owner dies. A cache's own rows (tail, kept
// queries) lie in such blocks: they have one owner and one size for good, so they are no pages.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <utility>

#include <kvpolicy/memory/page_provider.hpp>

namespace kvpolicy {

/// Owns `bytes()` bytes, aligned to PageProvider::page_alignment. Not synchronised.
class Buffer {
 public:
  Buffer() = default;
  /// Contents are unspecified. `memory` must outlive the buffer.
  /// @throws std::bad_alloc, or what `memory` throws
  Buffer(std::pmr::memory_resource* memory, std::size_t bytes)
      : memory_{memory},
        bytes_{bytes},
        start_{static_cast<std::byte*>(memory->allocate(bytes, PageProvider::page_alignment))} {}
  Buffer(Buffer&& other) noexcept
      : memory_{other.memory_},
        bytes_{std::exchange(other.bytes_, 0)},
        start_{std::exchange(other.start_, nullptr)} {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(start_, other.start_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (start_ != nullptr) memory_->deallocate(start_, bytes_, PageProvider::page_alignment);
  }

  /// Gives the memory back; size and resource stay for `obtain`.
  void release() noexcept {
    if (start_ != nullptr) memory_->deallocate(start_, bytes_, PageProvider::page_alignment);
    start_ = nullptr;
  }
  /// Obtains it again after `release`, with unspecified contents.
  /// @throws std::bad_alloc, or what the resource throws
  void obtain() { start_ = static_cast<std::byte*>(memory_->allocate(bytes_, PageProvider::page_alignment)); }

  [[nodiscard]] std::byte* get() const noexcept { return start_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// The resource that the buffer was made with; null for an empty one.
  [[nodiscard]] std::pmr::memory_resource* memory() const noexcept { return memory_; }

 private:
  std::pmr::memory_resource* memory_ = nullptr;
  std::size_t bytes_ = 0;
  std::byte* start_ = nullptr;
};

}  // namespace kvpolicy
