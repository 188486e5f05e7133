// SPDX-License-Identifier: Apache-2.0
//
// Finds the shipped model and texts, and writes results.
#pragma once

#include <string>

namespace kvpolicy::tools {

inline constexpr const char* shipped_model = "reference_model/weights/keyfinder";

/// Resolves a path inside the repository, from the working directory or from the program's own
/// folder (build/<preset>/examples). Returns `path` unchanged if it exists in neither.
[[nodiscard]] std::string repository_path(const std::string& path);

/// The last part of a path, whether it ends in a slash or not: what a model is called.
[[nodiscard]] std::string last_part(const std::string& path);

/// Writes a text file, and creates its folder if necessary.
/// @throws StorageError naming the file or the folder
void write_result(const std::string& path, const std::string& text);

/// @throws FormatError that says what a model is, unless `folder` holds a config.json or is a file, which
/// must then be GGUF
void require_model_folder(const std::string& folder);

}  // namespace kvpolicy::tools
