// SPDX-License-Identifier: Apache-2.0
//
// Counts the `new`s of the program and lets any of them fail. Include it in exactly one file of an executable: it replaces
// the global operators.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

namespace test {

inline std::size_t news_left = std::numeric_limits<std::size_t>::max();
inline std::size_t live_news = 0;
inline std::size_t all_news = 0;  // that succeeded
inline std::size_t failed_news = 0;

/// While it lives, the `new` after `successes` more fails, and all behind it.
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

// Not inlined, for then g++ sees `free` meet a pointer of `new`, and warns of a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (test::news_left == 0) {
    ++test::failed_news;
    throw std::bad_alloc{};
  }
  if (test::news_left != std::numeric_limits<std::size_t>::max()) --test::news_left;
  void* start = std::malloc(bytes == 0 ? 1 : bytes);
  if (start == nullptr) throw std::bad_alloc{};
  ++test::live_news;
  ++test::all_news;
  return start;
}
[[gnu::noinline]] void operator delete(void* start) noexcept {
  if (start != nullptr) --test::live_news;
  std::free(start);
}
void operator delete(void* start, std::size_t) noexcept { operator delete(start); }
// As the standard's own would; under a sanitizer that one is the sanitizer's (std::stable_sort asks it).
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* start, const std::nothrow_t&) noexcept { operator delete(start); }
