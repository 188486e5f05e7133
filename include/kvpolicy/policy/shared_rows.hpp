// SPDX-License-Identifier: Apache-2.0
//
// Shares rows among the heads of a layer, or of the model, by what the text makes of them: all heads' rows compete for
// the whole budget, so heads whose attention is spread keep more than heads that look at few
// rows.
//
// Method: Ada-KV, arXiv:2407.11550. Differences: each head's best rows, a share of its own budget,
// are safe and the others compete for what is left, so that the number of rows is exactly that of
// heads that do not share, where the published code mixes and rounds the two shares; budgets may
// differ from head to head to begin with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/policy/top_rows.hpp>

namespace kvpolicy {

/// What a head brings to the competition.
struct SharingHead {
  std::vector<std::uint64_t> ranks;  ///< of its candidates (top_rows.hpp)
  std::size_t rows = 0;              ///< that it would keep alone, at most as many as there are candidates
  std::size_t safeguard = 0;         ///< of its best rows, that it keeps whatever the others have
  /// Ranks by which the head chooses, of as many rows as it may keep, those after the first `unweighed_share`
  /// (CriticalKV, arXiv:2502.03805). Empty: it keeps its best by `ranks`.
  std::vector<std::uint64_t> weighed = {};
  double unweighed_share = 0.0;

  /// The rows that the head keeps if it may keep `count`, ascending; all where there are fewer.
  [[nodiscard]] std::vector<std::size_t> best(std::size_t count) const {
    if (weighed.empty()) return top_ranks<std::uint64_t>(ranks, count);
    std::vector<std::uint64_t> second = weighed;
    for (const std::size_t row : top_ranks<std::uint64_t>(ranks, safe_rows(unweighed_share, count))) {
      second[row] = std::numeric_limits<std::uint64_t>::max();  // which no score has
    }
    return top_ranks<std::uint64_t>(second, count);
  }
};

/// Which candidates of each head survive, ascending: as many in all as the heads would keep alone.
/// Among equal ranks the lower head wins, then the lower row. Heads with weighed ranks choose their rows by these once
/// it is known how many they keep. Takes 8 bytes for each candidate besides their ranks.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> share_rows(std::span<const SharingHead> heads) {
  std::vector<std::vector<std::size_t>> safe;
  std::vector<std::uint64_t> ranks;  // of the rows that are not safe, head after head
  std::size_t left = 0;
  // act(row) for each row of a head that is not safe.
  const auto for_each_other = [&](std::size_t h, auto act) {
    auto next = safe[h].begin();
    for (std::size_t row = 0; row < heads[h].ranks.size(); ++row) {
      if (next != safe[h].end() && *next == row) {
        ++next;
      } else {
        act(row);
      }
    }
  };
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const SharingHead& head = heads[h];
    const std::size_t count = std::min(head.safeguard, head.rows);
    left += head.rows - count;
    safe.push_back(top_ranks<std::uint64_t>(head.ranks, count));
    for_each_other(h, [&](std::size_t row) { ranks.push_back(head.ranks[row]); });
  }
  const std::vector<std::size_t> winners = top_ranks<std::uint64_t>(ranks, left);
  auto winner = winners.begin();
  std::size_t number = 0;  // in ranks
  std::vector<std::vector<std::size_t>> chosen;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    std::vector<std::size_t> won;
    for_each_other(h, [&](std::size_t row) {
      if (winner != winners.end() && *winner == number) {
        won.push_back(row);
        ++winner;
      }
      ++number;
    });
    auto& rows = chosen.emplace_back(safe[h].size() + won.size());
    std::ranges::merge(safe[h], won, rows.begin());
    if (!heads[h].weighed.empty()) rows = heads[h].best(rows.size());
  }
  return chosen;
}

}  // namespace kvpolicy
