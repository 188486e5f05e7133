// SPDX-License-Identifier: Apache-2.0
//
// An array that grows without moving its elements, so that threads read elements while another
// thread adds some.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <memory>

namespace kvpolicy::detail {

/// Elements lie in chunks, each twice as large as the one before it. One thread at a time may call
/// `grow`. An element, and the pointer to its chunk, are memory locations of their own: reading
/// element i races with nothing that `grow` writes, and is ordered after the `grow` that made it by
/// whatever told the reader that i exists.
template <class T, std::size_t first_chunk = 8>
class StableArray {
 public:
  [[nodiscard]] T& operator[](std::size_t index) noexcept { return *find(index); }
  [[nodiscard]] const T& operator[](std::size_t index) const noexcept { return *find(index); }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The memory of all chunks.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return ((first_chunk << chunks_) - first_chunk) * sizeof(T);
  }

  /// Makes room for one more element. @throws std::bad_alloc
  void reserve_one() {
    if (size_ < (first_chunk << chunks_) - first_chunk) return;
    chunk_[chunks_] = std::make_unique<T[]>(first_chunk << chunks_);
    ++chunks_;
  }
  /// Adds an element, for which there must be room.
  void grow() noexcept { ++size_; }

 private:
  static_assert(std::has_single_bit(first_chunk));

  // Chunk k begins at element first_chunk * (2^k - 1).
  [[nodiscard]] T* find(std::size_t index) const noexcept {
    const std::size_t shifted = index + first_chunk;
    const auto bits = static_cast<std::size_t>(std::bit_width(shifted)) - 1;
    constexpr auto first_bits = static_cast<std::size_t>(std::bit_width(first_chunk)) - 1;
    return chunk_[bits - first_bits].get() + (shifted ^ (std::size_t{1} << bits));
  }

  std::array<std::unique_ptr<T[]>, 32> chunk_;
  std::size_t chunks_ = 0;
  std::size_t size_ = 0;
};

}  // namespace kvpolicy::detail
