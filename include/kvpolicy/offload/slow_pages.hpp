// SPDX-License-Identifier: Apache-2.0
//
// Moves the full pages of one plane to a slower tier of the pool. A full page never changes again, so
// it is written there once, as a whole; the page that is open stays in fast memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/storage/page_table.hpp>

namespace kvpolicy::offload {

/// Pages of a slower tier for one page table, whose first pages lie there. They are obtained before
/// rows change. Copying makes a fork, without reserved pages. The pool must outlive it. Not synchronised.
class SlowPages {
 public:
  SlowPages(PagePool& pool, std::size_t tier) noexcept : pool_{&pool}, tier_{tier} {}
  SlowPages(const SlowPages& other) noexcept : pool_{other.pool_}, tier_{other.tier_} {}
  SlowPages(SlowPages&&) noexcept = default;
  SlowPages& operator=(SlowPages other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(tier_, other.tier_);
    std::swap(reserved_, other.reserved_);
    return *this;
  }
  ~SlowPages() { release_reserved(); }

  /// How many pages of the table, from the first one on, lie in the tier.
  [[nodiscard]] std::size_t moved(const PageTable& table) const noexcept {
    const auto pages = table.pages();
    const auto fast =
        std::ranges::partition_point(pages, [&](PageId page) { return pool_->tier(page) == tier_; });
    return static_cast<std::size_t>(fast - pages.begin());
  }
  [[nodiscard]] std::size_t reserved() const noexcept { return reserved_.size(); }
  /// Bytes besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const noexcept { return reserved_.capacity() * sizeof(PageId); }

  /// Obtains slow pages until `count` are reserved.
  /// @throws std::bad_alloc, or what the tier's provider throws
  void reserve(std::size_t count, std::size_t page_bytes) {
    const std::size_t had = reserved_.size();
    if (count <= had) return;
    reserved_.resize(count, no_page);
    KVPOLICY_TRY { pool_->allocate(page_bytes, std::span{reserved_}.subspan(had), tier_); }
    KVPOLICY_CATCH_ALL {
      reserved_.resize(had);
      KVPOLICY_RETHROW;
    }
  }
  /// Moves the next `count` pages of the table to reserved ones. Forks that share them keep the page
  /// they have.
  /// @throws StorageError, std::bad_alloc: the pages stay in fast memory then
  void move(PageTable& table, std::size_t count, std::size_t page_bytes) {
    if (count == 0) return;
    thread_local std::vector<PageProvider::Copy> copies;
    copies.clear();
    const std::size_t first = moved(table);
    for (std::size_t i = 0; i < count; ++i) {
      copies.push_back({pool_->address(reserved_[i]), table.address(first + i), page_bytes});
    }
    pool_->provider(tier_)->write(copies);
    for (std::size_t i = 0; i < count; ++i) table.replace(first + i, reserved_[i]);
    reserved_.erase(reserved_.begin(), reserved_.begin() + static_cast<std::ptrdiff_t>(count));
  }
  void release_reserved() noexcept {
    for (const PageId page : reserved_) pool_->release(page);
    reserved_.clear();
  }

 private:
  PagePool* pool_;
  std::size_t tier_;
  std::vector<PageId> reserved_;
};

}  // namespace kvpolicy::offload
