// SPDX-License-Identifier: Apache-2.0
//
// Owns one side (keys or values) of one head's rows in one format. A sliding window is a sequence
// whose front moves (page_sequence.hpp): pages that fall out of it go back to the pool, no row is
// ever moved, and a full page never changes again. That is why forks share full pages, and why these
// may go to a slower tier of the pool (slow_pages.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/boxed.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/slow_memory.hpp>
#include <kvpolicy/storage/encode_rows.hpp>
#include <kvpolicy/storage/page_sequence.hpp>
#include <kvpolicy/storage/slow_pages.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// Rows of one side of a head (keys or values) in pages.
/// Copying makes a fork: full pages are shared, the open one is copied. Not synchronised.
class PlaneStore {
 public:
  /// Numbers are rounded to `precision` before they are quantised: what becomes of a row must not
  /// depend on whether it was kept in that type for a while. The sizes must be valid ones.
  PlaneStore(RowFormat format, const StorageContext& context,
             Encoding precision = Encoding::float32)
      : pages_{context.pages(), context.page_rows},
        head_dim_{static_cast<std::uint16_t>(context.head_dim)},
        group_{static_cast<std::uint16_t>(format.group)}, encoding_{format.encoding},
        granularity_{format.granularity}, precision_{precision} {
    if (context.slow_tier != 0) slow_.emplace(context.pages(), context.slow_tier);
  }

  PlaneStore(const PlaneStore& other)
      : pages_{other.pages_}, slow_{other.slow_}, head_dim_{other.head_dim_},
        group_{other.group_}, encoding_{other.encoding_}, granularity_{other.granularity_},
        precision_{other.precision_} {
    if (!pages_.has_open_page()) return;
    PageTable& table = pages_.table();
    const PageId open = table.pool().allocate(layout().page_bytes);
    std::memcpy(table.pool().address(open), table.address(table.size() - 1), layout().page_bytes);
    table.replace(table.size() - 1, open);
  }
  PlaneStore(PlaneStore&& other) noexcept = default;
  /// @throws std::bad_alloc for the open page, with this store as it was.
  PlaneStore& operator=(const PlaneStore& other) { return *this = PlaneStore{other}; }
  PlaneStore& operator=(PlaneStore&& other) noexcept = default;
  ~PlaneStore() = default;

  [[nodiscard]] RowFormat format() const { return {encoding_, granularity_, group_}; }
  /// What the store was made with.
  [[nodiscard]] StorageContext context() const {
    return {head_dim_, pages_.page_rows(), &pages_.table().pool(), slow_ ? slow_->tier() : 0};
  }
  [[nodiscard]] std::size_t begin() const { return pages_.begin(); }
  [[nodiscard]] std::size_t end() const { return pages_.end(); }
  [[nodiscard]] std::size_t rows() const { return end() - begin(); }
  [[nodiscard]] std::size_t bytes() const {
    const std::size_t slow = slow_ ? slow_->reserved() : 0;
    return (pages_.table().size() + pages_.table().reserved() + slow) * layout().page_bytes;
  }
  /// Of them, bytes in a slower tier.
  [[nodiscard]] std::size_t slow_bytes() const {
    return slow_ ? (slow_->moved() + slow_->reserved()) * layout().page_bytes : 0;
  }
  /// Of them, bytes on pages that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    return pages_.table().shared_pages() * layout().page_bytes;
  }
  /// The page table and the like: bookkeeping besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return pages_.table().overhead_bytes() + (slow_ ? sizeof(SlowPages) + slow_->overhead_bytes() : 0);
  }
  /// What `bytes()` is for the rows [begin, end).
  [[nodiscard]] static std::size_t bytes_of_rows(const RowFormat& format,
                                                 const StorageContext& context, std::size_t begin,
                                                 std::size_t end) {
    if (begin == end) return 0;
    const std::size_t pages = (end - 1) / context.page_rows - begin / context.page_rows + 1;
    return pages * PageLayout{format, context.head_dim, context.page_rows}.page_bytes;
  }

  /// What `slow_bytes()` is for the rows [0, end) if none of them is to stay in fast memory.
  [[nodiscard]] static std::size_t slow_bytes_of_rows(const RowFormat& format,
                                                      const StorageContext& context,
                                                      std::size_t end) {
    if (context.slow_tier == 0) return 0;
    return end / context.page_rows * PageLayout{format, context.head_dim, context.page_rows}.page_bytes;
  }

  /// The most that `bytes_of_rows` comes to for so many rows, wherever they begin.
  [[nodiscard]] static std::size_t max_bytes(const RowFormat& format,
                                              const StorageContext& context, std::size_t rows) {
    if (rows == 0) return 0;
    const std::size_t pages = (rows + context.page_rows - 2) / context.page_rows + 1;
    return pages * PageLayout{format, context.head_dim, context.page_rows}.page_bytes;
  }

  /// Obtains the pages for rows that come in any number of pieces and are numbered [from, to), `from`
  /// at or after `end()`, if no more than `live` of them are held at any time. Until
  /// `release_unused`, pages that fall out at the front serve again.
  /// With a slow tier, full pages that are still in fast memory leave it first, as far as they may.
  /// @throws std::bad_alloc, StorageError, or what the pool throws; pages obtained so far stay
  /// reserved until `release_unused`.
  void reserve(std::size_t from, std::size_t to,
               std::size_t live = std::numeric_limits<std::size_t>::max()) {
    if (slow_) move_full_pages();
    if (from >= to) return;
    detail::RowEncoder::prepare(format(), head_dim_);
    pages_.reserve(from, to, live, layout().page_bytes);
    if (slow_) slow_->reserve(movable_until(to), layout().page_bytes);
  }
  /// Full pages go to the slow pages that were reserved for them. Where these fail to take them they
  /// stay, and the next `reserve` tries again and says why.
  void release_unused() noexcept {
    if (slow_) {
      KVPOLICY_TRY {
        slow_->move(pages_.table(), std::min(slow_->reserved(), movable()), layout().page_bytes);
      }
      KVPOLICY_CATCH_ALL {
      }
      slow_->release_reserved();
    }
    pages_.release_reserved();
  }

  /// Pages that hold row `row` or later ones stay in fast memory from now on, if they still are.
  void keep_fast_from(std::size_t row) noexcept {
    if (slow_) slow_->keep_fast_from(row);
  }

  /// The rows of these runs alone, numbered from 0, in fast memory. Runs of a per-channel format
  /// begin and end between groups.
  /// @throws std::bad_alloc, StorageError
  [[nodiscard]] PlaneStore gather(std::span<const RowRun> runs) const {
    PlaneStore copies{format(), context().fast(), precision_};
    std::size_t rows = 0;
    for (const RowRun& run : runs) rows += run.rows;
    copies.reserve(0, rows);
    const Plane all = plane(begin());
    if (slow_) {
      PageProvider& provider = slow_provider();
      std::vector<PageProvider::Range> ranges;
      for (const RowRun& run : runs) {
        list_ranges(provider, all, head_dim_, run.first - begin(), run.rows, ranges);
      }
      provider.fetch(ranges);
    }
    for (const RowRun& run : runs) copies.append(all.from(run.first - begin()), run.rows);
    copies.release_unused();
    return copies;
  }

  /// Forgets every row and goes on at number `row`, at or after `end()`: to append there. The open
  /// page stays where `row` still lies in it, as `reserve` counts on.
  void skip_to(std::size_t row) {
    forget(pages_.skip_to(row, moved()));
  }

  /// Gives up the rows before `row`; their pages go back once no row of them is left.
  void drop_front(std::size_t row) {
    forget(pages_.drop_front(row, moved()));
  }

  /// Appends `count` rows of any dense or, for a verbatim copy, equal format. Per-channel formats
  /// take whole groups only. Takes pages that `reserve` obtained; asks for others itself.
  /// @throws std::bad_alloc where nothing was reserved: the rows before that are appended.
  void append(const Plane& source, std::size_t count) { append(source, count, {}, 0); }

  /// The rows of `source`, then those of `more`: a group may begin in one and end in the other.
  void append(const Plane& source, std::size_t count, const Plane& more, std::size_t more_count) {
    if (count + more_count == 0) return;
    const detail::RowEncoder to = encoder();
    const std::size_t unit = to.unit();
    if (unit == 1 || (source.format == format() && more_count == 0)) {
      append_rows(to, source, count);
      append_rows(to, more, more_count);
      return;
    }
    KVPOLICY_ASSERT((count + more_count) % unit == 0 && end() % unit == 0);
    for (std::size_t row = 0; row < count + more_count; row += unit) {
      for (std::size_t i = 0; i < unit; ++i) {
        const std::size_t at = row + i;
        at < count ? to.load(source, at, i) : to.load(more, at - count, i);
      }
      to.write_unit(open_page(), end() % pages_.page_rows());
      pages_.add_rows(unit);
    }
  }

  /// For saving and loading (state/archive.hpp): codes, scales and zeros of the rows alone, so that
  /// pages may be of another size then. A loaded store has all its pages in fast memory, until the next
  /// `reserve`.
  /// @throws StorageError if slow memory cannot be read
  template <class Archive>
  void serialize(Archive& archive) {
    std::size_t begin = this->begin();
    std::size_t end = this->end();
    archive(begin, end);
    const detail::RowEncoder rows = encoder();
    const PageLayout& layout = rows.layout();
    const std::size_t unit = rows.unit();  // rows that share parameters
    archive.check(begin <= end && end <= archive.rows() && begin % unit == 0 && end % unit == 0,
                  "rows from ", begin, " to ", end, ", of at most ", archive.rows(),
                  " and in groups of ", unit);
    if constexpr (Archive::loading) {
      *this = PlaneStore{format(), context(), precision_};
      skip_to(begin);
    }
    for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
      if constexpr (Archive::loading) {
        static_cast<void>(open_page());
        pages_.add_rows(count);
      }
      transfer(archive, row, row % pages_.page_rows() * layout.row_bytes, count * layout.row_bytes);
    });
    if (layout.params_per_row == 0) return;
    const std::size_t param_bytes = layout.params_per_row * sizeof(half);
    for (const std::size_t offset : {layout.scales_offset, layout.zeros_offset}) {
      for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
        transfer(archive, row, offset + row % pages_.page_rows() / unit * param_bytes,
                 count / unit * param_bytes);
      });
    }
  }

  /// The rows from number `row` on.
  [[nodiscard]] Plane plane(std::size_t row) const {
    KVPOLICY_ASSERT(row >= begin() && row <= end());
    return {.format = format(),
            .pages = pages_.table().addresses(),
            .page_rows = pages_.page_rows(),
            .first_row = row - pages_.first_place()};
  }

 private:
  [[nodiscard]] PageLayout layout() const { return {format(), head_dim_, pages_.page_rows()}; }
  [[nodiscard]] detail::RowEncoder encoder() const {
    return {format(), precision_, head_dim_, pages_.page_rows()};
  }
  [[nodiscard]] std::byte* open_page() { return pages_.open_page(layout().page_bytes); }

  // visit(first row, rows) for each page of the rows [begin, end).
  template <class Visit>
  void for_each_page(std::size_t begin, std::size_t end, Visit visit) const {
    for (std::size_t row = begin; row < end;) {
      const std::size_t count = std::min(end - row, pages_.page_rows() - row % pages_.page_rows());
      visit(row, count);
      row += count;
    }
  }

  // `bytes` bytes of the page of row `row`, to or from an archive.
  template <class Archive>
  void transfer(Archive& archive, std::size_t row, std::size_t offset, std::size_t bytes) {
    const std::size_t page = pages_.page_of(row);
    const std::span<std::byte> part{pages_.table().address(page) + offset, bytes};
    if (page < moved()) {
      const PageProvider::Range range{part};
      slow_provider().fetch({&range, 1});
    }
    archive.bytes(part);
  }

  // Pages, from the first one on, that are in a slower tier; `count` more left the table.
  [[nodiscard]] std::size_t moved() const { return slow_ ? slow_->moved() : 0; }
  void forget(std::size_t count) {
    if (slow_) slow_->drop_front(count);
  }
  [[nodiscard]] PageProvider& slow_provider() const {
    return *pages_.table().pool().provider(slow_->tier());
  }
  // Pages from the first one on that are full, and may leave fast memory, once `end` rows came.
  [[nodiscard]] std::size_t movable_until(std::size_t end) const {
    const std::size_t first = begin() / pages_.page_rows();
    return std::max(std::min(end, slow_->fast_from()) / pages_.page_rows(), first) - first;
  }
  // Of them, pages that have not left.
  [[nodiscard]] std::size_t movable() const {
    const std::size_t pages = std::min(movable_until(end()), pages_.table().size());
    return std::max(pages, moved()) - moved();
  }
  void move_full_pages() {
    const std::size_t pages = movable();
    if (pages == 0) return;
    slow_->reserve(slow_->moved() + pages, layout().page_bytes);
    slow_->move(pages_.table(), pages, layout().page_bytes);
  }

  void append_rows(const detail::RowEncoder& to, const Plane& source, std::size_t count) {
    const bool verbatim = source.format == format();
    KVPOLICY_ASSERT(!verbatim || count % to.unit() == 0);
    for (std::size_t done = 0; done < count;) {
      std::byte* page = open_page();
      std::size_t rows = 1;
      if (verbatim) {
        rows = to.copy(source, done, count - done, page, end() % pages_.page_rows());
      } else {
        to.load(source, done, 0);
        to.write_unit(page, end() % pages_.page_rows());
      }
      pages_.add_rows(rows);
      done += rows;
    }
  }

  PageSequence pages_;
  detail::Boxed<SlowPages> slow_;  // where full pages may leave fast memory
  std::uint16_t head_dim_;
  std::uint16_t group_;
  Encoding encoding_;
  Granularity granularity_;
  Encoding precision_;
};

}  // namespace kvpolicy
