// SPDX-License-Identifier: Apache-2.0
//
// One function for both directions of saving. A type that can be saved has
//
//     template <class Archive>
//     void serialize(Archive& archive) {
//       archive(storage_, positions_);
//       archive.check(positions_.size() == storage_.end(), "as many positions as rows");
//     }
//
// It writes the members when a cache is saved and fills them when one is loaded, so the two directions
// cannot differ. Members may be numbers, enumerators, std::optional, std::vector and any type that has such
// a function itself. Code that only loading needs goes into `if constexpr (Archive::loading)`. When a cache
// is saved, `serialize` must change nothing, although it is not const.
//
// Checksums detect accidents, so `check` is for files that were made to do harm: it must check everything
// that could lead out of bounds.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/state/records.hpp>

namespace kvpolicy {

class PageVisitor;
class PageSaver;
class PageLoader;

/// Numbers that are written as they are in memory. Other numbers are not, because their size depends on the
/// machine.
template <class T>
concept SavedAsIs =
    std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, std::uint32_t> ||
    std::same_as<T, std::uint64_t> || std::same_as<T, std::int64_t> || std::same_as<T, std::byte>;

/// Whether a type is a std::vector, which is saved with its length.
template <class T>
inline constexpr bool is_saved_list = false;
template <class T>
inline constexpr bool is_saved_list<std::vector<T>> = true;
/// Whether a type is a std::optional, which is saved with whether it holds a value.
template <class T>
inline constexpr bool is_saved_optional = false;
template <class T>
inline constexpr bool is_saved_optional<std::optional<T>> = true;

/// The head that is being saved or loaded, and how many committed rows its policy was given so far.
struct SavedHead {
  std::size_t layer = 0;
  std::size_t head = 0;
  std::size_t rows = 0;
};

/// Collects bytes, so that a checksum can tell whether two objects are equal.
struct ByteString {
  std::vector<std::byte> bytes;
  void write(std::span<const std::byte> more) { bytes.insert(bytes.end(), more.begin(), more.end()); }
};

/// Writes members to `Out`, which has write(bytes).
template <class Out>
class SavingArchive {
 public:
  static constexpr bool loading = false;
  explicit SavingArchive(Out& out) : out_{out} {}

  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }
  /// Writes bytes without their number, which the reader must know.
  void bytes(std::span<const std::byte> data) {
    if (visitor_ == nullptr) out_.write(data);
  }
  template <SavedAsIs T>
  void numbers(std::span<T> values) {
    bytes(std::as_bytes(values));
  }
  template <class... Parts>
  void check(bool, const Parts&...) const {}

  /// From now on nothing is written: storages show their pages instead (storage/page_visitor.hpp).
  void visit_pages(PageVisitor& visitor) { visitor_ = &visitor; }
  [[nodiscard]] PageVisitor* page_visitor() const { return visitor_; }
  /// From now on pages are written once, whoever shares them (storage/saved_pages.hpp).
  void share_pages(PageSaver& pages) { pages_ = &pages; }
  [[nodiscard]] PageSaver* shared_pages() const { return pages_; }

  [[nodiscard]] std::size_t rows() const { return place_.rows; }
  void enter(const SavedHead& place) { place_ = place; }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (SavedAsIs<T>) {
      bytes(std::as_bytes(std::span{&value, 1}));
    } else if constexpr (std::is_enum_v<T> || std::integral<T>) {
      put(static_cast<std::uint64_t>(value));
    } else if constexpr (std::same_as<T, RowRun>) {
      (*this)(value.first, value.rows);
    } else if constexpr (is_saved_optional<T>) {
      put(value.has_value());
      if (value) put(*value);
    } else if constexpr (is_saved_list<T>) {
      put(static_cast<std::uint64_t>(value.size()));
      if constexpr (SavedAsIs<typename T::value_type>) {
        bytes(std::as_bytes(std::span{value}));
      } else {
        for (const auto& one : value) put(one);
      }
    } else {
      static_assert(
          requires(T& seen, SavingArchive& archive) { seen.serialize(archive); },
          "kvpolicy: to be saved, a type needs "
          "`template <class Archive> void serialize(Archive&)` (state/archive.hpp)");
      const_cast<T&>(value).serialize(*this);
    }
  }

  Out& out_;
  SavedHead place_;
  PageVisitor* visitor_ = nullptr;
  PageSaver* pages_ = nullptr;
};

/// Fills members from a file. Memory is allocated as bytes arrive, never by a number in the file.
class LoadingArchive {
 public:
  static constexpr bool loading = true;
  explicit LoadingArchive(RecordReader& in) : in_{in} {}

  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  void bytes(std::span<std::byte> data) { in_.read(data); }
  template <SavedAsIs T>
  void numbers(std::span<T> values) {
    bytes(std::as_writable_bytes(values));
  }
  /// Checks a loaded value; `expected` says in words what it must be.
  /// @throws FormatError unless `ok`
  template <class... Parts>
  void check(bool ok, const Parts&... expected) const {
    require<FormatError>(ok, in_.name(), ": KV head ", place_.head, " of layer ", place_.layer,
                         " is not as a cache saves it: must be ", expected...);
  }

  [[nodiscard]] std::size_t rows() const { return place_.rows; }
  void enter(const SavedHead& place) { place_ = place; }

  /// As SavingArchive::share_pages.
  void share_pages(PageLoader& pages) { pages_ = &pages; }
  [[nodiscard]] PageLoader* shared_pages() const { return pages_; }

 private:
  template <class T>
  void get(T& value) {
    if constexpr (SavedAsIs<T>) {
      bytes(std::as_writable_bytes(std::span{&value, 1}));
    } else if constexpr (std::is_enum_v<T> || std::integral<T>) {
      using Number = typename std::conditional_t<std::is_enum_v<T>, std::underlying_type<T>,
                                                 std::type_identity<T>>::type;
      std::uint64_t number = 0;
      get(number);
      const auto narrow = static_cast<Number>(number);
      check(static_cast<std::uint64_t>(narrow) == number, "numbers that fit, not ", number);
      value = static_cast<T>(narrow);
    } else if constexpr (std::same_as<T, RowRun>) {
      (*this)(value.first, value.rows);
    } else if constexpr (is_saved_optional<T>) {
      bool has = false;
      get(has);
      value.reset();
      if (has) get(value.emplace());
    } else if constexpr (is_saved_list<T>) {
      get_list(value);
    } else {
      static_assert(
          requires(LoadingArchive& archive) { value.serialize(archive); },
          "kvpolicy: to be loaded, a type needs "
          "`template <class Archive> void serialize(Archive&)` (state/archive.hpp)");
      value.serialize(*this);
    }
  }

  template <class T>
  void get_list(std::vector<T>& list) {
    std::uint64_t size = 0;
    get(size);
    list.clear();
    if constexpr (SavedAsIs<T>) {
      constexpr std::size_t piece = 4096;
      while (list.size() < size) {
        const std::size_t from = list.size();
        const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(piece, size - from));
        list.resize(from + count);
        numbers(std::span{list}.subspan(from));
      }
    } else {
      for (std::uint64_t i = 0; i < size; ++i) get(list.emplace_back());
    }
  }

  RecordReader& in_;
  SavedHead place_;
  PageLoader* pages_ = nullptr;
};

/// A 64-bit checksum of `values`, to tell them from others.
template <class... T>
[[nodiscard]] std::uint64_t digest(const T&... values) {
  ByteString out;
  SavingArchive<ByteString> archive{out};
  archive(values...);
  return checksum(out.bytes);
}

/// Whether a type can be saved and loaded.
template <class T>
concept Savable = requires(T& value, SavingArchive<RecordWriter>& out, LoadingArchive& in) {
  value.serialize(out);
  value.serialize(in);
};

}  // namespace kvpolicy
