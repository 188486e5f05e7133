// SPDX-License-Identifier: Apache-2.0
//
// Pages: the unit in which row memory is asked for, shared between forks and given back.
#pragma once

#include <cstddef>
#include <memory>
#include <memory_resource>

namespace kvpolicy {

/// Alignment of every page: a cache line, and the widest vector.
inline constexpr std::size_t page_alignment = 64;

/// What a storage needs to know of the cache it serves.
struct StorageContext {
  std::size_t head_dim = 0;
  std::size_t page_rows = 64;
  /// All row memory is asked of this resource; it must outlive the storage and its forks.
  std::pmr::memory_resource* memory = std::pmr::get_default_resource();
};

/// Reference-counted: forks share a page once it is full and will not be written again.
using Page = std::shared_ptr<std::byte>;

/// @throws std::bad_alloc, or what `memory` throws.
[[nodiscard]] inline Page allocate_page(std::pmr::memory_resource* memory, std::size_t bytes) {
  auto* start = static_cast<std::byte*>(memory->allocate(bytes, page_alignment));
  return {start, [memory, bytes](std::byte* page) { memory->deallocate(page, bytes, page_alignment); }};
}

}  // namespace kvpolicy
