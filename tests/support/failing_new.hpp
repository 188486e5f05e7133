// SPDX-License-Identifier: Apache-2.0
//
// Counts the `new`s of the program and makes any of them fail. Include this header in exactly one file of an
// executable, because it replaces the global operators.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

#include "support/news.hpp"

namespace test {

/// The size of each allocation is stored before it, in as many bytes as keep the alignment.
inline constexpr std::size_t new_header = alignof(std::max_align_t);

}  // namespace test

// Not inlined, because g++ would then see `free` with a pointer from `new` and warn of a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (test::news_left == 0) {
    ++test::failed_news;
    throw std::bad_alloc{};
  }
  if (test::news_left != std::numeric_limits<std::size_t>::max()) --test::news_left;
  auto* header = static_cast<char*>(std::malloc(test::new_header + bytes));
  if (header == nullptr) throw std::bad_alloc{};
  *reinterpret_cast<std::size_t*>(header) = bytes;
  ++test::live_news;
  ++test::all_news;
  test::live_new_bytes += bytes;
  return header + test::new_header;
}
[[gnu::noinline]] void operator delete(void* start) noexcept {
  if (start == nullptr) return;
  char* header = static_cast<char*>(start) - test::new_header;
  --test::live_news;
  test::live_new_bytes -= *reinterpret_cast<std::size_t*>(header);
  std::free(header);
}
void operator delete(void* start, std::size_t) noexcept { operator delete(start); }
// Does what the standard's own operator does, which a sanitizer replaces (std::stable_sort calls it).
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* start, const std::nothrow_t&) noexcept { operator delete(start); }
