// SPDX-License-Identifier: Apache-2.0
//
// Owns one side (keys or values) of one head's rows in one format. A sliding window is a sequence
// whose front moves (page_sequence.hpp): pages that fall out of it go back to the pool, no row is
// ever moved, and a full page never changes again. That is why forks share full pages, and why a copy of
// a full page in another tier of the pool may take its place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/storage/encode_rows.hpp>
#include <kvpolicy/storage/page_sequence.hpp>
#include <kvpolicy/storage/page_visitor.hpp>
#include <kvpolicy/storage/saved_pages.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// Rows of one side of a head (keys or values) in pages.
/// Copying makes a fork: full pages are shared, the open one is copied. Not synchronised.
class PlaneStore {
 public:
  /// Numbers are rounded to `precision` before they are quantised: what becomes of a row must not
  /// depend on whether it was kept in that type for a while. The sizes must be valid ones.
  PlaneStore(RowFormat format, const StorageContext& context, Encoding precision = Encoding::float32)
      : pages_{context.pages(), context.page_rows},
        head_dim_{static_cast<std::uint16_t>(context.head_dim)},
        group_{static_cast<std::uint16_t>(format.group)},
        encoding_{format.encoding},
        granularity_{format.granularity},
        hadamard_{format.hadamard},
        codebook_{format.codebook},
        precision_{precision},
        scale_{format.scale} {
    KVPOLICY_ASSERT(fits_codebook(format.codebook, bits_of(format.encoding)));
    require(context.pages().engine_rows().page_rows == 0,
            "PlaneStore: the pool's pages lie in an inference engine's tensor, where only "
            "EnginePageStorage knows how rows lie; give heads of other storages another pool");
  }

  PlaneStore(const PlaneStore& other)
      : pages_{other.pages_},
        head_dim_{other.head_dim_},
        group_{other.group_},
        encoding_{other.encoding_},
        granularity_{other.granularity_},
        hadamard_{other.hadamard_},
        codebook_{other.codebook_},
        precision_{other.precision_},
        scale_{other.scale_} {
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

  [[nodiscard]] RowFormat format() const {
    return {encoding_, granularity_, group_, hadamard_, codebook_, scale_};
  }
  /// What the store was made with.
  [[nodiscard]] StorageContext context() const {
    return {head_dim_, pages_.page_rows(), &pages_.table().pool()};
  }
  [[nodiscard]] std::size_t begin() const { return pages_.begin(); }
  [[nodiscard]] std::size_t end() const { return pages_.end(); }
  [[nodiscard]] std::size_t rows() const { return end() - begin(); }
  [[nodiscard]] std::size_t bytes() const {
    return (pages_.table().size() + pages_.table().reserved()) * layout().page_bytes;
  }
  /// The part of `bytes()` that is in pages which a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    return pages_.table().shared_pages() * layout().page_bytes;
  }
  /// The page table and the like: bookkeeping besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const { return pages_.table().overhead_bytes(); }
  /// What `bytes()` is for the rows [begin, end).
  [[nodiscard]] static std::size_t bytes_of_rows(const RowFormat& format, const StorageContext& context,
                                                 std::size_t begin, std::size_t end) {
    if (begin == end) return 0;
    const std::size_t pages = (end - 1) / context.page_rows - begin / context.page_rows + 1;
    return pages * PageLayout{format, context.head_dim, context.page_rows}.page_bytes;
  }

  /// The most that `bytes_of_rows` comes to for so many rows, wherever they begin.
  [[nodiscard]] static std::size_t max_bytes(const RowFormat& format, const StorageContext& context,
                                             std::size_t rows) {
    if (rows == 0) return 0;
    const std::size_t pages = (rows + context.page_rows - 2) / context.page_rows + 1;
    return pages * PageLayout{format, context.head_dim, context.page_rows}.page_bytes;
  }

  /// Obtains the pages for rows that come in any number of pieces and are numbered [from, to), `from`
  /// at or after `end()`, if no more than `live` of them are held at any time. Until
  /// `release_unused`, pages that fall out at the front serve again.
  /// @throws std::bad_alloc, or what the pool throws; pages obtained so far stay
  /// reserved until `release_unused`.
  void reserve(std::size_t from, std::size_t to, std::size_t live = std::numeric_limits<std::size_t>::max()) {
    if (from >= to) return;
    detail::RowEncoder::prepare(format(), head_dim_);
    pages_.reserve(from, to, live, layout().page_bytes);
  }
  void release_unused() noexcept { pages_.release_reserved(); }

  /// For who moves full pages to another tier of the pool (offload/slow_pages.hpp).
  [[nodiscard]] PageTable& pages() noexcept { return pages_.table(); }
  [[nodiscard]] const PageTable& pages() const noexcept { return pages_.table(); }
  [[nodiscard]] std::size_t page_bytes() const { return layout().page_bytes; }

  /// The rows of these runs alone, numbered from 0. Runs of a per-channel format begin and end between
  /// groups.
  /// @throws std::bad_alloc
  [[nodiscard]] PlaneStore gather(std::span<const RowRun> runs) const {
    PlaneStore copies{format(), context(), precision_};
    std::size_t rows = 0;
    for (const RowRun& run : runs) rows += run.rows;
    copies.reserve(0, rows);
    for (const RowRun& run : runs) copies.append(plane(run.first), run.rows);
    copies.release_unused();
    return copies;
  }

  /// Forgets every row and goes on at number `row`, at or after `end()`: to append there. The open
  /// page stays where `row` still lies in it, as `reserve` counts on.
  void skip_to(std::size_t row) {
    const std::size_t from = end();
    pages_.skip_to(row);
    if (row > from && pages_.table().size() > 0) clear(from % pages_.page_rows(), row - from);
  }

  /// Gives up the rows before `row`; their pages go back once no row of them is left.
  void drop_front(std::size_t row) { pages_.drop_front(row); }

  /// Takes back the rows from `row` on, which begins a page at or after `begin()`.
  void cut(std::size_t row) noexcept { pages_.cut(row); }

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
  /// pages may be of another size then. A loaded store has all its pages in fast memory.
  /// @throws StorageError if a page cannot be read
  template <class Archive>
  void serialize(Archive& archive) {
    if constexpr (!Archive::loading) {
      if (PageVisitor* visitor = archive.page_visitor()) {
        visitor->visit(pages_.table(), layout().page_bytes);
        return;
      }
    }
    std::size_t begin = this->begin();
    std::size_t end = this->end();
    archive(begin, end);
    const detail::RowEncoder rows = encoder();
    const PageLayout& layout = rows.layout();
    const std::size_t unit = rows.unit();  // rows that share parameters
    archive.check(begin <= end && end <= archive.rows() && begin % unit == 0 && end % unit == 0, "rows from ",
                  begin, " to ", end, ", of at most ", archive.rows(), " and in groups of ", unit);
    if constexpr (Archive::loading) {
      *this = PlaneStore{format(), context(), precision_};
      skip_to(begin);
    }
    if (archive.shared_pages() != nullptr) {
      transfer_pages(archive, rows, begin, end);
      return;
    }
    if constexpr (Archive::loading) {
      for_each_page(begin, end, [&](std::size_t, std::size_t count) {
        static_cast<void>(open_page());
        pages_.add_rows(count);
      });
    }
    for (const std::size_t offset : layout.row_arrays()) {
      for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
        transfer(archive, row, offset + row % pages_.page_rows() * layout.row_bytes,
                 count * layout.row_bytes);
      });
    }
    for (const std::size_t offset : layout.param_arrays()) {
      for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
        transfer_params(archive, rows, offset, row, row % pages_.page_rows(), count);
      });
    }
  }

  /// The rows from number `row` on.
  [[nodiscard]] Plane plane(std::size_t row) const {
    KVPOLICY_ASSERT(row >= begin() && row <= end());
    return {.format = format(),
            .pages = pages_.table().addresses(),
            .page_rows = pages_.page_rows(),
            .first_row = row - pages_.first_slot()};
  }

 private:
  [[nodiscard]] PageLayout layout() const { return {format(), head_dim_, pages_.page_rows()}; }
  [[nodiscard]] detail::RowEncoder encoder() const {
    return {format(), precision_, head_dim_, pages_.page_rows()};
  }
  // Places of rows that never come must not show what the memory held before: full pages are saved whole.
  [[nodiscard]] std::byte* open_page() {
    const bool from_its_middle = pages_.table().size() == 0 && end() % pages_.page_rows() != 0;
    std::byte* page = pages_.open_page(layout().page_bytes);
    if (from_its_middle) std::memset(page, 0, layout().page_bytes);
    return page;
  }
  // The same for `rows` places of the open page, from place `first` on.
  void clear(std::size_t first, std::size_t rows) {
    const PageLayout own = layout();
    const std::size_t unit = encoder().unit();
    std::byte* page = pages_.table().address(pages_.table().size() - 1);
    for (const std::size_t offset : own.row_arrays()) {
      std::memset(page + offset + first * own.row_bytes, 0, rows * own.row_bytes);
    }
    for (const std::size_t offset : own.param_arrays()) {
      std::memset(page + offset + first / unit * own.param_bytes, 0, rows / unit * own.param_bytes);
    }
  }

  // visit(first row, rows) for each page of the rows [begin, end).
  template <class Visit>
  void for_each_page(std::size_t begin, std::size_t end, Visit visit) const {
    for (std::size_t row = begin; row < end;) {
      const std::size_t count = std::min(end - row, pages_.page_rows() - row % pages_.page_rows());
      visit(row, count);
      row += count;
    }
  }

  // The scales or zeros of `count` rows of the page of row `row`, from place `first` of the page on.
  template <class Archive>
  void transfer_params(Archive& archive, const detail::RowEncoder& rows, std::size_t offset, std::size_t row,
                       std::size_t first, std::size_t count) {
    const std::size_t param_bytes = rows.layout().param_bytes;
    transfer(archive, row, offset + first / rows.unit() * param_bytes, count / rows.unit() * param_bytes);
  }

  // The rows [begin, end) page by page. Full pages may be shared: instead of their bytes the archive has their
  // number, if they came before. They are written whole, for another cache may still know rows of theirs that
  // this one has dropped.
  template <class Archive>
  void transfer_pages(Archive& archive, const detail::RowEncoder& rows, std::size_t begin, std::size_t end) {
    const PageLayout& layout = rows.layout();
    PageTable& table = pages_.table();
    for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
      const std::size_t page_rows = pages_.page_rows();
      const bool may_be_shared = (row + count) % page_rows == 0;
      std::uint64_t number = 0;
      if constexpr (!Archive::loading) {
        if (may_be_shared) {
          number = archive.shared_pages()->number_of(table.pool(), table.pages()[pages_.page_of(row)]);
        }
      }
      if (may_be_shared) archive(number);
      if constexpr (Archive::loading) {
        if (number > 0) {
          const PageId page = archive.shared_pages()->share(number, layout.page_bytes);
          archive.check(page != no_page, "a page of ", layout.page_bytes,
                        " bytes that came before, not page ", number);
          pages_.add_page(page);
        } else {
          static_cast<void>(open_page());
        }
        pages_.add_rows(count);
      }
      if (number > 0) return;
      const std::size_t first = may_be_shared ? 0 : row % page_rows;  // in the page
      const std::size_t written = may_be_shared ? page_rows : count;
      for (const std::size_t offset : layout.row_arrays()) {
        transfer(archive, row, offset + first * layout.row_bytes, written * layout.row_bytes);
      }
      for (const std::size_t offset : layout.param_arrays()) {
        transfer_params(archive, rows, offset, row, first, written);
      }
      if constexpr (Archive::loading) {
        if (may_be_shared) archive.shared_pages()->add(table.pages()[pages_.page_of(row)]);
      }
    });
  }

  // `bytes` bytes of the page of row `row`, to or from an archive.
  template <class Archive>
  void transfer(Archive& archive, std::size_t row, std::size_t offset, std::size_t bytes) {
    const std::size_t page = pages_.page_of(row);
    const std::span<std::byte> part{pages_.table().address(page) + offset, bytes};
    const PagePool& pool = pages_.table().pool();
    if (PageProvider* provider = pool.provider(pool.tier(pages_.table().pages()[page]))) {
      const PageProvider::Range range{part};
      provider->fetch({&range, 1});
    }
    archive.bytes(part);
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
  std::uint16_t head_dim_;
  std::uint16_t group_;
  Encoding encoding_;
  Granularity granularity_;
  bool hadamard_;
  Codebook codebook_;
  Encoding precision_;
  float scale_;
};

}  // namespace kvpolicy
