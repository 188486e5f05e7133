// SPDX-License-Identifier: Apache-2.0
//
// Pages: the unit in which row memory is asked for, shared between forks and given back.
#pragma once

#include <bit>
#include <cstddef>
#include <memory>
#include <memory_resource>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Alignment of every page: a cache line, and the widest vector.
inline constexpr std::size_t page_alignment = 64;

/// What a storage needs to know of the cache it serves.
struct StorageContext {
  std::size_t head_dim = 0;
  std::size_t page_rows = 64;
  /// All row memory is asked of this resource; it must outlive the storage and its forks.
  std::pmr::memory_resource* memory = std::pmr::get_default_resource();
  /// Where full pages go; null: they stay. It must outlive the storage and its forks.
  std::pmr::memory_resource* slow_memory = nullptr;

  /// The same for rows that stay where they can be read at once, because they are few or read often.
  [[nodiscard]] StorageContext fast() const {
    StorageContext own = *this;
    own.slow_memory = nullptr;
    return own;
  }

  /// @throws ConfigError
  void validate() const {
    require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= 4096, "StorageContext: head_dim is ",
            head_dim, ", must be a multiple of 8 from 8 to 4096");
    require(std::has_single_bit(page_rows) && page_rows >= 16 && page_rows <= 4096,
            "StorageContext: page_rows is ", page_rows, ", must be a power of two from 16 to 4096");
    require(memory != nullptr, "StorageContext: memory is null, must be a memory resource");
  }
};

/// Reference-counted: forks share a page once it is full and will not be written again.
using Page = std::shared_ptr<std::byte>;

/// A page of `bytes` bytes, aligned to `page_alignment`.
/// @throws std::bad_alloc, or what `memory` throws.
[[nodiscard]] inline Page allocate_page(std::pmr::memory_resource* memory, std::size_t bytes) {
  auto* start = static_cast<std::byte*>(memory->allocate(bytes, page_alignment));
  return {start, [memory, bytes](std::byte* page) { memory->deallocate(page, bytes, page_alignment); }};
}

}  // namespace kvpolicy
