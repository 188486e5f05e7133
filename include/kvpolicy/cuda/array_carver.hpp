// SPDX-License-Identifier: Apache-2.0
//
// Arrays that share one block of device memory.
#pragma once

#include <cstddef>

namespace kvpolicy::gpu {

/// Cuts one block of device memory into arrays; without a block it only counts the bytes that they need.
class ArrayCarver {
 public:
  explicit ArrayCarver(std::byte* start = nullptr) : start_{start} {}

  template <class T>
  [[nodiscard]] T* take(std::size_t count) {
    constexpr std::size_t alignment = 256;
    const std::size_t at = bytes_;
    bytes_ += (count * sizeof(T) + alignment - 1) / alignment * alignment;
    return start_ == nullptr ? nullptr : reinterpret_cast<T*>(start_ + at);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* start_;
  std::size_t bytes_ = 0;
};

}  // namespace kvpolicy::gpu
