// SPDX-License-Identifier: Apache-2.0
//
// Random numbers that are the same on every machine. The C++ standard fixes the generator's bits;
// numbers are derived from them here, because the library's distributions and std::shuffle differ
// between implementations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>

namespace kvpolicy::tools {

class Random {
 public:
  /// Different numbers give independent streams.
  Random(std::uint64_t seed, std::uint64_t length, std::uint64_t number) {
    std::seed_seq sequence{low(seed), high(seed), low(length), high(length), low(number), high(number)};
    bits_.seed(sequence);
  }

  /// Uniform in [0, end), end > 0.
  std::size_t below(std::size_t end) {
    const std::uint64_t whole = bits_.max() - bits_.max() % end;
    std::uint64_t drawn = bits_();
    while (drawn >= whole) drawn = bits_();
    return static_cast<std::size_t>(drawn % end);
  }

  template <class Range>
  void shuffle(Range& range) {
    for (std::size_t i = range.size(); i > 1; --i) std::swap(range[i - 1], range[below(i)]);
  }

 private:
  static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

  std::mt19937_64 bits_;
};

}  // namespace kvpolicy::tools
