// SPDX-License-Identifier: Apache-2.0
//
// Where the tools find the shipped model and texts, and where their results go.
#pragma once

#include <string>

namespace kvpolicy::tools {

inline constexpr const char* shipped_model = "reference_model/weights/keyfinder";

/// A path inside the repository, found from the working directory or from the program's own place
/// (build/<preset>/examples); as it was given if it is in neither.
[[nodiscard]] std::string repository_path(const std::string& path);

/// Writes a text file and makes the folder that it goes into.
/// @throws StorageError naming the file or the folder.
void write_result(const std::string& path, const std::string& text);

/// @throws FormatError that says what a model folder is unless `folder` holds a config.json.
void require_model_folder(const std::string& folder);

}  // namespace kvpolicy::tools
