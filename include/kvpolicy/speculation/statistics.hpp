// SPDX-License-Identifier: Apache-2.0
//
// Counts the work of one level of speculation: how many draft tokens it verified and accepted, and how long
// it took.
#pragma once

#include <cstddef>

namespace kvpolicy {

/// The counts of one verifying level so far.
struct LevelStatistics {
  std::size_t verifications = 0;  ///< passes of the verifying model
  std::size_t draft_tokens = 0;   ///< draft tokens that these passes read
  std::size_t positions = 0;      ///< text positions at which draft tokens were tried
  std::size_t accepted = 0;       ///< positions at which one was accepted
  std::size_t tokens = 0;         ///< resulting tokens: accepted draft tokens and its own
  double draft_seconds = 0.0;     ///< time spent on drafting, by all lower levels
  double verify_seconds = 0.0;    ///< time spent on verifying

  /// The share of verified positions at which a draft token was accepted; 0 if there are none.
  [[nodiscard]] double acceptance() const { return share(accepted, positions); }
  [[nodiscard]] double tokens_per_verification() const { return share(tokens, verifications); }

 private:
  [[nodiscard]] static double share(std::size_t part, std::size_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  }
};

}  // namespace kvpolicy
