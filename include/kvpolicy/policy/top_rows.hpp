// SPDX-License-Identifier: Apache-2.0
//
// Picks the highest scores: which rows survive a compression, which chunks a query reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace kvpolicy {

/// The places of the `count` highest scores, ascending; among equals the lower place wins, so that
/// every backend picks the same. NaN ranks below everything.
[[nodiscard]] inline std::vector<std::size_t> top_rows(std::span<const float> scores,
                                                       std::size_t count) {
  std::vector<std::size_t> places(scores.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  if (count >= places.size()) return places;
  const auto better = [&](std::size_t a, std::size_t b) {
    const bool a_counts = scores[a] == scores[a];
    const bool b_counts = scores[b] == scores[b];
    if (a_counts != b_counts) return a_counts;
    return a_counts && scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  std::ranges::nth_element(places, places.begin() + static_cast<std::ptrdiff_t>(count), better);
  places.resize(count);
  std::ranges::sort(places);
  return places;
}

}  // namespace kvpolicy
