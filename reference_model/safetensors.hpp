// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes safetensors files: eight bytes with the length of a JSON header, the header
// (name -> type, shape, range of bytes), then the tensors' bytes without a gap.
//
// A file is checked as a whole before a tensor is read: a file that passes can be read without an
// access out of bounds, and every error names the file, the tensor, the value and what would fit.
// One rule is stricter than in most readers: a name that occurs twice is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/mapped_file.hpp>

namespace kvpolicy::reference {

/// The element types of the format. Only f32, f16 and bf16 can be read as float; the others are
/// listed so that their byte ranges can be checked.
enum class TensorType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
  f8_e4m3,
  f8_e5m2,
  c64
};

[[nodiscard]] std::size_t bytes_of(TensorType type) noexcept;
[[nodiscard]] std::string_view name_of(TensorType type) noexcept;

/// A shape as errors print it: "[2, 64]".
[[nodiscard]] std::string text_of(std::span<const std::size_t> shape);

/// One tensor; [begin, end) are byte offsets from the end of the header.
struct TensorEntry {
  TensorType type = TensorType::f32;
  std::vector<std::size_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  [[nodiscard]] std::size_t elements() const noexcept {
    return static_cast<std::size_t>(end - begin) / bytes_of(type);
  }
};

struct SafetensorsHeader {
  std::map<std::string, TensorEntry, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;  ///< Where the tensors' bytes begin in the file.
};

/// The longest header that is accepted, as in the format's own implementation.
inline constexpr std::uint64_t max_safetensors_header_bytes = 100'000'000;

/// Checks a whole file in memory. `file` is named in errors.
/// @throws FormatError as described at the top of this file
[[nodiscard]] SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, std::string_view file);

/// The values of `bytes`, whose type is f32, f16 or bf16. @throws FormatError for another type.
[[nodiscard]] std::vector<float> to_floats(TensorType type, std::span<const std::byte> bytes);

/// The index of the first value that is NaN or infinite, of `bytes` of type f32, f16 or bf16.
/// @throws FormatError for another type
[[nodiscard]] std::optional<std::size_t> first_not_finite(TensorType type, std::span<const std::byte> bytes);

/// An open file. Its tensors stay in the file until they are read (mapped_file.hpp).
class SafetensorsFile {
 public:
  /// @throws FormatError if the file is missing, unreadable or not valid.
  explicit SafetensorsFile(std::string path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const SafetensorsHeader& header() const noexcept { return header_; }
  [[nodiscard]] bool contains(std::string_view name) const { return header_.tensors.contains(name); }
  /// @throws FormatError, naming the file, if there is no such tensor.
  [[nodiscard]] const TensorEntry& entry(std::string_view name) const;

  /// A tensor's bytes in the mapping. They need not be aligned.
  /// @throws FormatError for a missing name or a file that has been shortened
  [[nodiscard]] std::span<const std::byte> bytes(std::string_view name) const;

  /// Keeps the bytes valid, as long as a copy of it lives.
  [[nodiscard]] const std::shared_ptr<const MappedFile>& mapping() const noexcept { return file_; }

  /// A copy of them. @throws as bytes
  [[nodiscard]] std::vector<std::byte> read_bytes(std::string_view name) const;

  /// @throws FormatError, naming the file, unless the tensor's type is f32, f16 or bf16
  void require_floats(std::string_view name) const;

  /// Reads a tensor of f32, f16 or bf16 as float. @throws FormatError for another type, or as
  /// read_bytes
  [[nodiscard]] std::vector<float> read_floats(std::string_view name) const;

 private:
  std::string path_;
  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
};

/// A tensor to be written; the caller owns its bytes.
struct TensorToWrite {
  std::string name;
  TensorType type = TensorType::f32;
  std::vector<std::size_t> shape;
  std::span<const std::byte> bytes;
};

/// Returns a whole file in memory. @throws FormatError if bytes and shape disagree, a name repeats,
/// or a name or the metadata is not UTF-8
[[nodiscard]] std::vector<std::byte> serialize_safetensors(
    std::span<const TensorToWrite> tensors, const std::map<std::string, std::string>& metadata = {});

/// Writes a file; an existing file is replaced as a whole. @throws FormatError as
/// serialize_safetensors, StorageError if it cannot be written
void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kvpolicy::reference
