// SPDX-License-Identifier: Apache-2.0
//
// Scratch memory that is kept between calls, so that a step that does the same as the previous step
// allocates nothing.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvpolicy::detail {

/// Scratch memory; its contents are not kept between calls, so a copy (a fork's, say) starts empty.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) noexcept {}
  Scratch(Scratch&&) noexcept = default;
  Scratch& operator=(const Scratch&) noexcept { return *this; }
  Scratch& operator=(Scratch&&) noexcept = default;
  ~Scratch() = default;

  /// Room for `count` elements with unspecified values.
  /// @throws std::bad_alloc
  [[nodiscard]] std::span<T> take(std::size_t count) {
    if (memory_.size() < count) memory_.resize(count);
    return std::span{memory_}.first(count);
  }

 private:
  std::vector<T> memory_;
};

}  // namespace kvpolicy::detail
