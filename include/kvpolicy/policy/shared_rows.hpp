// SPDX-License-Identifier: Apache-2.0
//
// Shares rows among the heads of a layer by what the text makes of them: all heads' rows compete for
// the layer's whole budget, so heads whose attention is spread keep more than heads that look at few
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
#include <span>
#include <vector>

#include <kvpolicy/policy/top_rows.hpp>

namespace kvpolicy {

/// What a head brings to the competition.
struct SharingHead {
  std::vector<std::uint64_t> ranks;  ///< of its candidates (top_rows.hpp)
  std::size_t rows = 0;              ///< that it would keep alone, at most as many as there are candidates
  std::size_t safeguard = 0;         ///< of its best rows, that it keeps whatever the others have
};

/// Which candidates of each head survive, ascending: as many in all as the heads would keep alone.
/// Among equal ranks the lower head wins, then the lower row.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> share_rows(std::span<const SharingHead> heads) {
  struct Candidate {
    std::size_t head, row;
  };
  std::vector<std::vector<std::size_t>> chosen;
  std::vector<Candidate> candidates;  // of the rows that are not safe
  std::vector<std::uint64_t> ranks;   // theirs
  std::size_t left = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const SharingHead& head = heads[h];
    const std::size_t safe = std::min(head.safeguard, head.rows);
    left += head.rows - safe;
    const auto& best = chosen.emplace_back(top_ranks<std::uint64_t>(head.ranks, safe));
    for (std::size_t row = 0; row < head.ranks.size(); ++row) {
      if (std::ranges::binary_search(best, row)) continue;
      candidates.push_back({h, row});
      ranks.push_back(head.ranks[row]);
    }
  }
  for (const std::size_t winner : top_ranks<std::uint64_t>(ranks, left)) {
    chosen[candidates[winner].head].push_back(candidates[winner].row);
  }
  for (auto& rows : chosen) std::ranges::sort(rows);
  return chosen;
}

}  // namespace kvpolicy
