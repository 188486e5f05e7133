// SPDX-License-Identifier: Apache-2.0
//
// Picks the highest scores: which rows survive a compression, which chunks a query reads.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace kvpolicy {

/// A whole number that grows with the score: NaN below everything, -0 equal to 0.
[[nodiscard]] inline std::uint32_t rank_of(float score) {
  if (score != score) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0F);
  return bits >> 31 != 0 ? ~bits : bits | 0x8000'0000U;
}

/// The places of the `places.size()` highest scores, ascending; among equals the lower place wins, so
/// that every backend picks the same. NaN ranks below everything. A selecting head does this at every
/// step, so the lowest rank that is picked is found digit by digit: unlike comparing scores with each
/// other, counting them has no branch that a processor would guess wrong. There are at least as many
/// scores as places; `ranks` is room for as many numbers as there are scores.
inline void top_rows(std::span<const float> scores, std::span<std::uint32_t> ranks,
                     std::span<std::size_t> places) {
  const std::size_t count = places.size();
  if (count == scores.size()) {
    std::iota(places.begin(), places.end(), std::size_t{0});
    return;
  }
  if (count == 0) return;
  std::ranges::transform(scores, ranks.begin(), rank_of);
  constexpr int digit_bits = 11;
  std::array<std::size_t, std::size_t{1} << digit_bits> numbers;  // of ranks with each digit
  std::uint64_t lowest = 0;  // the lowest rank that is picked, as far as it is known
  std::size_t equals = count;  // to be picked of those that begin as `lowest` does
  for (int shift = 2 * digit_bits; shift >= 0; shift -= digit_bits) {
    numbers.fill(0);
    for (const std::uint64_t rank : ranks) {
      const bool begins_so = (rank ^ lowest) >> (shift + digit_bits) == 0;
      numbers[rank >> shift & (numbers.size() - 1)] += begins_so ? 1 : 0;
    }
    std::size_t digit = numbers.size() - 1;
    for (; numbers[digit] < equals; --digit) equals -= numbers[digit];
    lowest |= static_cast<std::uint64_t>(digit) << shift;
  }
  std::size_t picked = 0;
  for (std::size_t place = 0; picked < count; ++place) {
    if (ranks[place] < lowest) continue;
    if (ranks[place] == lowest) {
      if (equals == 0) continue;
      --equals;
    }
    places[picked++] = place;
  }
}

/// The same in memory of its own: the places of the `count` highest scores, of all where there are
/// fewer.
[[nodiscard]] inline std::vector<std::size_t> top_rows(std::span<const float> scores,
                                                       std::size_t count) {
  std::vector<std::size_t> places(std::min(count, scores.size()));
  std::vector<std::uint32_t> ranks(scores.size());
  top_rows(scores, ranks, places);
  return places;
}

}  // namespace kvpolicy
