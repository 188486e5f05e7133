// SPDX-License-Identifier: Apache-2.0
//
// A block's shared memory: exactly as large as the launch requested, between guard zones, and full of NaN
// until it is written. AddressSanitizer stops at the first access to a guard zone; without it, writes to a
// guard zone are found when the block ends.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "fiber.hpp"

namespace kvpolicy::gpu::simt {

/// A NaN as float, float16 and bfloat16, and a wild index as an integer.
inline constexpr std::uint32_t poison_word = 0x7fc07fc0U;

/// Fills memory with poison_word, also where `bytes` is not a multiple of 4.
inline void poison(void* address, std::size_t bytes) {
  static const std::array<std::uint32_t, 64> pattern = [] {
    std::array<std::uint32_t, 64> words;
    words.fill(poison_word);
    return words;
  }();
  auto* at = static_cast<std::byte*>(address);
  while (bytes > 0) {
    const std::size_t part = std::min(bytes, sizeof pattern);
    std::memcpy(at, pattern.data(), part);
    at += part;
    bytes -= part;
  }
}

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { release(); }

  /// Resizes the memory to `bytes`; memory that has this size already is kept.
  void resize(std::size_t bytes) {
    if (data_ != nullptr && bytes == bytes_) return;
    release();
    data_ = static_cast<std::byte*>(::operator new(bytes + 2 * guard_bytes, alignment));
    bytes_ = bytes;
    std::memset(data_, guard_byte, guard_bytes);
    std::memset(data_ + guard_bytes + bytes_, guard_byte, guard_bytes);
    set_guards(true);
  }
  void fill_with_nan() { poison(begin(), bytes_); }

  [[nodiscard]] std::byte* begin() const { return data_ + guard_bytes; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] bool contains(const void* start, std::size_t bytes) const {
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    const auto first = reinterpret_cast<std::uintptr_t>(begin());
    return address >= first && bytes <= bytes_ && address - first <= bytes_ - bytes;
  }

  /// Whether no guard zone was written. Repairs the guard zones.
  [[nodiscard]] bool guards_are_whole() {
    if constexpr (KVPOLICY_SIMT_ASAN != 0) return true;  // a write would have been stopped
    bool whole = true;
    for (std::byte* zone : {data_, data_ + guard_bytes + bytes_}) {
      for (std::size_t i = 0; i < guard_bytes; ++i) {
        whole = whole && zone[i] == std::byte{guard_byte};
      }
      std::memset(zone, guard_byte, guard_bytes);
    }
    return whole;
  }

 private:
  static constexpr std::size_t guard_bytes = 8192;  // the size of two tiles of [16, 128] numbers
  static constexpr unsigned char guard_byte = 0xa5;
  static constexpr std::align_val_t alignment{1024};

  void set_guards([[maybe_unused]] bool closed) {
#if KVPOLICY_SIMT_ASAN
    std::byte* end_guard = data_ + guard_bytes + bytes_;
    if (closed) {
      ASAN_POISON_MEMORY_REGION(data_, guard_bytes);
      ASAN_POISON_MEMORY_REGION(end_guard, guard_bytes);
    } else {
      ASAN_UNPOISON_MEMORY_REGION(data_, bytes_ + 2 * guard_bytes);
    }
#endif
  }
  void release() {
    if (data_ == nullptr) return;
    set_guards(false);
    ::operator delete(data_, alignment);
    data_ = nullptr;
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvpolicy::gpu::simt
