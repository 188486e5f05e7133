// SPDX-License-Identifier: Apache-2.0
#include "files.hpp"

#include <filesystem>
#include <system_error>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

namespace kvpolicy::tools {
namespace fs = std::filesystem;

std::string repository_path(const std::string& path) {
  std::error_code ignored;
  if (fs::path{path}.is_absolute() || fs::exists(path, ignored)) return path;
  const auto search = [&](fs::path folder) -> std::string {
    for (; !folder.empty(); folder = folder.parent_path()) {
      if (fs::exists(folder / path, ignored)) return (folder / path).string();
      if (folder == folder.parent_path()) break;
    }
    return {};
  };
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  for (const fs::path& start : {fs::current_path(ignored), program.parent_path()}) {
    if (std::string found = search(start); !found.empty()) {
      const std::string shorter = fs::proximate(found, ignored).string();
      return shorter.empty() || shorter.size() > found.size() ? found : shorter;
    }
  }
  return path;
}

std::string last_part(const std::string& path) {
  const fs::path place = fs::absolute(path).lexically_normal();
  return (place.has_filename() ? place : place.parent_path()).filename().string();
}

void write_result(const std::string& path, const std::string& text) {
  const fs::path target{path};
  std::error_code failed;
  if (target.has_parent_path()) fs::create_directories(target.parent_path(), failed);
  require<StorageError>(!failed, target.parent_path().string(), ": cannot be made: ", failed.message());
  io::write_text_file(target, text);
}

void require_model_folder(const std::string& folder) {
  std::error_code ignored;
  const bool found =
      fs::is_regular_file(folder, ignored) || fs::exists(fs::path{folder} / "config.json", ignored);
  require<FormatError>(found, folder,
                       ": no model here; --model takes a Hugging Face folder with config.json and "
                       "model.safetensors, or a GGUF file");
}

}  // namespace kvpolicy::tools
