// SPDX-License-Identifier: Apache-2.0
//
// Where a DuoAttention pattern lies. The published repository has a folder for each model and in it
// one for the training run, which holds the two files.
#pragma once

#include <filesystem>

namespace kvpolicy::tools {

/// Whether a path is to be read as a pattern: a folder, or a file of gates.
[[nodiscard]] bool is_pattern_path(const std::filesystem::path& path);

/// The folder that holds the pattern: that of the file of gates, `path` itself, or the one folder
/// in it that does; `path` where there is none, for the reader to complain of.
/// @throws FormatError where several folders in it hold one, or for a file of gates of another name
[[nodiscard]] std::filesystem::path pattern_folder(const std::filesystem::path& path);

}  // namespace kvpolicy::tools
