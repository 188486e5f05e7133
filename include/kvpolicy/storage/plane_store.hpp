// SPDX-License-Identifier: Apache-2.0
//
// Owns one side (keys or values) of one head's rows in one format: a sequence of pages that grows
// at its end and may lose rows at its front. Rows are numbered from 0 in the order they came and
// keep their number, so a sliding window is a sequence whose front moves: pages that fall out of
// it go back to the memory resource, no row is ever moved, and a full page never changes again.
// That is why a full page may go to slow memory: it is written there once, as a whole, and the page
// that is open stays in fast memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/storage/page.hpp>
#include <kvpolicy/storage/quantize.hpp>
#include <kvpolicy/storage/slow_memory.hpp>

namespace kvpolicy {

/// Rows of one side of a head (keys or values) in pages.
/// Copying makes a fork: full pages are shared, the open one is copied. Not synchronised.
class PlaneStore {
 public:
  /// Numbers are rounded to `precision` before they are quantised: what becomes of a row must not
  /// depend on whether it was kept in that type for a while.
  PlaneStore(RowFormat format, const StorageContext& context,
             Encoding precision = Encoding::float32)
      : format_{format}, precision_{precision}, context_{context},
        layout_{format, context.head_dim, context.page_rows} {}

  PlaneStore(const PlaneStore& other)
      : format_{other.format_}, precision_{other.precision_}, context_{other.context_},
        layout_{other.layout_},
        begin_{other.begin_}, end_{other.end_}, pages_{other.pages_}, table_{other.table_},
        slow_{other.slow_}, fast_from_{other.fast_from_} {
    if (end_ % context_.page_rows == 0 || pages_.empty()) return;
    Page open{context_.memory, layout_.page_bytes};
    std::memcpy(open.get(), pages_.back().get(), layout_.page_bytes);
    table_.back() = open.get();
    pages_.back() = std::move(open);
  }
  PlaneStore(PlaneStore&& other) noexcept = default;
  /// @throws std::bad_alloc for the open page, with this store as it was.
  PlaneStore& operator=(const PlaneStore& other) { return *this = PlaneStore{other}; }
  PlaneStore& operator=(PlaneStore&& other) noexcept = default;
  ~PlaneStore() = default;

  [[nodiscard]] const RowFormat& format() const { return format_; }
  [[nodiscard]] std::size_t begin() const { return begin_; }
  [[nodiscard]] std::size_t end() const { return end_; }
  [[nodiscard]] std::size_t rows() const { return end_ - begin_; }
  [[nodiscard]] std::size_t bytes() const {
    return (pages_.size() + spare_.size() + slow_spare_.size()) * layout_.page_bytes;
  }
  /// Of them, bytes in slow memory.
  [[nodiscard]] std::size_t slow_bytes() const {
    return (slow_ + slow_spare_.size()) * layout_.page_bytes;
  }
  /// Of them, bytes on pages that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    const auto shared = std::ranges::count_if(pages_, [](const Page& p) { return p.is_shared(); });
    return static_cast<std::size_t>(shared) * layout_.page_bytes;
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
    if (context.slow_memory == nullptr) return 0;
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
  /// at or behind `end()`, if no more than `live` of them are held at any time. Until
  /// `release_spare`, pages that fall out at the front serve again.
  /// With slow memory, full pages that are still in fast memory leave it first, as far as they may.
  /// @throws std::bad_alloc, StorageError; pages obtained so far stay spare until `release_spare`.
  void reserve(std::size_t from, std::size_t to,
               std::size_t live = std::numeric_limits<std::size_t>::max()) {
    move_full_pages();
    if (from >= to) return;
    const std::size_t page_rows = context_.page_rows;
    const std::size_t first_new =
        pages_.empty() ? from / page_rows : std::max(from / page_rows, first_page_end());
    const std::size_t last = (to - 1) / page_rows + 1;
    std::size_t wanted = last > first_new ? last - first_new : 0;
    // Rows that lie anywhere touch one page more than they fill.
    if (live < to - from) wanted = std::min(wanted, (live + page_rows - 2) / page_rows + 1);
    make_scratch();
    // One more may come back than is asked for: the open page, if its rows go before the next come.
    spare_.reserve(wanted + 1);
    promised_ = std::max(promised_, wanted + 1);
    obtain(wanted);
    if (context_.slow_memory != nullptr) obtain_slow(movable_until(to));
  }
  /// Full pages go to the slow memory that was reserved for them. Where it fails to take them they
  /// stay, and the next `reserve` tries again and says why.
  void release_spare() noexcept {
    KVPOLICY_TRY {
      move_pages(std::min(slow_spare_.size(), movable()));
    }
    KVPOLICY_CATCH_ALL {
    }
    slow_spare_.clear();
    spare_.clear();
    promised_ = 0;
  }

  /// Pages that hold row `row` or later ones stay in fast memory from now on, if they still are.
  void keep_fast_from(std::size_t row) noexcept { fast_from_ = row; }

  /// The rows of these runs alone, numbered anew from 0, in fast memory. Runs of a per-channel
  /// format begin and end between groups.
  /// @throws std::bad_alloc, StorageError
  [[nodiscard]] PlaneStore gather(std::span<const RowRun> runs) const {
    PlaneStore copies{format_, context_.fast(), precision_};
    std::size_t rows = 0;
    for (const RowRun& run : runs) rows += run.rows;
    copies.reserve(0, rows);
    const Plane all = plane(begin_);
    if (auto* slow = dynamic_cast<SlowMemory*>(context_.slow_memory)) {
      std::vector<SlowMemory::Range> ranges;
      for (const RowRun& run : runs) {
        list_ranges(*slow, all, context_.head_dim, run.first - begin_, run.rows, ranges);
      }
      slow->fetch(ranges);
    }
    for (const RowRun& run : runs) copies.append(all.from(run.first - begin_), run.rows);
    copies.release_spare();
    return copies;
  }

  /// Forgets every row and goes on at number `row`, at or behind `end()`: to append there. The
  /// open page stays where `row` still lies in it, as `reserve` counts on.
  void skip_to(std::size_t row) {
    KVPOLICY_ASSERT(row >= end_);
    const bool reused = !pages_.empty() && row / context_.page_rows < first_page_end();
    give_up(pages_.size() - (reused ? 1 : 0));
    begin_ = end_ = row;
  }

  /// Gives up the rows in front of `row`; their pages go back once no row of them is left.
  void drop_front(std::size_t row) {
    KVPOLICY_ASSERT(row >= begin_ && row <= end_);
    const std::size_t page_rows = context_.page_rows;
    // With no row left, the open page goes too: an empty store holds nothing.
    give_up(row == end_ ? pages_.size() : row / page_rows - begin_ / page_rows);
    begin_ = row;
  }

  /// Appends `count` rows of any dense or, for a verbatim copy, equal format. Per-channel formats
  /// take whole groups only. Takes pages that `reserve` obtained; asks for others itself.
  /// @throws std::bad_alloc where nothing was reserved: the rows in front of that are appended.
  void append(const Plane& source, std::size_t count) { append(source, count, {}, 0); }

  /// The rows of `source`, then those of `more`: a group may begin in one and end in the other.
  void append(const Plane& source, std::size_t count, const Plane& more, std::size_t more_count) {
    if (count + more_count == 0) return;
    make_scratch();
    if (!is_per_channel() || (source.format == format_ && more_count == 0)) {
      append_rows(source, count);
      append_rows(more, more_count);
      return;
    }
    const std::size_t group = format_.group;
    KVPOLICY_ASSERT((count + more_count) % group == 0 && end_ % group == 0);
    for (std::size_t row = 0; row < count + more_count; row += group) {
      for (std::size_t i = 0; i < group; ++i) {
        const std::size_t at = row + i;
        const auto out = std::span{row_}.subspan(i * context_.head_dim, context_.head_dim);
        at < count ? load(source, at, out) : load(more, at - count, out);
      }
      quantize_group();
    }
  }

  /// For saving and loading (state/archive.hpp): codes, scales and zeros of the rows alone, so that
  /// pages may be of another size then. A loaded store has all its pages in fast memory, until the next
  /// `reserve`.
  /// @throws StorageError if slow memory cannot be read
  template <class Archive>
  void serialize(Archive& archive) {
    std::size_t begin = begin_;
    std::size_t end = end_;
    archive(begin, end);
    const std::size_t unit = is_per_channel() ? format_.group : 1;  // rows that share parameters
    archive.check(begin <= end && end <= archive.rows() && begin % unit == 0 && end % unit == 0,
                  "rows from ", begin, " to ", end, ", of at most ", archive.rows(),
                  " and in groups of ", unit);
    if constexpr (Archive::loading) *this = PlaneStore{format_, context_, precision_}.from(begin);
    for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
      if constexpr (Archive::loading) {
        (void)open_row();
        end_ = row + count;
      }
      transfer(archive, row, row % context_.page_rows * layout_.row_bytes, count * layout_.row_bytes);
    });
    if (layout_.params_per_row == 0) return;
    const std::size_t param_bytes = layout_.params_per_row * sizeof(half);
    for (const std::size_t offset : {layout_.scales_offset, layout_.zeros_offset}) {
      for_each_page(begin, end, [&](std::size_t row, std::size_t count) {
        transfer(archive, row, offset + row % context_.page_rows / unit * param_bytes,
                 count / unit * param_bytes);
      });
    }
  }

  /// The rows from number `row` on.
  [[nodiscard]] Plane plane(std::size_t row) const {
    KVPOLICY_ASSERT(row >= begin_ && row <= end_);
    return {.format = format_,
            .pages = table_.data(),
            .page_rows = context_.page_rows,
            .first_row = row - begin_ / context_.page_rows * context_.page_rows};
  }

 private:
  struct OpenRow {
    std::byte* page;
    std::byte* codes;
    std::size_t row;
  };

  [[nodiscard]] std::size_t first_page_end() const {
    return begin_ / context_.page_rows + pages_.size();
  }
  [[nodiscard]] bool is_per_channel() const {
    return is_quantized(format_.encoding) && format_.granularity == Granularity::per_channel;
  }
  void make_scratch() {
    row_.resize(context_.head_dim * (is_per_channel() ? format_.group : 1));
    if (is_quantized(format_.encoding)) grids_.resize(context_.head_dim);
  }

  // An empty store whose next row has this number.
  [[nodiscard]] PlaneStore from(std::size_t row) && {
    begin_ = end_ = row;
    return std::move(*this);
  }

  // visit(first row, rows) for each page of the rows [begin, end).
  template <class Visit>
  void for_each_page(std::size_t begin, std::size_t end, Visit visit) const {
    for (std::size_t row = begin; row < end;) {
      const std::size_t count = std::min(end - row, context_.page_rows - row % context_.page_rows);
      visit(row, count);
      row += count;
    }
  }

  // `bytes` bytes of the page of row `row`, to or from an archive.
  template <class Archive>
  void transfer(Archive& archive, std::size_t row, std::size_t offset, std::size_t bytes) {
    const Page& page = pages_[row / context_.page_rows - begin_ / context_.page_rows];
    const std::span<std::byte> part{page.get() + offset, bytes};
    if (auto* slow = dynamic_cast<SlowMemory*>(context_.slow_memory);
        slow != nullptr && slow->holds(page.get())) {
      const SlowMemory::Range range{part};
      slow->fetch({&range, 1});
    }
    archive.bytes(part);
  }

  // Room for `count` more without a copy of everything each time.
  template <class T>
  static void grow(std::vector<T>& list, std::size_t count) {
    if (list.capacity() - list.size() >= count) return;
    list.reserve(std::max(list.size() + count, 2 * list.size()));
  }

  // At least `wanted` spare pages, and room to take them without a further allocation.
  void obtain(std::size_t wanted) {
    spare_.reserve(wanted);
    grow(pages_, wanted);
    grow(table_, wanted);
    while (spare_.size() < wanted) {
      spare_.emplace_back(context_.memory, layout_.page_bytes);
    }
  }

  // Drops the first `count` pages. A page that no fork shares becomes spare as long as more spare
  // pages are promised; others return to the memory resource.
  void give_up(std::size_t count) {
    const std::size_t slow = std::min(slow_, count);
    slow_ -= slow;
    for (std::size_t i = slow; i < count && spare_.size() < promised_; ++i) {
      if (!pages_[i].is_shared()) spare_.push_back(std::move(pages_[i]));
    }
    pages_.erase(pages_.begin(), pages_.begin() + static_cast<std::ptrdiff_t>(count));
    table_.erase(table_.begin(), table_.begin() + static_cast<std::ptrdiff_t>(count));
  }

  // Pages from the first one on that are full, and may leave fast memory, once `end` rows came.
  [[nodiscard]] std::size_t movable_until(std::size_t end) const {
    const std::size_t first = begin_ / context_.page_rows;
    return std::max(std::min(end, fast_from_) / context_.page_rows, first) - first;
  }
  // Of them, pages that have not left.
  [[nodiscard]] std::size_t movable() const {
    if (context_.slow_memory == nullptr) return 0;
    return std::max(std::min(movable_until(end_), pages_.size()), slow_) - slow_;
  }

  // Slow pages for the first `pages` pages, as far as these are not slow already, and room to move.
  void obtain_slow(std::size_t pages) {
    const std::size_t wanted = std::max(pages, slow_) - slow_;
    slow_spare_.reserve(wanted);
    moves_.reserve(wanted);
    while (slow_spare_.size() < wanted) {
      slow_spare_.emplace_back(context_.slow_memory, layout_.page_bytes);
    }
  }

  void move_full_pages() {
    const std::size_t pages = movable();
    if (pages == 0) return;
    obtain_slow(slow_ + pages);
    move_pages(pages);
  }

  // The next `count` pages go to spare slow ones. Forks that share them keep the page they have.
  void move_pages(std::size_t count) {
    moves_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      moves_.push_back({slow_spare_[i].get(), pages_[slow_ + i].get(), layout_.page_bytes});
    }
    write_blocks(context_.slow_memory, moves_);
    for (std::size_t i = 0; i < count; ++i, ++slow_) {
      table_[slow_] = slow_spare_[i].get();
      pages_[slow_] = std::move(slow_spare_[i]);
    }
    slow_spare_.erase(slow_spare_.begin(), slow_spare_.begin() + static_cast<std::ptrdiff_t>(count));
  }

  void load(const Plane& source, std::size_t row, std::span<float> out) const {
    load_row(source, row, out);
    if (source.format.encoding != precision_) round_dense(precision_, out);
  }

  void append_rows(const Plane& source, std::size_t count) {
    if (source.format == format_) return copy_verbatim(source, count);
    for (std::size_t i = 0; i < count; ++i) {
      load(source, i, row_);
      if (is_quantized(format_.encoding)) {
        quantize_row();
      } else {
        store_dense(format_.encoding, row_, open_row().codes);
        ++end_;
      }
    }
  }

  // Where row `end_` goes; takes a spare page where it begins one.
  OpenRow open_row() {
    const std::size_t page_rows = context_.page_rows;
    if (pages_.empty() || end_ / page_rows == first_page_end()) {
      if (spare_.empty()) obtain(1);
      pages_.push_back(std::move(spare_.back()));
      spare_.pop_back();
      table_.push_back(pages_.back().get());
    }
    std::byte* page = pages_.back().get();
    const std::size_t row = end_ % page_rows;
    return {page, page + row * layout_.row_bytes, row};
  }

  void copy_verbatim(const Plane& source, std::size_t count) {
    const std::size_t param_bytes = layout_.params_per_row * sizeof(half);
    const std::size_t unit = is_per_channel() ? format_.group : 1;  // rows that share parameters
    KVPOLICY_ASSERT(count % unit == 0);
    for (std::size_t done = 0; done < count;) {
      const OpenRow to = open_row();
      const auto from = source.place(done);
      const bool strided = source.pages == nullptr && source.row_stride != layout_.row_bytes;
      const std::size_t rows = strided ? 1
                                       : std::min({count - done, from.contiguous_rows,
                                                   context_.page_rows - to.row});
      std::memcpy(to.codes, from.page + from.row * layout_.row_bytes, rows * layout_.row_bytes);
      if (param_bytes > 0) {
        const PageLayout other{source.format, context_.head_dim, source.page_rows};
        const std::size_t at = to.row / unit * param_bytes;
        const std::size_t source_at = from.row / unit * param_bytes;
        const std::size_t bytes = rows / unit * param_bytes;
        std::memcpy(to.page + layout_.scales_offset + at,
                    from.page + other.scales_offset + source_at, bytes);
        std::memcpy(to.page + layout_.zeros_offset + at,
                    from.page + other.zeros_offset + source_at, bytes);
      }
      end_ += rows;
      done += rows;
    }
  }

  // `row_` becomes row `end_`, each group of channels with its own grid.
  void quantize_row() {
    const OpenRow to = open_row();
    const std::size_t first = to.row * layout_.params_per_row;
    auto* scales = reinterpret_cast<half*>(to.page + layout_.scales_offset) + first;
    auto* zeros = reinterpret_cast<half*>(to.page + layout_.zeros_offset) + first;
    for (std::size_t g = 0; g < layout_.params_per_row; ++g) {
      const std::size_t channel = g * format_.group;
      const auto grid = grids_.cover(std::span{row_}.subspan(channel, format_.group), channel,
                                     format_.encoding);
      scales[g] = grid.scale;
      zeros[g] = grid.zero;
    }
    grids_.encode(row_, format_.encoding, {to.codes, layout_.row_bytes});
    ++end_;
  }

  // The `group` rows in `row_` become the next ones, each channel with its own grid.
  void quantize_group() {
    const std::size_t head_dim = context_.head_dim;
    const OpenRow to = open_row();
    const std::size_t first = to.row / format_.group * head_dim;
    grids_.cover_columns(row_, format_.encoding,
                         reinterpret_cast<half*>(to.page + layout_.scales_offset) + first,
                         reinterpret_cast<half*>(to.page + layout_.zeros_offset) + first);
    for (std::size_t i = 0; i < format_.group; ++i) {
      grids_.encode(std::span{row_}.subspan(i * head_dim, head_dim), format_.encoding,
                    {to.codes + i * layout_.row_bytes, layout_.row_bytes});
    }
    end_ += format_.group;
  }

  RowFormat format_;
  Encoding precision_;
  StorageContext context_;
  PageLayout layout_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::vector<Page> pages_;               // pages of the rows [begin_, end_)
  std::vector<const std::byte*> table_;   // their starts, as planes show them
  std::size_t slow_ = 0;                  // of them, the first that lie in slow memory
  std::size_t fast_from_ = std::numeric_limits<std::size_t>::max();  // see keep_fast_from
  std::vector<Page> spare_;               // reserved, not begun
  std::vector<Page> slow_spare_;          // reserved in slow memory, for pages that become full
  std::vector<SlowMemory::Copy> moves_;   // scratch, as large as slow_spare_
  std::size_t promised_ = 0;              // the most spare pages that a reservation counts on
  std::vector<float> row_;                // scratch: a row, or [group, head_dim] per channel
  GridRow grids_;                         // scratch: of one row, or of the group's columns
};

}  // namespace kvpolicy
