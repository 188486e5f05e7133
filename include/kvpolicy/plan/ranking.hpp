// SPDX-License-Identifier: Apache-2.0
//
// The order in which scores are taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace kvpolicy::detail {

/// The places of `scores` from the largest on; of equal scores the first comes first.
[[nodiscard]] inline std::vector<std::size_t> ranked_places(std::span<const double> scores) {
  std::vector<std::size_t> places(scores.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  // Not std::stable_sort, of which clang warns with libstdc++ 12 (std::get_temporary_buffer).
  std::ranges::sort(places, [&](std::size_t a, std::size_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  return places;
}

}  // namespace kvpolicy::detail
