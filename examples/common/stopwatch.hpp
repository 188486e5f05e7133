// SPDX-License-Identifier: Apache-2.0
//
// Measures the time since its construction.
#pragma once

#include <chrono>

namespace kvpolicy::tools {

class Stopwatch {
 public:
  [[nodiscard]] double milliseconds() const {
    return std::chrono::duration<double, std::milli>(Clock::now() - began_).count();
  }
  [[nodiscard]] double seconds() const { return milliseconds() / 1e3; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point began_ = Clock::now();
};

}  // namespace kvpolicy::tools
