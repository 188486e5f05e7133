// SPDX-License-Identifier: Apache-2.0
//
// Acceptance by the dice, for models with random weights: everything is computed as it would be, but
// whether a guess stays is decided beforehand, at a published rate.
#pragma once

#include <kvpolicy/speculation/sampling.hpp>

namespace kvpolicy::bench {

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
