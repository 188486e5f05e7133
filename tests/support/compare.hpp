// SPDX-License-Identifier: Apache-2.0
//
// Comparisons in which NaN fails.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <ranges>
#include <string>

namespace test {

/// The largest |a - b|; infinity if the sizes differ or either side has a NaN. Two equal infinities have no
/// difference.
template <class A, class B>
double largest_difference(const A& a, const B& b) {
  if (std::ranges::size(a) != std::ranges::size(b)) return std::numeric_limits<double>::infinity();
  double largest = 0;
  auto other = std::ranges::begin(b);
  for (const auto& x : a) {
    const auto left = static_cast<double>(x);
    const auto right = static_cast<double>(*other++);
    if (left == right) continue;
    const double difference = std::abs(left - right);
    if (!(difference <= largest)) largest = difference;
    if (std::isnan(largest)) return std::numeric_limits<double>::infinity();
  }
  return largest;
}

/// Whether the bits are the same: NaNs of one pattern are equal, 0 and -0 are not.
template <class A, class B>
bool same_bits(const A& a, const B& b) {
  using T = std::ranges::range_value_t<A>;
  static_assert(std::is_same_v<T, std::ranges::range_value_t<B>>);
  const auto count = std::ranges::size(a);
  return count == std::ranges::size(b) &&
         (count == 0 || std::memcmp(std::ranges::data(a), std::ranges::data(b), count * sizeof(T)) == 0);
}

/// Runs `call`, expects an `E`, and returns its message, or an empty string if nothing was thrown.
template <class E, class Call>
std::string thrown(Call call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace test
