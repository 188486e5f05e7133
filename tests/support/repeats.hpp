// SPDX-License-Identifier: Apache-2.0
//
// How often a random test repeats.
#pragma once

#include "support/sanitizer.hpp"

namespace test {

/// `count`, or a third of it, rounded up, under AddressSanitizer, where everything takes several times as long: what a
/// random test computes is judged by the optimised build with all repeats, and how it uses memory shows in fewer.
template <class Count>
[[nodiscard]] constexpr Count repeats(Count count) {
#ifdef KVPOLICY_TEST_ASAN
  return (count + 2) / 3;
#else
  return count;
#endif
}

}  // namespace test
