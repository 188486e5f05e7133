// SPDX-License-Identifier: Apache-2.0
//
// A folder for one test, which the destructor removes with all files in it.
#pragma once

#include <filesystem>
#include <fstream>
#include <ios>
#include <random>
#include <string>
#include <string_view>
#include <system_error>

namespace kvpolicy::testing {

class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_{std::filesystem::temp_directory_path() /
              ("kvpolicy-test-" + std::to_string(std::random_device{}()) +
               std::to_string(std::random_device{}()))} {
    std::filesystem::create_directory(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  void write(const std::string& name, std::string_view contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace kvpolicy::testing
