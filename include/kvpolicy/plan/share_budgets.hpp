// SPDX-License-Identifier: Apache-2.0
//
// Computes how many rows each KV head may keep from the share of a text's rows that it was found to need: budgets in
// proportion to the shares, but no head more rows than a text has. What a head cannot use goes to the others.
//
// Shares come from texts that were read once for a model (`identify_heads kvzip` writes those that KVzip's threshold
// over all heads keeps, arXiv:2505.23416). Within a head any scorer chooses the rows, also one that needs neither the
// question nor a second reading of the prompt. HeadKV's budgets (plan/headkv_budgets.hpp)
// are by scores of query heads, which say nothing of rows, and have no limit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/head_table.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>
#include <kvpolicy/plan/rounding.hpp>

namespace kvpolicy {

using HeadShares = HeadTable<double>;  ///< [layers, kv_heads], each 0 to 1

/// Settings of `share_budgets`.
struct ShareBudgetConfig {
  std::size_t capacity = 128;      ///< Average rows per KV head; at most `most_rows`.
  std::size_t most_rows = 131072;  ///< Rows of a text: what a head can keep at most.

  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(most_rows >= 1 && most_rows <= most, "ShareBudgetConfig: most_rows is ", most_rows,
            ", must be 1 to 2^40");
    require(capacity >= 1 && capacity <= most_rows, "ShareBudgetConfig: capacity is ", capacity,
            ", must be 1 to most_rows = ", most_rows);
  }
};

/// Checks that shares are usable.
/// @throws ConfigError for a share that is not 0 to 1, or no shares.
inline void check_shares(const HeadShares& shares) {
  require(!shares.values().empty(), "HeadShares: there are none");
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    for (std::size_t head = 0; head < shares.heads(); ++head) {
      const double share = shares(layer, head);
      // Written so that NaN fails.
      require(share >= 0.0 && share <= 1.0, "HeadShares: the share of layer ", layer, ", head ", head, " is ",
              share, ", must be 0 to 1");
    }
  }
}

/// Budgets [layers, kv_heads] that sum to exactly capacity x layers x kv_heads, none above `most_rows`: the same
/// multiple of every share, rounded as `round_to_sum` does. Heads with a share of 0 get rows only where all others
/// have `most_rows`, and then equally many.
/// @throws ConfigError as `check_shares`, or for settings that do not work.
[[nodiscard]] inline HeadBudgets share_budgets(const HeadShares& shares,
                                               const ShareBudgetConfig& config = {}) {
  config.validate();
  check_shares(shares);
  const std::span<const double> needs = shares.values();
  const auto most = static_cast<double>(config.most_rows);
  const std::size_t total = config.capacity * needs.size();
  std::vector<double> budgets(needs.size(), 0.0);
  std::vector<std::size_t> open(needs.size());
  std::iota(open.begin(), open.end(), std::size_t{0});
  auto left = static_cast<double>(total);
  // Each round fills the heads whose part is above what a text has, and divides what they leave among the others.
  while (!open.empty()) {
    double sum = 0.0;
    for (const std::size_t head : open) sum += needs[head];
    const auto part = [&](std::size_t head) {
      return sum > 0.0 ? left * (needs[head] / sum) : left / static_cast<double>(open.size());
    };
    for (const std::size_t head : open) budgets[head] = std::min(part(head), most);
    // Of <algorithm>, because clang 14 cannot compile the range that std::ranges gives back.
    const auto full = std::stable_partition(open.begin(), open.end(),
                                            [&](std::size_t head) { return budgets[head] < most; });
    if (full == open.end()) break;
    left = std::max(left - most * static_cast<double>(open.end() - full), 0.0);
    open.erase(full, open.end());
  }
  return {shares.layers(), shares.heads(), round_to_sum(budgets, total)};
}

}  // namespace kvpolicy
