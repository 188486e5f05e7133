// SPDX-License-Identifier: Apache-2.0
//
// What one level of speculation did: how many guesses it judged, how many stayed, what it took.
#pragma once

#include <cstddef>

namespace kvpolicy {

/// What one level of judging has done so far.
struct LevelStatistics {
  std::size_t verifications = 0;  ///< passes of the judging model
  std::size_t guessed = 0;        ///< guesses that these passes read
  std::size_t places = 0;         ///< of them, places that were judged: none behind a refusal is
  std::size_t accepted = 0;       ///< places where a guess stayed
  std::size_t tokens = 0;         ///< that the level gave on: those that stayed, and its own
  double draft_seconds = 0.0;     ///< spent on guesses, by all levels below
  double verify_seconds = 0.0;    ///< spent on judging them

  /// The share of judged places where a guess stayed; 0 before the first.
  [[nodiscard]] double acceptance() const { return share(accepted, places); }
  [[nodiscard]] double tokens_per_verification() const { return share(tokens, verifications); }

 private:
  [[nodiscard]] static double share(std::size_t part, std::size_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  }
};

}  // namespace kvpolicy
