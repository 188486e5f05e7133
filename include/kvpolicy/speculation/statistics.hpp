// SPDX-License-Identifier: Apache-2.0
//
// What one level of speculation did: how many guesses it verified and accepted, and how long it
// took.
#pragma once

#include <cstddef>

namespace kvpolicy {

/// Counts of one verifying level so far.
struct LevelStatistics {
  std::size_t verifications = 0;  ///< passes of the verifying model
  std::size_t guessed = 0;        ///< guesses that these passes read
  std::size_t places = 0;         ///< positions that were verified: none after a refusal
  std::size_t accepted = 0;       ///< positions where a guess was accepted
  std::size_t tokens = 0;         ///< resulting tokens: accepted guesses and its own
  double draft_seconds = 0.0;     ///< time spent on guesses, by all lower levels
  double verify_seconds = 0.0;    ///< time spent on verifying them

  /// The share of verified positions where a guess was accepted; 0 before the first.
  [[nodiscard]] double acceptance() const { return share(accepted, places); }
  [[nodiscard]] double tokens_per_verification() const { return share(tokens, verifications); }

 private:
  [[nodiscard]] static double share(std::size_t part, std::size_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  }
};

}  // namespace kvpolicy
