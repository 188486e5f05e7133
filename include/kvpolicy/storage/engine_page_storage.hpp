// SPDX-License-Identifier: Apache-2.0
//
// A head's rows as plain numbers in pages of an inference engine's own memory, in the layout of vLLM or
// FlashInfer: keys and values of a row lie on one page (memory/engine_pages.hpp). Attention reads the rows
// where they are. Heads keep different numbers of rows, so each has pages of its own, which may be those of
// any block, layer and head of the tensor: kernels that find all heads of a sequence by one block table
// cannot read them.
//
//     PagePool pool{vllm_nhd(tensor, {.blocks = …, .block_size = 16, .kv_heads = 8, .row_bytes = 256})};
//     HeadPlan plan{shape, FullCache<EnginePageStorage<bfloat16>>::Config{}};
//     KvCache cache{plan, {.page_rows = 16, .pool = &pool}};
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/page_sequence.hpp>
#include <kvpolicy/storage/page_visitor.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// One head's rows as numbers of type `E`. The pool's tier 0 must be memory of an engine. All its rows
/// stay there: a slower tier is refused. Copying makes a fork. Not synchronised.
template <Element E>
class EnginePageStorage {
  using Contiguous = DenseStorage<E>;  // which takes as many bytes

 public:
  using element_type = E;
  /// There is nothing to set.
  struct Config {
    using storage_type = EnginePageStorage;  ///< Whose settings these are.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor&) {}
    /// Adds how rows lie to a head's rule.
    void describe(HeadRule& rule, std::size_t /*head_dim*/) const { rule.engine_pages = true; }
  };
  /// What keeps the exact rows of a policy whose other rows are in such a storage.
  using exact_storage_type = EnginePageStorage;
  static constexpr std::string_view name = "engine_pages";
  static constexpr bool movable_rows = true;

  /// @throws ConfigError if the pool's pages do not hold `page_rows` rows of this head_dim and type
  EnginePageStorage(Config, const StorageContext& context)
      : rows_{context.pages(), context.page_rows}, head_dim_{context.head_dim} {
    validate({}, context);
    const PagePool::EngineRows& own = layout();
    require(own.page_rows > 0 && own.values_offset > 0,
            "EnginePageStorage: the pool's pages must be an engine's with keys and values");
    require(own.page_rows == context.page_rows && own.row_bytes == row_bytes(),
            "EnginePageStorage: the pool's pages have ", own.page_rows, " rows of ", own.row_bytes,
            " bytes, the cache's ", context.page_rows, " rows of ", row_bytes(),
            " bytes; they must be the same");
    require(own.alignment % alignof(E) == 0, "EnginePageStorage: rows lie at multiples of ", own.alignment,
            " bytes, must lie at multiples of ", alignof(E), ", the alignment of their numbers");
    require(context.slow_tier == 0,
            "EnginePageStorage: rows in an engine's memory cannot go to a slower tier");
  }

  static void validate(const Config&, const StorageContext& context) {
    context.validate();
    require(context.value_channels() == context.head_dim, "EnginePageStorage: value_dim is ",
            context.value_dim, ", must be head_dim = ", context.head_dim,
            ": an engine's pages hold keys and values of one size");
  }
  void check(const Segment&) const {}

  EnginePageStorage(const EnginePageStorage& other) : rows_{other.rows_}, head_dim_{other.head_dim_} {
    if (!rows_.has_open_page()) return;
    PageTable& table = rows_.table();
    const PageId open = table.pool().allocate(page_bytes());
    const std::byte* from = table.address(table.size() - 1);
    std::byte* to = table.pool().address(open);
    for (std::size_t row = 0; row < end() % rows_.page_rows(); ++row) {
      for (const std::size_t side : {std::size_t{0}, layout().values_offset}) {
        const std::size_t offset = row * layout().row_stride + side;
        std::memcpy(to + offset, from + offset, row_bytes());
      }
    }
    table.replace(table.size() - 1, open);
  }
  EnginePageStorage(EnginePageStorage&&) noexcept = default;
  EnginePageStorage& operator=(const EnginePageStorage& other) { return *this = EnginePageStorage{other}; }
  EnginePageStorage& operator=(EnginePageStorage&&) noexcept = default;
  ~EnginePageStorage() = default;

  [[nodiscard]] std::size_t begin() const { return rows_.begin(); }
  [[nodiscard]] std::size_t end() const { return rows_.end(); }
  [[nodiscard]] std::size_t bytes() const {
    return (rows_.table().size() + rows_.table().reserved()) * page_bytes();
  }
  [[nodiscard]] std::size_t shared_bytes() const { return rows_.table().shared_pages() * page_bytes(); }
  [[nodiscard]] std::size_t overhead_bytes() const { return rows_.table().overhead_bytes(); }
  /// The ids of the pages that hold the rows, in order: what an engine's own kernels need.
  [[nodiscard]] std::span<const PageId> pages() const { return rows_.table().pages(); }

  [[nodiscard]] static std::size_t bytes_of_rows(const Config&, const StorageContext& context,
                                                 std::size_t begin, std::size_t end) {
    return Contiguous::bytes_of_rows({}, context, begin, end);
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config&, const StorageContext& context,
                                                 std::size_t window, std::size_t end) {
    return Contiguous::bytes_of_step({}, context, window, end);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config&, const StorageContext& context, std::size_t window,
                                             std::size_t end) {
    return Contiguous::max_bytes({}, context, window, end);
  }

  void reserve(std::size_t rows, std::size_t window = unlimited_rows) {
    reserved_ = true;
    rows_.reserve(end(), end() + rows, window, page_bytes());
  }
  void release_unused() noexcept {
    rows_.release_reserved();
    reserved_ = false;
  }

  void append(const Segment& rows, std::size_t window = unlimited_rows) {
    if (rows.rows == 0) return;
    const ScopedReserve scope{*this, rows.rows, window};
    const std::size_t old_end = end();
    const std::size_t to = old_end + rows.rows;
    const std::size_t front = std::max(begin(), to - std::min(to, window));
    front < old_end ? rows_.drop_front(front) : rows_.skip_to(front);
    for (std::size_t row = end() - old_end; row < rows.rows; ++row) {
      add(rows.keys, rows.values, row);
    }
  }

  /// As DenseStorage::show.
  void show(std::size_t first, std::size_t count, Segment prototype, SegmentList& out) const {
    if (count == 0) return;
    prototype.keys = plane(first, 0);
    prototype.values = plane(first, layout().values_offset);
    prototype.rows = count;
    out.push_back(prototype);
  }

  /// The rows of these ascending numbers alone, numbered from 0.
  [[nodiscard]] EnginePageStorage select(std::span<const std::size_t> numbers) const {
    EnginePageStorage kept{{}, {head_dim_, rows_.page_rows(), &rows_.table().pool()}};
    const ScopedReserve scope{kept, numbers.size(), unlimited_rows};
    for (const std::size_t number : numbers) {
      kept.add(plane(number, 0), plane(number, layout().values_offset), 0);
    }
    return kept;
  }

  template <class Archive>
  void serialize(Archive& archive) {
    if constexpr (!Archive::loading) {
      if (PageVisitor* visitor = archive.page_visitor()) {
        visitor->visit(rows_.table(), page_bytes());
        return;
      }
    }
    std::size_t first = begin();
    std::size_t last = end();
    archive(first, last);
    archive.check(first <= last && last <= archive.rows(), "rows from ", first, " to ", last, ", of at most ",
                  archive.rows());
    if constexpr (Archive::loading) {
      rows_.drop_front(end());
      rows_ = PageSequence{rows_.table().pool(), rows_.page_rows()};
      rows_.skip_to(first);
    }
    for (std::size_t row = first; row < last; ++row) {
      std::byte* key = nullptr;
      if constexpr (Archive::loading) {
        key = open_row();
        rows_.add_rows(1);
      } else {
        key = rows_.table().address(rows_.page_of(row)) + row % rows_.page_rows() * layout().row_stride;
      }
      archive.bytes(std::span{key, row_bytes()});
      archive.bytes(std::span{key + layout().values_offset, row_bytes()});
    }
  }

 private:
  friend class ScopedReserve<EnginePageStorage>;

  [[nodiscard]] static RowFormat format() { return {.encoding = encoding_of<E>}; }
  [[nodiscard]] std::size_t row_bytes() const { return head_dim_ * sizeof(E); }
  [[nodiscard]] const PagePool::EngineRows& layout() const { return rows_.table().pool().engine_rows(); }
  [[nodiscard]] std::size_t page_bytes() const { return 2 * rows_.page_rows() * row_bytes(); }

  [[nodiscard]] Plane plane(std::size_t row, std::size_t offset) const {
    return {.format = format(),
            .pages = rows_.table().addresses(),
            .page_rows = rows_.page_rows(),
            .row_stride = layout().row_stride,
            .first_row = row - rows_.first_slot(),
            .page_offset = offset};
  }

  // Where the key of the row after the last one goes.
  [[nodiscard]] std::byte* open_row() {
    std::byte* page = rows_.open_page(page_bytes());
    return page + end() % rows_.page_rows() * layout().row_stride;
  }
  void add(const Plane& keys, const Plane& values, std::size_t row) {
    std::byte* key = open_row();
    write(keys, row, key);
    write(values, row, key + layout().values_offset);
    rows_.add_rows(1);
  }
  void write(const Plane& source, std::size_t row, std::byte* to) const {
    if (source.format == format()) {
      const RowAddress place = source.address_of(row);
      std::memcpy(to, place.page + place.row * row_bytes(), row_bytes());
      return;
    }
    std::array<float, max_head_dim> numbers;
    const std::span<float> one = std::span{numbers}.first(head_dim_);
    load_row(source, row, one);
    store_dense(encoding_of<E>, one, to);
  }

  PageSequence rows_;
  std::size_t head_dim_;
  bool reserved_ = false;
};

static_assert(KvStorage<EnginePageStorage<float>>);

}  // namespace kvpolicy
