// SPDX-License-Identifier: Apache-2.0
//
// The counters of support/failing_new.hpp, for the other files of an executable with one file that includes
// that header. Only `new`s without an explicit alignment are counted.
#pragma once

#include <cstddef>
#include <limits>

namespace test {

inline std::size_t news_left = std::numeric_limits<std::size_t>::max();
inline std::size_t live_news = 0;
inline std::size_t live_new_bytes = 0;
inline std::size_t all_news = 0;  // successful ones
inline std::size_t failed_news = 0;

/// While it lives, every `new` after the next `successes` ones fails.
struct FailNew {
  explicit FailNew(std::size_t successes) {
    news_left = successes;
    failed_news = 0;
  }
  FailNew(const FailNew&) = delete;
  FailNew& operator=(const FailNew&) = delete;
  ~FailNew() { news_left = std::numeric_limits<std::size_t>::max(); }
};

}  // namespace test
