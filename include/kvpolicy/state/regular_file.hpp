// SPDX-License-Identifier: Apache-2.0
//
// Checks a file before a reader opens it by its path: opening a pipe may wait for ever, and a device may
// never end.
#pragma once

#include <filesystem>
#include <system_error>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Refuses a path that does not lead to a regular file, directly or through symbolic links.
/// @throws E
template <class E>
void require_regular_file(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require<E>(status.type() != fs::file_type::not_found, path.string(), ": there is no such file");
  require<E>(!error, path.string(), ": cannot be read: ", error.message());
  require<E>(!fs::is_directory(status), path.string(), ": is a folder");
  require<E>(fs::is_regular_file(status), path.string(),
             ": is not a regular file; what comes from a pipe or a device is read as a stream");
}

}  // namespace kvpolicy
