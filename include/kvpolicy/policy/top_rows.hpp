// SPDX-License-Identifier: Apache-2.0
//
// Picks the highest scores: which rows survive a compression, which chunks a query reads.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include <kvpolicy/core/dtype.hpp>

namespace kvpolicy {

/// A whole number that grows with the score: NaN below everything, -0 equal to 0.
[[nodiscard]] inline std::uint32_t rank_of(float score) {
  if (is_nan(score)) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0F);
  return bits >> 31 != 0 ? ~bits : bits | 0x8000'0000U;
}

/// The same of a score and what decides between equal ones.
[[nodiscard]] inline std::uint64_t rank_of(float score, float tie_break) {
  return std::uint64_t{rank_of(score)} << 32 | rank_of(tie_break);
}

/// The places of the `places.size()` highest ranks, ascending; among equals the lower place wins, so
/// that every backend picks the same. There are at least as many ranks as places. A selecting head
/// does this at every step, so the lowest rank that is picked is found digit by digit: unlike
/// comparing ranks with each other, counting them has no branch that a processor would guess wrong.
template <std::unsigned_integral Rank>
void top_ranks(std::span<const Rank> ranks, std::span<std::size_t> places) {
  const std::size_t count = places.size();
  if (count == ranks.size()) {
    std::iota(places.begin(), places.end(), std::size_t{0});
    return;
  }
  if (count == 0) return;
  constexpr int digit_bits = 11;
  constexpr int digits = (std::numeric_limits<Rank>::digits + digit_bits - 1) / digit_bits;
  std::array<std::size_t, std::size_t{1} << digit_bits> numbers;  // of ranks with each digit
  std::uint64_t lowest = 0;    // the lowest rank that is picked, as far as it is known
  std::size_t equals = count;  // to be picked of those that begin as `lowest` does
  for (int shift = (digits - 1) * digit_bits; shift >= 0; shift -= digit_bits) {
    numbers.fill(0);
    for (const std::uint64_t rank : ranks) {
      const bool begins_so = (rank ^ lowest) >> shift >> digit_bits == 0;
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

/// The same in memory of its own: the places of the `count` highest ranks, of all where there are
/// fewer.
template <std::unsigned_integral Rank>
[[nodiscard]] std::vector<std::size_t> top_ranks(std::span<const Rank> ranks, std::size_t count) {
  std::vector<std::size_t> places(std::min(count, ranks.size()));
  top_ranks<Rank>(ranks, places);
  return places;
}

/// The places of the `places.size()` highest scores, as top_ranks picks them; NaN ranks below
/// everything. `ranks` is room for as many numbers as there are scores.
inline void top_rows(std::span<const float> scores, std::span<std::uint32_t> ranks,
                     std::span<std::size_t> places) {
  std::ranges::transform(scores, ranks.begin(), [](float score) { return rank_of(score); });
  top_ranks<std::uint32_t>(ranks.first(scores.size()), places);
}
/// The same in memory of its own.
[[nodiscard]] inline std::vector<std::size_t> top_rows(std::span<const float> scores, std::size_t count) {
  std::vector<std::uint32_t> ranks(scores.size());
  std::vector<std::size_t> places(std::min(count, scores.size()));
  top_rows(scores, ranks, places);
  return places;
}

}  // namespace kvpolicy
