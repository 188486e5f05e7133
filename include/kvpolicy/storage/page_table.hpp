// SPDX-License-Identifier: Apache-2.0
//
// The page table of one plane: the ids of its pages in the order of their rows, and their addresses
// as engines read them. Pages that were obtained for rows to come follow those in use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/page_pool.hpp>

namespace kvpolicy {

/// Owns pages of one size. An empty table takes 16 bytes, another one 12 bytes for each page besides,
/// in one block that at least doubles when it grows. Copying makes a fork: the pages in use are
/// shared, reserved ones are not. The pool must outlive the table. Not synchronised.
class PageTable {
 public:
  explicit PageTable(PagePool& pool) noexcept : pool_{&pool} {}
  /// @throws std::bad_alloc
  PageTable(const PageTable& other) : pool_{other.pool_} {
    if (other.size() == 0) return;
    grow_to(other.size());
    std::copy_n(other.starts(), other.size(), starts());
    std::copy_n(other.ids(), other.size(), ids());
    for (const PageId page : other.pages()) pool_->retain(page);
    block_->size = other.block_->size;
  }
  PageTable(PageTable&& other) noexcept : pool_{other.pool_}, block_{std::exchange(other.block_, nullptr)} {}
  PageTable& operator=(PageTable other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(block_, other.block_);
    return *this;
  }
  ~PageTable() {
    if (block_ == nullptr) return;
    for (const PageId page : std::span{ids(), size() + reserved()}) release(page);
    ::operator delete(block_);
  }

  [[nodiscard]] PagePool& pool() const noexcept { return *pool_; }
  /// Pages in use.
  [[nodiscard]] std::size_t size() const noexcept { return block_ == nullptr ? 0 : block_->size; }
  /// Pages that were reserved and not begun.
  [[nodiscard]] std::size_t reserved() const noexcept { return block_ == nullptr ? 0 : block_->reserved; }
  /// The ids of the pages in use.
  [[nodiscard]] std::span<const PageId> pages() const noexcept { return {ids(), size()}; }
  /// Their addresses, valid until the table next changes.
  [[nodiscard]] const std::byte* const* addresses() const noexcept { return starts(); }
  [[nodiscard]] std::byte* address(std::size_t index) const noexcept { return starts()[index]; }
  [[nodiscard]] bool is_shared(std::size_t index) const noexcept { return pool_->is_shared(ids()[index]); }
  /// How many of the pages in use a fork holds too.
  [[nodiscard]] std::size_t shared_pages() const noexcept {
    return static_cast<std::size_t>(
        std::ranges::count_if(pages(), [&](PageId page) { return pool_->is_shared(page); }));
  }
  /// Bytes besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const noexcept {
    return block_ == nullptr ? 0 : bytes_of(block_->capacity);
  }

  /// Obtains pages until `count` are reserved.
  /// @throws std::bad_alloc, or what the pool throws, with the table as it was
  void reserve(std::size_t count, std::size_t page_bytes) {
    if (reserved() >= count) return;
    grow_to(size() + count);
    const std::size_t first = size() + reserved();
    const std::size_t added = count - reserved();
    pool_->allocate(page_bytes, std::span{ids() + first, added});
    for (std::size_t i = first; i < first + added; ++i) starts()[i] = pool_->address(ids()[i]);
    block_->reserved = static_cast<std::uint32_t>(count);
  }
  /// The first reserved page becomes the last one in use.
  void begin_page() noexcept {
    KVPOLICY_ASSERT(reserved() > 0);
    ++block_->size;
    --block_->reserved;
  }
  /// Lets go of the first `count` pages in use. Those in the pool's fast tier that no fork shares become
  /// reserved pages, as long as there are fewer than `wanted` of these.
  void drop_front(std::size_t count, std::size_t wanted) noexcept {
    if (count == 0) return;
    std::size_t reused = 0;  // pages at the front that stay
    for (std::size_t i = 0; i < count; ++i) {
      if (reserved() + reused < wanted && !is_shared(i) && pool_->tier(ids()[i]) == 0) {
        ids()[reused] = ids()[i];
        starts()[reused++] = starts()[i];
      } else {
        pool_->release(ids()[i]);
      }
    }
    const auto close_gap = [&](auto* list) {
      const auto end = std::copy(list + count, list + size() + reserved(), list + reused);
      std::rotate(list, list + reused, end);
    };
    close_gap(ids());
    close_gap(starts());
    block_->size -= static_cast<std::uint32_t>(count);
    block_->reserved += static_cast<std::uint32_t>(reused);
  }
  /// Lets go of the pages in use after the first `count`. No page may be reserved.
  void drop_back(std::size_t count) noexcept {
    KVPOLICY_ASSERT(reserved() == 0 && count <= size());
    for (const PageId page : pages().subspan(count)) release(page);
    if (block_ != nullptr) block_->size = static_cast<std::uint32_t>(count);
  }
  /// Lets go of all reserved pages.
  void release_reserved() noexcept {
    if (block_ == nullptr) return;
    for (const PageId page : std::span{ids() + size(), reserved()}) pool_->release(page);
    block_->reserved = 0;
  }
  /// Another page, which becomes the table's, takes the place of one.
  void replace(std::size_t index, PageId page) noexcept {
    release(std::exchange(ids()[index], page));
    starts()[index] = pool_->address(page);
  }
  /// Moves pages to fuller slabs of the pool, as PagePool::consolidate has it. Returns how many moved.
  std::size_t consolidate() noexcept {
    const std::span pages{ids(), size() + reserved()};
    const std::size_t moved = pool_->consolidate(pages);
    if (moved == 0) return 0;
    for (std::size_t i = 0; i < pages.size(); ++i) starts()[i] = pool_->address(pages[i]);
    return moved;
  }
  /// Lets go of a page in use, whose place stays empty until `replace`. Until then the table must not be
  /// copied, and no row be read.
  void vacate(std::size_t index) noexcept {
    release(std::exchange(ids()[index], no_page));
    starts()[index] = nullptr;
  }
  /// A page becomes the table's, and the last one in use. No page may be reserved.
  /// @throws std::bad_alloc, after the page was let go of
  void add(PageId page) {
    KVPOLICY_ASSERT(reserved() == 0);
    KVPOLICY_TRY { grow_to(size() + 1); }
    KVPOLICY_CATCH_ALL {
      release(page);
      KVPOLICY_RETHROW;
    }
    ids()[size()] = page;
    starts()[size()] = pool_->address(page);
    ++block_->size;
  }

 private:
  // Followed by `capacity` addresses, then as many ids.
  struct alignas(std::byte*) Block {
    std::uint32_t capacity, size, reserved;
  };

  [[nodiscard]] static constexpr std::size_t bytes_of(std::size_t capacity) {
    return sizeof(Block) + capacity * (sizeof(std::byte*) + sizeof(PageId));
  }
  [[nodiscard]] std::byte** starts() const noexcept {
    return block_ == nullptr ? nullptr : reinterpret_cast<std::byte**>(block_ + 1);
  }
  [[nodiscard]] PageId* ids() const noexcept {
    return block_ == nullptr ? nullptr : reinterpret_cast<PageId*>(starts() + block_->capacity);
  }

  void release(PageId page) noexcept {
    if (page != no_page) pool_->release(page);
  }

  // Room for so many pages, in use or reserved.
  void grow_to(std::size_t pages) {
    const std::size_t old = block_ == nullptr ? 0 : block_->capacity;
    if (pages <= old) return;
    const std::size_t capacity = std::max(pages, 2 * old);
    if (capacity > std::numeric_limits<std::int32_t>::max()) throw_error(std::bad_alloc{});
    PageTable grown{*pool_};
    grown.block_ =
        ::new (::operator new(bytes_of(capacity))) Block{static_cast<std::uint32_t>(capacity), 0, 0};
    const std::size_t held = size() + reserved();
    std::copy_n(starts(), held, grown.starts());
    std::copy_n(ids(), held, grown.ids());
    if (block_ != nullptr) {
      grown.block_->size = std::exchange(block_->size, 0U);
      grown.block_->reserved = std::exchange(block_->reserved, 0U);
    }
    std::swap(block_, grown.block_);
  }

  PagePool* pool_;
  Block* block_ = nullptr;
};

}  // namespace kvpolicy
