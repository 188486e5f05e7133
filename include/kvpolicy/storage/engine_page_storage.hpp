// SPDX-License-Identifier: Apache-2.0
//
// A head's rows in pages of an inference engine's own memory, in the layout of vLLM or FlashInfer: keys and
// values of a row lie on one page (memory/engine_pages.hpp), as plain numbers or, as engines with an FP8 cache
// have them, as codes in E4M3 with a scale of the head for keys and one for values. Attention reads the rows
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

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/encode_rows.hpp>
#include <kvpolicy/storage/page_sequence.hpp>
#include <kvpolicy/storage/page_visitor.hpp>
#include <kvpolicy/storage/plane_store.hpp>
#include <kvpolicy/storage/quantizable_rows.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// What rows in an engine's memory need to be read: nothing, for plain numbers.
template <class Storage, Codebook Rows>
struct EnginePageConfig {
  using storage_type = Storage;  ///< Whose settings these are.
  friend bool operator==(const EnginePageConfig&, const EnginePageConfig&) = default;
  void fields(FieldVisitor&) {}
  /// Adds how rows lie to a head's rule.
  void describe(HeadRule& rule, std::size_t /*head_dim*/) const { rule.engine_pages = true; }
};
/// The scales of rows in FP8: a number is its code's, times the scale. Larger numbers than 448 scales become that.
template <class Storage>
struct EnginePageConfig<Storage, Codebook::fp8> {
  using storage_type = Storage;  ///< Whose settings these are.
  double key_scale = 1.0;        ///< The head's, as the engine has it (vLLM's `k_scale`).
  double value_scale = 1.0;      ///< The same for values (`v_scale`).

  friend bool operator==(const EnginePageConfig&, const EnginePageConfig&) = default;
  void fields(FieldVisitor& visit) {
    visit("key_scale", key_scale);
    visit("value_scale", value_scale);
  }
  /// Adds how rows lie to a head's rule.
  void describe(HeadRule& rule, std::size_t head_dim) const {
    rule.engine_pages = true;
    rule.key_encoding = rule.value_encoding = Encoding::uint8;
    rule.key_group = rule.value_group = head_dim;
    rule.key_codebook = rule.value_codebook = Codebook::fp8;
    rule.key_scale = key_scale;
    rule.value_scale = value_scale;
  }
};

/// One head's rows in an engine's memory: numbers of type `E`, or with `Codebook::fp8` codes of them, which all rows of
/// the head become at once, sinks and latest rows as well. The pool's tier 0 must be memory of an engine. All its rows
/// stay there: a slower tier is refused. Copying makes a fork. Not synchronised.
template <Element E, Codebook Rows = Codebook::even>
class EnginePageStorage {
  static_assert(Rows == Codebook::even || Rows == Codebook::fp8, "an engine's rows are numbers or FP8");
  static constexpr bool is_fp8 = Rows == Codebook::fp8;

 public:
  using element_type = E;
  using Config = EnginePageConfig<EnginePageStorage, Rows>;
  /// What keeps the exact rows of a policy whose other rows are in such a storage.
  using exact_storage_type = EnginePageStorage;
  static constexpr std::string_view name = is_fp8 ? "engine_pages_fp8" : "engine_pages";
  static constexpr bool movable_rows = true;
  /// Rows in FP8 are not what they were before they were committed.
  static constexpr bool commit_changes_rows = is_fp8;

  /// @throws ConfigError if the pool's pages do not hold `page_rows` rows of this head_dim and type, or for a scale
  EnginePageStorage(const Config& config, const StorageContext& context)
      : rows_{context.pages(), context.page_rows}, head_dim_{context.head_dim}, config_{config} {
    validate(config, context);
    const PagePool::EngineRows& own = layout();
    require(own.page_rows > 0 && own.values_offset > 0,
            "EnginePageStorage: the pool's pages must be an engine's with keys and values");
    require(own.page_rows == context.page_rows && own.row_bytes == row_bytes(),
            "EnginePageStorage: the pool's pages have ", own.page_rows, " rows of ", own.row_bytes,
            " bytes, the cache's ", context.page_rows, " rows of ", row_bytes(),
            " bytes; they must be the same");
    if constexpr (!is_fp8) {
      require(own.alignment % alignof(E) == 0, "EnginePageStorage: rows lie at multiples of ", own.alignment,
              " bytes, must lie at multiples of ", alignof(E), ", the alignment of their numbers");
    }
    require(context.slow_tier == 0,
            "EnginePageStorage: rows in an engine's memory cannot go to a slower tier");
  }

  static void validate(const Config& config, const StorageContext& context) {
    context.validate();
    require(context.value_channels() == context.head_dim, "EnginePageStorage: value_dim is ",
            context.value_dim, ", must be head_dim = ", context.head_dim,
            ": an engine's pages hold keys and values of one size");
    if constexpr (is_fp8) {
      detail::check_head_scale("EnginePageStorage", "key", config.key_scale);
      detail::check_head_scale("EnginePageStorage", "value", config.value_scale);
    }
  }
  /// @throws ShapeError where rows become FP8 and a number is not finite or beyond half
  void check([[maybe_unused]] const Segment& rows) const {
    if constexpr (is_fp8) {
      detail::check_quantizable("EnginePageStorage", rows, {format(key), format(value)}, encoding_of<E>,
                                {head_dim_, head_dim_});
    }
  }

  EnginePageStorage(const EnginePageStorage& other)
      : rows_{other.rows_}, head_dim_{other.head_dim_}, config_{other.config_} {
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

  [[nodiscard]] static std::size_t bytes_of_rows(const Config& config, const StorageContext& context,
                                                 std::size_t begin, std::size_t end) {
    return 2 * PlaneStore::bytes_of_rows(format(config, context.head_dim, key), context, begin, end);
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t window, std::size_t end) {
    const std::size_t before = end - std::min<std::size_t>(end, 1);
    return bytes_of_rows(config, context, before - std::min(before, window), end);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t window, std::size_t end) {
    const std::size_t rows = end > window ? window + 1 : end;
    return 2 * PlaneStore::max_bytes(format(config, context.head_dim, key), context, rows);
  }

  void reserve(std::size_t rows, std::size_t window = unlimited_rows) {
    reserved_ = true;
    static_cast<void>(detail::RowEncoder::prepare(format(key), head_dim_));
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
    prototype.keys = plane(first, key);
    prototype.values = plane(first, value);
    prototype.rows = count;
    out.push_back(prototype);
  }

  /// The rows of these ascending numbers alone, numbered from 0.
  [[nodiscard]] EnginePageStorage select(std::span<const std::size_t> numbers) const {
    EnginePageStorage kept{config_, {head_dim_, rows_.page_rows(), &rows_.table().pool()}};
    const ScopedReserve scope{kept, numbers.size(), unlimited_rows};
    for (const std::size_t number : numbers) {
      kept.add(plane(number, key), plane(number, value), 0);
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
      std::byte* place = nullptr;
      if constexpr (Archive::loading) {
        place = open_row();
        rows_.add_rows(1);
      } else {
        place = rows_.table().address(rows_.page_of(row)) + row % rows_.page_rows() * layout().row_stride;
      }
      archive.bytes(std::span{place, row_bytes()});
      archive.bytes(std::span{place + layout().values_offset, row_bytes()});
    }
  }

 private:
  friend class ScopedReserve<EnginePageStorage>;

  enum Side : std::size_t { key, value };

  [[nodiscard]] static RowFormat format(const Config& config, std::size_t head_dim, Side side) {
    if constexpr (is_fp8) {
      const double scale = side == key ? config.key_scale : config.value_scale;
      return {Encoding::uint8, Granularity::per_token, head_dim,
              false,           Codebook::fp8,          detail::head_scale(scale)};
    } else {
      return {.encoding = encoding_of<E>};
    }
  }
  [[nodiscard]] RowFormat format(Side side) const { return format(config_, head_dim_, side); }
  [[nodiscard]] std::size_t row_bytes() const { return head_dim_ * (is_fp8 ? 1 : sizeof(E)); }
  [[nodiscard]] const PagePool::EngineRows& layout() const { return rows_.table().pool().engine_rows(); }
  [[nodiscard]] std::size_t page_bytes() const { return 2 * rows_.page_rows() * row_bytes(); }

  [[nodiscard]] Plane plane(std::size_t row, Side side) const {
    return {.format = format(side),
            .pages = rows_.table().addresses(),
            .page_rows = rows_.page_rows(),
            .row_stride = layout().row_stride,
            .first_row = row - rows_.first_slot(),
            .page_offset = side == key ? 0 : layout().values_offset};
  }

  // Where the key of the row after the last one goes.
  [[nodiscard]] std::byte* open_row() {
    std::byte* page = rows_.open_page(page_bytes());
    return page + end() % rows_.page_rows() * layout().row_stride;
  }
  void add(const Plane& keys, const Plane& values, std::size_t row) {
    std::byte* to = open_row();
    write(keys, row, key, to);
    write(values, row, value, to + layout().values_offset);
    rows_.add_rows(1);
  }
  void write(const Plane& source, std::size_t row, Side side, std::byte* to) const {
    const RowFormat own = format(side);
    if (source.format == own) {
      const RowAddress place = source.address_of(row);
      std::memcpy(to, place.page + place.row * row_bytes(), row_bytes());
      return;
    }
    const detail::RowEncoder encoder{own, encoding_of<E>, head_dim_, 1};
    encoder.load(source, row, 0);
    encoder.write_unit(to, 0);
  }

  PageSequence rows_;
  std::size_t head_dim_;
  Config config_;
  bool reserved_ = false;
};

static_assert(KvStorage<EnginePageStorage<float>>);
static_assert(KvStorage<EnginePageStorage<float, Codebook::fp8>>);

}  // namespace kvpolicy
