// SPDX-License-Identifier: Apache-2.0
//
// Whole text files to strings and back, with the errors that a user can act on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::io {

/// Pattern, score and plan files are far smaller; a larger file is some other file.
inline constexpr std::uintmax_t largest_text_file = std::uintmax_t{64} << 20;

/// All of a file.
/// @throws FormatError if the file is missing, not a regular file, empty, unreadable, or larger
/// than `max_bytes`, which is found out before any of it is read.
[[nodiscard]] inline std::string read_text_file(const std::filesystem::path& path,
                                                std::uintmax_t max_bytes = largest_text_file) {
  namespace fs = std::filesystem;
  const std::string name = path.string();
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require<FormatError>(fs::exists(status), name, ": there is no such file");
  require<FormatError>(fs::is_regular_file(status), name, ": is not a regular file");
  const std::uintmax_t bytes = fs::file_size(path, error);
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

/// Replaces the file only once all of `text` is written.
/// @throws FormatError if it cannot be written.
inline void write_text_file(const std::filesystem::path& path, std::string_view text) {
  namespace fs = std::filesystem;
  fs::path partial = path;
  partial += ".partial";
  std::error_code error;
  {
    std::ofstream file{partial, std::ios::binary | std::ios::trunc};
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    file.close();
    if (!file.good()) {
      fs::remove(partial, error);
      fail<FormatError>(path.string(), ": cannot be written");
    }
  }
  fs::rename(partial, path, error);
  if (!error) return;
  const std::string reason = error.message();
  fs::remove(partial, error);
  fail<FormatError>(path.string(), ": cannot be written: ", reason);
}

}  // namespace kvpolicy::io
