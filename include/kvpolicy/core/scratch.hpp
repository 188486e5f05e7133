// SPDX-License-Identifier: Apache-2.0
//
// Memory that a call works in and that the next call finds again, so that a step which does what the
// step before did allocates nothing.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvpolicy::detail {

/// Holds nothing between two calls: a copy of its owner, a fork, starts without any.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) noexcept {}
  Scratch(Scratch&&) noexcept = default;
  Scratch& operator=(const Scratch&) noexcept { return *this; }
  Scratch& operator=(Scratch&&) noexcept = default;
  ~Scratch() = default;

  /// Room for `count` elements, which hold anything.
  /// @throws std::bad_alloc
  [[nodiscard]] std::span<T> take(std::size_t count) {
    if (memory_.size() < count) memory_.resize(count);
    return std::span{memory_}.first(count);
  }

 private:
  std::vector<T> memory_;
};

}  // namespace kvpolicy::detail
