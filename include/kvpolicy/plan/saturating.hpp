// SPDX-License-Identifier: Apache-2.0
//
// Sums and products of byte counts that stop at the largest std::size_t instead of wrapping around.
#pragma once

#include <cstddef>
#include <limits>

namespace kvpolicy::detail {

/// Stands for every number of bytes that a std::size_t cannot hold.
inline constexpr std::size_t too_many_bytes = std::numeric_limits<std::size_t>::max();

[[nodiscard]] constexpr std::size_t saturating_sum(std::size_t a, std::size_t b) {
  return b > too_many_bytes - a ? too_many_bytes : a + b;
}
[[nodiscard]] constexpr std::size_t saturating_product(std::size_t a, std::size_t b) {
  return a != 0 && b > too_many_bytes / a ? too_many_bytes : a * b;
}

}  // namespace kvpolicy::detail
