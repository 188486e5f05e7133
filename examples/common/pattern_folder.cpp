// SPDX-License-Identifier: Apache-2.0
#include "pattern_folder.hpp"

#include <algorithm>
#include <string>
#include <system_error>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/duo_pattern.hpp>

namespace kvpolicy::tools {

namespace fs = std::filesystem;

bool is_pattern_path(const fs::path& path) {
  std::error_code ignored;
  return path.extension() == ".tsv" || fs::is_directory(path, ignored);
}

fs::path pattern_folder(const fs::path& path) {
  std::error_code ignored;
  if (path.extension() == ".tsv" && !fs::is_directory(path, ignored)) {
    require<FormatError>(path.filename() == io::duo_gates_file, path.string(),
                         ": the gates of a pattern are called ", io::duo_gates_file,
                         ", and lie beside their ", io::duo_config_file);
    return path.has_parent_path() ? path.parent_path() : fs::path{"."};
  }
  if (fs::exists(path / io::duo_gates_file, ignored)) return path;
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator{path, ignored}) {
    if (fs::exists(entry.path() / io::duo_gates_file, ignored)) found.push_back(entry.path().string());
  }
  if (found.empty()) return path;
  std::ranges::sort(found);
  require<FormatError>(found.size() == 1, path.string(), ": holds ", found.size(),
                       " patterns, give one of them, ", found.front(), " or ", found.back());
  return found.front();
}

}  // namespace kvpolicy::tools
