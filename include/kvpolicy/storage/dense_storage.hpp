// SPDX-License-Identifier: Apache-2.0
//
// A head's rows as plain numbers. Also the model of what a storage is: a numbered sequence of
// (key, value) rows that grows at its end, may lose its front, can be compacted, and shows itself
// as segments.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/storage/plane_store.hpp>

namespace kvpolicy {

/// A window that drops no row.
inline constexpr std::size_t unlimited_rows = std::numeric_limits<std::size_t>::max();

/// What policies ask of a storage. Copying one makes a fork.
template <class S>
concept KvStorage =
    std::copyable<S> && Element<typename S::element_type> &&
    requires(S storage, const S& seen, const typename S::Config& config, const StorageContext& context,
             const Segment& rows, SegmentList& out, std::size_t n) {
      S{config, context};
      S::validate(config, context);  // throws ConfigError
      seen.check(rows);              // throws ShapeError for numbers that it cannot hold
      storage.reserve(n, n);         // (rows, window): pages for the append that follows
      storage.release_unused();
      storage.append(rows, n);        // (rows, window): keeps the latest `window` rows
      storage.show(n, n, rows, out);  // (first row, count, prototype, out)
      { seen.begin() } -> std::convertible_to<std::size_t>;
      { seen.end() } -> std::convertible_to<std::size_t>;
      { seen.bytes() } -> std::convertible_to<std::size_t>;
      { seen.shared_bytes() } -> std::convertible_to<std::size_t>;
      { S::bytes_of_rows(config, context, n, n) } -> std::convertible_to<std::size_t>;
      // (config, context, window, end): what is held while row end - 1 comes, before rows that it
      // drives out are gone; and a bound on that which never falls as `end` grows.
      { S::bytes_of_step(config, context, n, n) } -> std::convertible_to<std::size_t>;
      { S::max_bytes(config, context, n, n) } -> std::convertible_to<std::size_t>;
      // Whether a row can move or go without its neighbours, which eviction needs; such a storage
      // also has select(std::span<const std::size_t> row numbers) -> S.
      { S::movable_rows } -> std::convertible_to<bool>;
    };

/// A storage that says which of its rows are final: they are kept in the form that they will have for
/// good. Pages full of such rows never change, so they may lie in any tier of the pool.
template <class S>
concept FinalRowsStorage =
    KvStorage<S> && requires(S& storage, const S& seen, const typename S::Config& config,
                             const StorageContext& context, std::size_t n) {
      // The planes of the final rows: keys, then values.
      { storage.final_planes() } -> std::same_as<std::array<PlaneStore*, 2>>;
      { seen.final_planes() } -> std::same_as<std::array<const PlaneStore*, 2>>;
      // How many rows, counted from row 0, are final once n rows came; of this storage, and by settings.
      { seen.final_rows(n) } -> std::convertible_to<std::size_t>;
      { S::final_rows(config, n) } -> std::convertible_to<std::size_t>;
      // What the pages of the first n rows take, if these are final.
      { S::bytes_of_final_rows(config, context, n) } -> std::convertible_to<std::size_t>;
    };

/// What a storage takes besides its rows and the object itself, if it says so (`overhead_bytes`).
template <KvStorage S>
[[nodiscard]] std::size_t overhead_of(const S& storage) {
  if constexpr (requires { storage.overhead_bytes(); }) return storage.overhead_bytes();
  return 0;
}
/// A storage that can take rows as another one of its settings keeps them: (rows, first row number).
template <class S>
concept TakingStorage = requires(S storage, const Segment& rows, std::size_t n) { storage.take(rows, n); };

/// A storage whose settings have names and can say how rows lie (core/head_rule.hpp).
template <class S>
concept DescribedStorage =
    HasFields<typename S::Config> && requires(const typename S::Config& config, HeadRule& rule,
                                              std::size_t head_dim) { config.describe(rule, head_dim); };

/// Pages for one `append`, obtained before a row is written, where no `reserve` came before it.
template <class Storage>
class ScopedReserve {
 public:
  ScopedReserve(Storage& storage, std::size_t rows, std::size_t window)
      : own_{storage.reserved_ ? nullptr : &storage} {
    if (own_ == nullptr) return;
    KVPOLICY_TRY { storage.reserve(rows, window); }
    KVPOLICY_CATCH_ALL {
      storage.release_unused();
      KVPOLICY_RETHROW;
    }
  }
  ScopedReserve(const ScopedReserve&) = delete;
  ScopedReserve& operator=(const ScopedReserve&) = delete;
  ~ScopedReserve() {
    if (own_ != nullptr) own_->release_unused();
  }

 private:
  Storage* own_;
};

/// One head's rows as numbers of type `E`. Copying makes a fork. Not synchronised.
template <Element E>
class DenseStorage {
 public:
  using element_type = E;
  /// There is nothing to set.
  struct Config {
    using storage_type = DenseStorage;  ///< Whose settings these are.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor&) {}
    /// Adds how rows lie to a head's rule.
    void describe(HeadRule&, std::size_t /*head_dim*/) const {}
  };
  static constexpr std::string_view name = "dense";
  static constexpr bool movable_rows = true;

  /// @throws ConfigError if the context does not work.
  DenseStorage(Config, const StorageContext& context)
      : keys_{format(), context}, values_{format(), context.of_values()} {
    context.validate();
  }

  static void validate(const Config&, const StorageContext& context) { context.validate(); }
  void check(const Segment&) const {}

  [[nodiscard]] std::size_t begin() const { return keys_.begin(); }
  [[nodiscard]] std::size_t end() const { return keys_.end(); }
  [[nodiscard]] std::size_t bytes() const { return keys_.bytes() + values_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return keys_.shared_bytes() + values_.shared_bytes(); }
  /// Page tables and the like: bookkeeping besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return keys_.overhead_bytes() + values_.overhead_bytes();
  }
  [[nodiscard]] static std::size_t bytes_of_rows(const Config&, const StorageContext& context,
                                                 std::size_t begin, std::size_t end) {
    return PlaneStore::bytes_of_rows(format(), context, begin, end) +
           PlaneStore::bytes_of_rows(format(), context.of_values(), begin, end);
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t window, std::size_t end) {
    const std::size_t before = end - std::min<std::size_t>(end, 1);
    return bytes_of_rows(config, context, before - std::min(before, window), end);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config&, const StorageContext& context, std::size_t window,
                                             std::size_t end) {
    const std::size_t rows = end > window ? window + 1 : end;
    return PlaneStore::max_bytes(format(), context, rows) +
           PlaneStore::max_bytes(format(), context.of_values(), rows);
  }

  // ---- final rows (FinalRowsStorage): all of them

  [[nodiscard]] std::array<PlaneStore*, 2> final_planes() { return {&keys_, &values_}; }
  [[nodiscard]] std::array<const PlaneStore*, 2> final_planes() const { return {&keys_, &values_}; }
  [[nodiscard]] std::size_t final_rows(std::size_t end) const { return end; }
  [[nodiscard]] static std::size_t final_rows(const Config&, std::size_t end) { return end; }
  [[nodiscard]] static std::size_t bytes_of_final_rows(const Config& config, const StorageContext& context,
                                                       std::size_t rows) {
    return bytes_of_rows(config, context, 0, rows);
  }

  void reserve(std::size_t rows, std::size_t window = unlimited_rows) {
    reserved_ = true;
    keys_.reserve(end(), end() + rows, window);
    values_.reserve(end(), end() + rows, window);
  }
  void release_unused() noexcept {
    keys_.release_unused();
    values_.release_unused();
    reserved_ = false;
  }

  void append(const Segment& rows, std::size_t window = unlimited_rows) {
    if (rows.rows == 0) return;
    const ScopedReserve scope{*this, rows.rows, window};
    const std::size_t to = end() + rows.rows;
    const std::size_t front = std::max(begin(), to - std::min(to, window));
    append_side(keys_, rows.keys, to, front);
    append_side(values_, rows.values, to, front);
  }

  /// Goes back to what it was when row `row` had not come, if that row begins a page and all before it
  /// are there.
  [[nodiscard]] bool cut(std::size_t row) noexcept {
    if (begin() > 0 || row > end() || row % keys_.context().page_rows != 0) return false;
    keys_.cut(row);
    values_.cut(row);
    return true;
  }

  /// Appends rows as another storage keeps them, the first as row number `first`.
  void take(const Segment& rows, std::size_t first) {
    if (end() == 0) {
      keys_.skip_to(first);
      values_.skip_to(first);
    }
    append(rows);
  }

  /// Adds the rows [first, first + count) to `out`, each segment made after `prototype`, whose
  /// position is that of row `first`.
  void show(std::size_t first, std::size_t count, Segment prototype, SegmentList& out) const {
    if (count == 0) return;
    prototype.keys = keys_.plane(first);
    prototype.values = values_.plane(first);
    prototype.rows = count;
    out.push_back(prototype);
  }

  /// The rows of these ascending numbers alone, numbered from 0 again.
  [[nodiscard]] DenseStorage select(std::span<const std::size_t> numbers) const {
    DenseStorage kept{{}, keys_.context().with_values(values_.context())};
    const ScopedReserve scope{kept, numbers.size(), unlimited_rows};
    for (const std::size_t number : numbers) {
      kept.keys_.append(keys_.plane(number), 1);
      kept.values_.append(values_.plane(number), 1);
    }
    return kept;
  }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(keys_, values_);
    archive.check(keys_.begin() == values_.begin() && keys_.end() == values_.end(), "as many values as keys");
  }

 private:
  friend class ScopedReserve<DenseStorage>;

  [[nodiscard]] static RowFormat format() { return {.encoding = encoding_of<E>}; }

  static void append_side(PlaneStore& side, const Plane& rows, std::size_t to, std::size_t front) {
    const std::size_t first = std::max(front, side.end());
    const std::size_t skipped = first - side.end();
    front < side.end() ? side.drop_front(front) : side.skip_to(front);
    side.append(rows.from(skipped), to - first);
  }

  PlaneStore keys_;
  PlaneStore values_;
  bool reserved_ = false;
};

namespace detail {
template <class Storage>
struct ExactStorageOf {
  using type = DenseStorage<typename Storage::element_type>;
};
template <class Storage>
  requires requires { typename Storage::exact_storage_type; }
struct ExactStorageOf<Storage> {
  using type = typename Storage::exact_storage_type;
};
}  // namespace detail

/// Where a policy keeps rows that must stay exact, whatever its storage does to the others: dense
/// rows, unless the storage names another one (`exact_storage_type`), whose rows may be in FP8 where an engine's are.
template <KvStorage Storage>
using ExactStorage = typename detail::ExactStorageOf<Storage>::type;

/// The settings of that storage: those of the other rows if it is the same, otherwise none.
template <KvStorage Storage>
[[nodiscard]] typename ExactStorage<Storage>::Config exact_config(const typename Storage::Config& config) {
  if constexpr (std::same_as<ExactStorage<Storage>, Storage>) {
    return config;
  } else {
    return {};
  }
}

}  // namespace kvpolicy
