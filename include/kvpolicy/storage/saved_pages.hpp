// SPDX-License-Identifier: Apache-2.0
//
// Pages that several caches of one file share. Each is written where it first occurs, and by its number
// from then on, so that forks take as little room in a file as in memory, and share again once loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>

namespace kvpolicy {

/// The pages that were written so far. They must stay in use meanwhile. Not synchronised.
class PageSaver {
 public:
  /// The number of a page, counted from 1; 0 for one that was not written, which has a number from then on.
  /// @throws std::bad_alloc
  [[nodiscard]] std::uint64_t number_of(const PagePool& pool, PageId page) {
    // Unlike ids, addresses differ between pools.
    const auto [known, is_new] = numbers_.try_emplace(pool.address(page), numbers_.size() + 1);
    return is_new ? 0 : known->second;
  }

 private:
  std::unordered_map<const std::byte*, std::uint64_t> numbers_;
};

/// The pages that were loaded so far, of which it is an owner as well. Not synchronised.
class PageLoader {
 public:
  /// All tables must have their pages from this pool.
  explicit PageLoader(PagePool& pool) : pool_{&pool} {}
  PageLoader(const PageLoader&) = delete;
  PageLoader& operator=(const PageLoader&) = delete;
  ~PageLoader() {
    for (const PageId page : pages_) pool_->release(page);
  }

  /// A page of this number and size, with one more owner; `no_page` if there is none.
  [[nodiscard]] PageId share(std::uint64_t number, std::size_t page_bytes) noexcept {
    if (number == 0 || number > pages_.size()) return no_page;
    const PageId page = pages_[static_cast<std::size_t>(number - 1)];
    if (pool_->bytes(page) != page_bytes) return no_page;
    pool_->retain(page);
    return page;
  }
  /// Takes note of the next page.
  /// @throws std::bad_alloc
  void add(PageId page) {
    pages_.push_back(page);
    pool_->retain(page);
  }

 private:
  PagePool* pool_;
  std::vector<PageId> pages_;
};

}  // namespace kvpolicy
