// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ctime>

namespace kvpolicy::tools {

/// The machine's local time, for chat templates that print the date.
[[nodiscard]] inline std::tm local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  return local;
}

}  // namespace kvpolicy::tools
