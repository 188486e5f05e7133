// SPDX-License-Identifier: Apache-2.0
//
// Where the memory of a tier comes from. A pool (memory/page_pool.hpp) asks a provider for slabs of
// pages and knows nothing else about the tier: memory of the host, pinned memory, a file.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <span>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Gives and takes the memory of one tier. What it gives are ordinary addresses, aligned to
/// `page_alignment`. A pool calls `obtain` and `give_back` under its lock; a provider that several pools
/// share must be safe for several threads, and none may call the pool that calls it.
///
/// A fast tier implements the first two functions. A slow tier (a file, say) also implements the
/// others: pages are written to it once, as a whole, and fetched before they are read. Reading what
/// was not fetched is allowed and may wait.
class PageProvider {
 public:
  using Range = std::span<const std::byte>;
  /// `bytes` bytes from anywhere, to an address of this provider.
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };
  /// A cache line, and the widest vector.
  static constexpr std::size_t page_alignment = 64;

  PageProvider() = default;
  PageProvider(const PageProvider&) = delete;
  PageProvider& operator=(const PageProvider&) = delete;
  virtual ~PageProvider() = default;

  /// @throws std::bad_alloc, StorageError
  [[nodiscard]] virtual std::byte* obtain(std::size_t bytes) = 0;
  /// Takes back what `obtain(bytes)` gave.
  virtual void give_back(std::byte* start, std::size_t bytes) noexcept = 0;

  /// Whether an address lies in memory that must be fetched before it is read.
  [[nodiscard]] virtual bool holds(const std::byte*) const noexcept { return false; }
  /// Waits until all these ranges can be read at the speed of memory.
  /// @throws StorageError if one cannot be read, std::bad_alloc
  virtual void fetch(std::span<const Range>) {}
  /// Begins to fetch ranges that will be read soon, and does not wait.
  virtual void fetch_ahead(std::span<const Range>) noexcept {}
  /// Fills pages of this tier. When it returns, the sources may be overwritten.
  /// @throws StorageError, std::bad_alloc; the contents of the targets are unspecified then.
  virtual void write(std::span<const Copy> copies) {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  }
};

/// A tier over any memory resource, which must outlive it.
class ResourceProvider final : public PageProvider {
 public:
  /// @throws ConfigError if `memory` is null
  explicit ResourceProvider(std::pmr::memory_resource* memory) : memory_{memory} {
    require(memory != nullptr, "ResourceProvider: memory is null, must be a memory resource");
  }

  [[nodiscard]] std::byte* obtain(std::size_t bytes) override {
    return static_cast<std::byte*>(memory_->allocate(bytes, page_alignment));
  }
  void give_back(std::byte* start, std::size_t bytes) noexcept override {
    memory_->deallocate(start, bytes, page_alignment);
  }

 private:
  std::pmr::memory_resource* memory_;
};

}  // namespace kvpolicy
