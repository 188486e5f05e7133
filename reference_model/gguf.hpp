// SPDX-License-Identifier: Apache-2.0
//
// Reads GGUF files of versions 2 and 3: a header with typed metadata and the names, shapes and
// offsets of tensors, then the tensors' bytes, each at a multiple of `general.alignment`.
//
// A file's header is checked as a whole before a tensor is read: a file that passes can be read
// without an access out of bounds, and every error names the file, the key or tensor, the value and
// what would fit. Names that occur twice, tensors that overlap and arrays of arrays are errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <reference_model/gguf_blocks.hpp>
#include <reference_model/mapped_file.hpp>

namespace kvpolicy::reference {

/// A metadata value. Whole numbers and floats of all widths are kept in the widest type.
using GgufArray = std::variant<std::vector<std::uint64_t>, std::vector<std::int64_t>, std::vector<double>,
                               std::vector<bool>, std::vector<std::string>>;
using GgufValue = std::variant<std::uint64_t, std::int64_t, double, bool, std::string, GgufArray>;

/// A value as errors print it: a text in quotes and shortened, of an array only its length and
/// type.
[[nodiscard]] std::string shown(const GgufValue& value);

/// One tensor. The shape is that of the array in memory, the longest stride first, as in
/// safetensors; the file lists sizes the other way round.
struct GgufTensor {
  GgufType type = GgufType::f32;
  std::vector<std::size_t> shape;
  std::uint64_t begin = 0;  ///< Position of the tensor's first byte in the file.
  std::size_t bytes = 0;

  /// Numbers in a row, and bytes of a row.
  [[nodiscard]] std::size_t columns() const noexcept { return shape.back(); }
  [[nodiscard]] std::size_t row_bytes() const noexcept {
    return columns() / block_of(type).elements * block_of(type).bytes;
  }
};

struct GgufHeader {
  std::uint32_t version = 0;
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::map<std::string, GgufTensor, std::less<>> tensors;
};

/// The longest header that is accepted. Those of large vocabularies have about 10 MB.
inline constexpr std::size_t max_gguf_header_bytes = 100'000'000;

/// Checks the header of a file in memory. `file` is named in errors.
/// @throws FormatError as described at the top of this file
[[nodiscard]] GgufHeader parse_gguf(std::span<const std::byte> bytes, std::string_view file);

/// Whether a path given for a model names one file, not a folder; a model's only form as one file
/// is GGUF.
[[nodiscard]] bool is_gguf(const std::string& path);

/// An open file. Several threads may read it.
class GgufFile {
 public:
  /// @throws FormatError if the file is missing, unreadable or not valid
  explicit GgufFile(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  [[nodiscard]] const GgufHeader& header() const noexcept { return header_; }

  /// The bytes of `tensor`, one of the header's. @throws FormatError if the file was shortened
  [[nodiscard]] std::span<const std::byte> bytes_of(const GgufTensor& tensor) const {
    return file_.bytes(tensor.begin, tensor.bytes);
  }

  /// Says that the tensor's memory will not be needed soon. Only a hint.
  void release(const GgufTensor& tensor) const { file_.release(bytes_of(tensor)); }

 private:
  MappedFile file_;
  GgufHeader header_;
};

/// Metadata by key, with the checks that every reader of it needs. A number in a file may have any
/// whole type in which it fits.
class GgufKeys {
 public:
  GgufKeys(const GgufHeader& header, std::string_view origin) : header_{&header}, origin_{origin} {}

  [[nodiscard]] std::string_view origin() const noexcept { return origin_; }
  [[nodiscard]] bool contains(std::string_view key) const { return header_->metadata.contains(key); }
  /// The value, or `fallback` where the key is missing. @throws FormatError if the key is missing
  /// and there is no fallback, if the value has another type, or, for a size, if it is above 2^24
  [[nodiscard]] std::size_t size(std::string_view key, std::optional<std::size_t> fallback = {}) const;
  [[nodiscard]] double number(std::string_view key, std::optional<double> fallback = {}) const;
  [[nodiscard]] bool flag(std::string_view key, std::optional<bool> fallback = {}) const;
  [[nodiscard]] std::string text(std::string_view key, std::optional<std::string> fallback = {}) const;
  /// An array, or an empty one where the key is missing. @throws FormatError for another type
  [[nodiscard]] std::vector<std::string> texts(std::string_view key) const;
  [[nodiscard]] std::vector<double> numbers(std::string_view key) const;
  [[nodiscard]] std::vector<std::int64_t> whole_numbers(std::string_view key) const;

 private:
  template <class T, class Convert>
  [[nodiscard]] T get(std::string_view key, std::optional<T> fallback, std::string_view expected,
                      const Convert& convert) const;

  const GgufHeader* header_;
  std::string_view origin_;
};

}  // namespace kvpolicy::reference
