// SPDX-License-Identifier: Apache-2.0
//
// From the thread that steps to the thread that talks to a client.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "serve/scheduler.hpp"

namespace kvpolicy::serve {

/// Text that waits for a slow reader is at most an answer long, because answers have a greatest length.
class Channel {
 public:
  struct News {
    std::string text;
    std::optional<Outcome> outcome;  // nothing follows
  };

  void say(const std::string& text) {
    const std::lock_guard lock{mutex_};
    news_.text += text;
    arrived_.notify_one();
  }
  void end(const Outcome& outcome) {
    const std::lock_guard lock{mutex_};
    news_.outcome = outcome;
    arrived_.notify_one();
  }
  /// All that is new; nothing if there is nothing for so long.
  [[nodiscard]] std::optional<News> wait(std::chrono::milliseconds longest) {
    std::unique_lock lock{mutex_};
    const auto is_new = [&] { return !news_.text.empty() || news_.outcome.has_value(); };
    if (!arrived_.wait_for(lock, longest, is_new)) return std::nullopt;
    return std::exchange(news_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  News news_;
};

}  // namespace kvpolicy::serve
