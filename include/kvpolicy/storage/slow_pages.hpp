// SPDX-License-Identifier: Apache-2.0
//
// Moves the full pages of one plane to a slower tier of the pool. A full page never changes again, so
// it is written there once, as a whole; the page that is open stays in fast memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/storage/page_table.hpp>

namespace kvpolicy {

/// Which pages of a plane lie in a slower tier: the first `moved()` of its table. Pages for those
/// that will follow are obtained before rows change. Copying makes a fork, without reserved pages.
/// The pool must outlive it. Not synchronised.
class SlowPages {
 public:
  SlowPages(PagePool& pool, std::size_t tier) noexcept : pool_{&pool}, tier_{tier} {}
  SlowPages(const SlowPages& other) noexcept
      : pool_{other.pool_}, tier_{other.tier_}, moved_{other.moved_}, fast_from_{other.fast_from_} {}
  SlowPages(SlowPages&&) noexcept = default;
  SlowPages& operator=(const SlowPages&) = delete;
  SlowPages& operator=(SlowPages&&) = delete;
  ~SlowPages() { release_reserved(); }

  [[nodiscard]] std::size_t tier() const noexcept { return tier_; }
  [[nodiscard]] std::size_t moved() const noexcept { return moved_; }
  [[nodiscard]] std::size_t reserved() const noexcept { return reserved_.size(); }
  /// Rows from this number on stay in fast memory, if they still are there.
  [[nodiscard]] std::size_t fast_from() const noexcept { return fast_from_; }
  void keep_fast_from(std::size_t row) noexcept { fast_from_ = row; }
  /// Bytes besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const noexcept {
    return reserved_.capacity() * sizeof(PageId);
  }

  /// The first `count` pages of the table are no longer in it.
  void drop_front(std::size_t count) noexcept { moved_ -= std::min(moved_, count); }

  /// Obtains slow pages for the first `pages` pages of the table, as far as these have not moved.
  /// @throws std::bad_alloc, or what the tier's provider throws
  void reserve(std::size_t pages, std::size_t page_bytes) {
    const std::size_t wanted = std::max(pages, moved_) - moved_;
    const std::size_t had = reserved_.size();
    if (wanted <= had) return;
    reserved_.resize(wanted, no_page);
    KVPOLICY_TRY {
      pool_->allocate(page_bytes, std::span{reserved_}.subspan(had), tier_);
    }
    KVPOLICY_CATCH_ALL {
      reserved_.resize(had);
      KVPOLICY_RETHROW;
    }
  }
  /// Moves the next `count` pages to reserved ones. Forks that share them keep the page they have.
  /// @throws StorageError, std::bad_alloc: the pages stay in fast memory then
  void move(PageTable& table, std::size_t count, std::size_t page_bytes) {
    if (count == 0) return;
    thread_local std::vector<PageProvider::Copy> copies;
    copies.clear();
    for (std::size_t i = 0; i < count; ++i) {
      copies.push_back({pool_->address(reserved_[i]), table.address(moved_ + i), page_bytes});
    }
    pool_->provider(tier_)->write(copies);
    for (std::size_t i = 0; i < count; ++i) table.replace(moved_++, reserved_[i]);
    reserved_.erase(reserved_.begin(), reserved_.begin() + static_cast<std::ptrdiff_t>(count));
  }
  void release_reserved() noexcept {
    for (const PageId page : reserved_) pool_->release(page);
    reserved_.clear();
  }

 private:
  PagePool* pool_;
  std::size_t tier_;
  std::size_t moved_ = 0;
  std::size_t fast_from_ = std::numeric_limits<std::size_t>::max();
  std::vector<PageId> reserved_;
};

}  // namespace kvpolicy
