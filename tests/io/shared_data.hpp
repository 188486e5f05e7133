// SPDX-License-Identifier: Apache-2.0
//
// The folder with the published patterns and scores that tests compare with: a folder beside the
// repository, or the one that KVPOLICY_SHARED_DATA names. If it does not exist, tests say so and pass.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "support/source_dir.hpp"

namespace kvpolicy::testing {

inline std::filesystem::path shared_data() {
  if (const char* folder = std::getenv("KVPOLICY_SHARED_DATA")) return folder;
#ifdef KVPOLICY_SHARED_DATA
  return KVPOLICY_SHARED_DATA;
#else
  return std::filesystem::path{source_dir()} / ".." / "shared" / "data";
#endif
}

inline bool has_shared_data() {
  if (std::filesystem::is_directory(shared_data() / "golden")) return true;
  std::cout << "skipped: there is no " << shared_data().string()
            << " (set KVPOLICY_SHARED_DATA to the folder of published data)\n";
  return false;
}

inline std::filesystem::path sample_data() {
  return std::filesystem::path{source_dir()} / "examples" / "data";
}

}  // namespace kvpolicy::testing
