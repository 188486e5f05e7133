// SPDX-License-Identifier: Apache-2.0
//
// Finds the files of a DuoAttention pattern. The published repository has a folder for each model,
// which contains a folder for the training run with the two files.
#pragma once

#include <filesystem>

namespace kvpolicy::tools {

/// Whether a path is read as a pattern: a folder, or a file of gates.
[[nodiscard]] bool is_pattern_path(const std::filesystem::path& path);

/// The folder that holds the pattern: the folder of the file of gates, `path` itself, or the only
/// folder in it that has the files. Returns `path` where there is none, so that the reader reports
/// the error.
/// @throws FormatError where several folders hold a pattern, or for a file of gates of another name
[[nodiscard]] std::filesystem::path pattern_folder(const std::filesystem::path& path);

}  // namespace kvpolicy::tools
