// SPDX-License-Identifier: Apache-2.0
//
// The pages of a sequence of rows that grows at its end and may lose rows at its front. Rows are
// numbered from 0 in the order they came and keep their number; the row at number n lies at index
// n % page_rows of its page, so no row is ever moved.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/storage/page_table.hpp>

namespace kvpolicy {

/// Which pages hold the rows [begin(), end()), and which were obtained for rows to come. What the
/// rows are is its owner's business. Copying shares all pages, the open one as well.
/// Not synchronised.
class PageSequence {
 public:
  PageSequence(PagePool& pool, std::size_t page_rows) noexcept
      : table_{pool}, page_rows_{static_cast<std::uint16_t>(page_rows)} {}

  [[nodiscard]] const PageTable& table() const noexcept { return table_; }
  [[nodiscard]] PageTable& table() noexcept { return table_; }
  [[nodiscard]] std::size_t page_rows() const noexcept { return page_rows_; }
  [[nodiscard]] std::size_t begin() const noexcept { return begin_; }
  [[nodiscard]] std::size_t end() const noexcept { return end_; }
  /// The number of the first row that the first page has a place for.
  [[nodiscard]] std::size_t first_slot() const noexcept { return begin_ / page_rows_ * page_rows_; }
  /// The index in the table of the page that holds a row.
  [[nodiscard]] std::size_t page_of(std::size_t row) const noexcept {
    return row / page_rows_ - begin_ / page_rows_;
  }
  /// Whether the last page has room for more rows.
  [[nodiscard]] bool has_open_page() const noexcept { return end_ % page_rows_ != 0 && table_.size() > 0; }

  /// Obtains the pages for rows that come in any number of pieces and are numbered [from, to), `from`
  /// at or after `end()`, if no more than `live` of them are held at any time. Until
  /// `release_reserved`, pages that fall out at the front serve again.
  /// @throws std::bad_alloc, or what the pool throws
  void reserve(std::size_t from, std::size_t to, std::size_t live, std::size_t page_bytes) {
    if (from >= to) return;
    const std::size_t first_new =
        table_.size() == 0 ? from / page_rows_ : std::max(from / page_rows_, page_end());
    const std::size_t last = (to - 1) / page_rows_ + 1;
    std::size_t wanted = last > first_new ? last - first_new : 0;
    // Rows that lie anywhere touch one page more than they fill.
    if (live < to - from) wanted = std::min(wanted, (live + page_rows_ - 2) / page_rows_ + 1);
    // One page more may come back than is asked for: the open one, if its rows go before others come.
    owed_ = std::max(owed_, static_cast<std::uint32_t>(wanted + 1));
    if (wanted > 0) table_.reserve(wanted, page_bytes);
  }
  void release_reserved() noexcept {
    table_.release_reserved();
    owed_ = 0;
  }

  /// Forgets every row and goes on at number `row`, at or after `end()`. The open page stays where
  /// `row` still lies in it, as `reserve` counts on.
  void skip_to(std::size_t row) noexcept {
    KVPOLICY_ASSERT(row >= end_);
    const bool reused = table_.size() > 0 && row / page_rows_ < page_end();
    table_.drop_front(table_.size() - (reused ? 1 : 0), owed_);
    begin_ = end_ = row;
  }
  /// Gives up the rows before `row`, and the pages that hold none of the others. With no row left
  /// the open page goes too: an empty sequence holds nothing.
  void drop_front(std::size_t row) noexcept {
    KVPOLICY_ASSERT(row >= begin_ && row <= end_);
    table_.drop_front(row == end_ ? table_.size() : page_of(row), owed_);
    begin_ = row;
  }

  /// Takes back the rows from `row` on, which begins a page at or after `begin()`. No page may be reserved.
  void cut(std::size_t row) noexcept {
    KVPOLICY_ASSERT(row % page_rows_ == 0 && row >= begin_ && row <= end_);
    table_.drop_back(row == begin_ ? 0 : page_of(row));
    end_ = row;
  }

  /// The page that row `end()` goes to; takes a reserved page where the row begins one.
  /// @throws std::bad_alloc, or what the pool throws, if none is reserved
  [[nodiscard]] std::byte* open_page(std::size_t page_bytes) {
    if (table_.size() == 0 || end_ / page_rows_ == page_end()) {
      if (table_.reserved() == 0) table_.reserve(1, page_bytes);
      table_.begin_page();
    }
    return table_.address(table_.size() - 1);
  }
  /// A page that has row `end()` and all rows after it becomes the last one.
  /// @throws std::bad_alloc, after the page was let go of
  void add_page(PageId page) {
    KVPOLICY_ASSERT(end_ % page_rows_ == 0 || table_.size() == 0);
    table_.add(page);
  }
  /// `count` rows were written to the open page, or came with a page.
  void add_rows(std::size_t count) noexcept { end_ += count; }

 private:
  // The number of the page after the last one in the table.
  [[nodiscard]] std::size_t page_end() const noexcept { return begin_ / page_rows_ + table_.size(); }

  PageTable table_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::uint32_t owed_ = 0;  // the most reserved pages that a reservation counts on
  std::uint16_t page_rows_;
};

}  // namespace kvpolicy
