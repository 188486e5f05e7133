// SPDX-License-Identifier: Apache-2.0
//
// Whole text files to strings and back, with the errors that a user can act on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <istream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/state/new_file.hpp>
#include <kvpolicy/state/regular_file.hpp>

namespace kvpolicy::io {

/// Pattern, score and plan files are far smaller; a larger file is some other file.
inline constexpr std::size_t largest_text_file = std::size_t{64} << 20;

/// All of a file.
/// @throws FormatError if the file is missing, not a regular file, empty, unreadable, or larger
/// than `max_bytes`, which is found out before any of it is read.
[[nodiscard]] inline std::string read_text_file(const std::filesystem::path& path,
                                                std::uintmax_t max_bytes = largest_text_file) {
  require_regular_file<FormatError>(path);
  const std::string name = path.string();
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  require<FormatError>(!error, name, ": cannot be read: ", error.message());
  require<FormatError>(bytes > 0, name, ": is empty");
  require<FormatError>(bytes <= max_bytes, name, ": has ", bytes, " bytes, must be at most ",
                       max_bytes);
  std::ifstream file{path, std::ios::binary};
  require<FormatError>(file.good(), name, ": cannot be opened");
  std::string text(static_cast<std::size_t>(bytes), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  require<FormatError>(file.gcount() == static_cast<std::streamsize>(text.size()), name,
                       ": ended after ", file.gcount(), " of its ", bytes, " bytes");
  return text;
}

/// All that a stream still has, which `name` calls by name in errors.
/// @throws FormatError if it fails, or as soon as it has more than `max_bytes`.
[[nodiscard]] inline std::string read_text_stream(std::istream& stream, std::string_view name,
                                                  std::size_t max_bytes = largest_text_file) {
  constexpr std::size_t piece = std::size_t{64} << 10;
  std::string text;
  while (stream.good()) {
    const std::size_t before = text.size();
    text.resize(before + std::min(piece, max_bytes + 1 - before));
    stream.read(text.data() + before, static_cast<std::streamsize>(text.size() - before));
    text.resize(before + static_cast<std::size_t>(stream.gcount()));
    require<FormatError>(text.size() <= max_bytes, name, ": has more than ", max_bytes, " bytes");
  }
  require<FormatError>(stream.eof() && !stream.bad(), name, ": cannot be read");
  return text;
}

/// Replaces the file as a whole, once all of `text` is on the disk: a reader sees the old text or
/// the new one. The file keeps its permissions; a symbolic link goes on pointing to it.
/// @throws StorageError if it cannot be written, or is a device, a pipe or a folder.
inline void write_text_file(const std::filesystem::path& path, std::string_view text) {
  NewFile file{path};
  file.write(std::as_bytes(std::span{text}));
  file.replace();
}

}  // namespace kvpolicy::io
