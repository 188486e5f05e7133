// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes whole text files, with errors that tell a user what to do.
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

/// The largest text file that is read. Pattern, score and plan files are far smaller.
inline constexpr std::size_t largest_text_file = std::size_t{64} << 20;

/// Reads a whole file.
/// @throws FormatError if the file is missing, not a regular file, empty, unreadable, or larger than
/// `max_bytes`, which is checked before anything is read.
[[nodiscard]] inline std::string read_text_file(const std::filesystem::path& path,
                                                std::uintmax_t max_bytes = largest_text_file) {
  require_regular_file<FormatError>(path);
  const std::string name = path.string();
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  require<FormatError>(!error, name, ": cannot be read: ", error.message());
  require<FormatError>(bytes > 0, name, ": is empty");
  require<FormatError>(bytes <= max_bytes, name, ": has ", bytes, " bytes, must be at most ", max_bytes);
  std::ifstream file{path, std::ios::binary};
  require<FormatError>(file.good(), name, ": cannot be opened");
  std::string text(static_cast<std::size_t>(bytes), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  require<FormatError>(file.gcount() == static_cast<std::streamsize>(text.size()), name, ": ended after ",
                       file.gcount(), " of its ", bytes, " bytes");
  return text;
}

/// Reads the rest of a stream; errors call it `name`.
/// @throws FormatError if the stream fails, or as soon as it has more than `max_bytes`.
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

/// Replaces the file as a whole, after all of `text` is on the disk: a reader sees the old text or the new
/// one. The file keeps its permissions; a symbolic link stays and its target is replaced.
/// @throws StorageError if it cannot be written, or is a device, a pipe or a folder.
inline void write_text_file(const std::filesystem::path& path, std::string_view text) {
  NewFile file{path};
  file.write(std::as_bytes(std::span{text}));
  file.replace();
}

}  // namespace kvpolicy::io
