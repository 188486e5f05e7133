// SPDX-License-Identifier: Apache-2.0
//
// Acceptance by the dice, for models with random weights: everything is computed as it would be,
// but whether a guess stays is decided beforehand, at a published rate.
#pragma once

#include <kvpolicy/speculation/sampling.hpp>
#include <kvpolicy/speculation/statistics.hpp>

namespace kvpolicy::bench {

/// How often, per mille, the middle level keeps a guess of the small draft: about 0.35 for
/// Llama-68M over a window of 256 rows, say TriForce's authors
/// (https://github.com/Infini-AI-Lab/TriForce/issues/8).
inline constexpr unsigned small_draft_per_mille = 350;

/// What happened between two looks at a level's statistics.
[[nodiscard]] inline LevelStatistics since(const LevelStatistics& before, LevelStatistics now) {
  now.verifications -= before.verifications;
  now.guessed -= before.guessed;
  now.places -= before.places;
  now.accepted -= before.accepted;
  now.tokens -= before.tokens;
  now.draft_seconds -= before.draft_seconds;
  now.verify_seconds -= before.verify_seconds;
  return now;
}

/// Each guess stays with a probability of `PerMille` / 1000.
template <unsigned PerMille>
struct Scripted {
  static constexpr double rate = static_cast<double>(PerMille) / 1000.0;
  [[nodiscard]] static bool accepts(const Distribution&, const Distribution&, int, Random& random) {
    return random.uniform() < rate;
  }
  [[nodiscard]] static Distribution after_refusal(const Distribution& p, const Distribution&) {
    return p;
  }
};

}  // namespace kvpolicy::bench
