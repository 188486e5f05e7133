// SPDX-License-Identifier: Apache-2.0
//
// What support/failing_new.hpp counts, for the other files of an executable whose one file includes
// that header. Only `new`s without an alignment of their own are counted.
#pragma once

#include <cstddef>
#include <limits>

namespace test {

inline std::size_t news_left = std::numeric_limits<std::size_t>::max();
inline std::size_t live_news = 0;
inline std::size_t live_new_bytes = 0;
inline std::size_t all_news = 0;  // that succeeded
inline std::size_t failed_news = 0;

}  // namespace test
