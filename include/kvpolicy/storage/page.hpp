// SPDX-License-Identifier: Apache-2.0
//
// Pages: the unit in which row memory is asked for, shared between forks and given back.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <utility>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Alignment of every page: a cache line, and the widest vector.
inline constexpr std::size_t page_alignment = 64;

/// The largest head_dim of a storage.
inline constexpr std::size_t max_head_dim = 4096;

/// What a storage needs to know of the cache it serves.
struct StorageContext {
  std::size_t head_dim = 0;  ///< Channels of a key, and of a value unless `value_dim` says otherwise.
  std::size_t page_rows = 64;
  /// All row memory is asked of this resource; it must outlive the storage and its forks.
  std::pmr::memory_resource* memory = std::pmr::get_default_resource();
  /// Where full pages go; null: they stay. It must outlive the storage and its forks.
  std::pmr::memory_resource* slow_memory = nullptr;
  std::size_t value_dim = 0;  ///< Channels of a value; 0: as many as of a key.

  /// The same for rows that stay where they can be read at once, because they are few or read often.
  [[nodiscard]] StorageContext fast() const {
    StorageContext own = *this;
    own.slow_memory = nullptr;
    return own;
  }

  /// The same for the side that holds the values: its rows have `head_dim` channels there.
  [[nodiscard]] StorageContext of_values() const {
    StorageContext own = *this;
    own.head_dim = value_channels();
    return own;
  }
  [[nodiscard]] std::size_t value_channels() const { return value_dim == 0 ? head_dim : value_dim; }

  /// @throws ConfigError
  void validate() const {
    const auto fits = [](std::size_t channels) {
      return channels > 0 && channels % 8 == 0 && channels <= max_head_dim;
    };
    require(fits(head_dim), "StorageContext: head_dim is ", head_dim,
            ", must be a multiple of 8 from 8 to ", max_head_dim);
    require(fits(value_channels()), "StorageContext: value_dim is ", value_dim,
            ", must be 0 or a multiple of 8 from 8 to ", max_head_dim);
    require(std::has_single_bit(page_rows) && page_rows >= 16 && page_rows <= 4096,
            "StorageContext: page_rows is ", page_rows, ", must be a power of two from 16 to 4096");
    require(memory != nullptr, "StorageContext: memory is null, must be a memory resource");
  }
};

/// A block of row memory, counted: forks share a page once it is full and will not be written
/// again. Pages are let go of by the threads of all forks. Whoever finds that a page is not shared
/// any more may write it, because every read of the others happened before: the count falls by
/// release, and `is_shared` reads it by acquire. (std::shared_ptr::use_count promises no order.)
class Page {
 public:
  Page() = default;
  /// `bytes` bytes, aligned to `page_alignment`.
  /// @throws std::bad_alloc, or what `memory` throws.
  Page(std::pmr::memory_resource* memory, std::size_t bytes) {
    auto block = std::make_unique<Block>(memory, bytes);
    block->start = static_cast<std::byte*>(memory->allocate(bytes, page_alignment));
    block_ = block.release();
  }
  Page(const Page& other) noexcept : block_{other.block_} {
    if (block_ != nullptr) block_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Page(Page&& other) noexcept : block_{std::exchange(other.block_, nullptr)} {}
  Page& operator=(Page other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Page() {
    if (block_ == nullptr || block_->owners.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    block_->memory->deallocate(block_->start, block_->bytes, page_alignment);
    delete block_;
  }

  [[nodiscard]] std::byte* get() const noexcept {
    return block_ == nullptr ? nullptr : block_->start;
  }
  /// Whether another Page owns the same block, in this thread or another. `false` stays true until
  /// this Page itself is copied.
  [[nodiscard]] bool is_shared() const noexcept {
    return block_->owners.load(std::memory_order_acquire) > 1;
  }

 private:
  struct Block {
    Block(std::pmr::memory_resource* memory_, std::size_t bytes_)
        : memory{memory_}, bytes{bytes_} {}
    std::atomic<std::size_t> owners{1};
    std::pmr::memory_resource* memory;
    std::size_t bytes;
    std::byte* start = nullptr;
  };
  Block* block_ = nullptr;
};

}  // namespace kvpolicy
