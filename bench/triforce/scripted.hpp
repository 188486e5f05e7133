// SPDX-License-Identifier: Apache-2.0
//
// Acceptance by random draws, for models with random weights: everything is computed as in real
// use, but whether a draft token is accepted is drawn at a published rate.
#pragma once

#include <kvpolicy/speculation/sampling.hpp>
#include <kvpolicy/speculation/statistics.hpp>

namespace kvpolicy::bench {

/// How often, per mille, the middle level accepts a token of the small draft. TriForce's authors
/// report about 0.35 for Llama-68M over a window of 256 rows
/// (https://github.com/Infini-AI-Lab/TriForce/issues/8).
inline constexpr unsigned small_draft_per_mille = 350;

/// The difference between two readings of a level's statistics.
[[nodiscard]] inline LevelStatistics since(const LevelStatistics& before, LevelStatistics now) {
  now.verifications -= before.verifications;
  now.draft_tokens -= before.draft_tokens;
  now.positions -= before.positions;
  now.accepted -= before.accepted;
  now.tokens -= before.tokens;
  now.draft_seconds -= before.draft_seconds;
  now.verify_seconds -= before.verify_seconds;
  return now;
}

/// Accepts each draft token with a probability of `PerMille` / 1000.
template <unsigned PerMille>
struct Scripted {
  static constexpr double rate = static_cast<double>(PerMille) / 1000.0;
  [[nodiscard]] static bool accepts(const Distribution&, const Distribution&, int, Random& random) {
    return random.uniform() < rate;
  }
  [[nodiscard]] static Distribution after_refusal(const Distribution& p, const Distribution&) { return p; }
};

}  // namespace kvpolicy::bench
