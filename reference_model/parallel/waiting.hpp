// SPDX-License-Identifier: Apache-2.0
//
// How a rank waits for others.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>

namespace kvpolicy::reference {

/// Tests have a time of their own.
using Clock = std::function<std::chrono::steady_clock::time_point()>;

/// Most calls come together at once; a rank that waits for long lets others have the processor, and one that waits for
/// longer, as for a server's next request, hardly takes any of it.
class Waiting {
 public:
  explicit Waiting(std::chrono::milliseconds timeout, const Clock& now = std::chrono::steady_clock::now)
      : now_{now}, start_{now_()}, timeout_{timeout} {}

  /// Waits a little. Returns whether there is time for another look.
  [[nodiscard]] bool again() {
    if (++tries_ < 100) return true;
    const auto waited = now_() - start_;
    is_long_ = waited >= std::chrono::milliseconds{20};
    if (is_long_) {
      std::this_thread::sleep_for(std::chrono::microseconds{waited < std::chrono::seconds{1} ? 200 : 2000});
    } else {
      std::this_thread::yield();
    }
    return waited < timeout_;
  }
  /// Whether it sleeps between two looks.
  [[nodiscard]] bool is_long() const { return is_long_; }

 private:
  Clock now_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::milliseconds timeout_;
  std::size_t tries_ = 0;
  bool is_long_ = false;
};

}  // namespace kvpolicy::reference
