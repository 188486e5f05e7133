// SPDX-License-Identifier: Apache-2.0
//
// Memory that no kernel may read: rows of a page that nobody wrote, say. Only the address sanitizer
// watches, until the memory is allowed again or freed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "support/sanitizer.hpp"

#if defined(KVPOLICY_TEST_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace test {

/// `numbers` 16-bit numbers, in multiples of 8 bytes.
inline void forbid([[maybe_unused]] std::uint16_t* first, [[maybe_unused]] std::size_t numbers) {
#if defined(KVPOLICY_TEST_ASAN)
  __asan_poison_memory_region(first, numbers * sizeof *first);
#endif
}

/// Memory of which parts may be forbidden.
inline void allow([[maybe_unused]] std::byte* first, [[maybe_unused]] std::size_t bytes) {
#if defined(KVPOLICY_TEST_ASAN)
  __asan_unpoison_memory_region(first, bytes);
#endif
}

}  // namespace test
