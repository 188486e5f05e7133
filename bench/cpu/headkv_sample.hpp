// SPDX-License-Identifier: Apache-2.0
//
// Head scores for ragged budgets: those of the 32 query heads of the shipped model, its four layers
// one after another (reference_model/weights/keyfinder/headkv/enhanced_heads.json, means over 50
// samples). They are realistic in their spread: six heads have most of the total, a quarter of the
// heads has none. The bench uses them for four layers of 8 KV heads or one of 32.
#pragma once

#include <cstddef>
#include <vector>

#include <kvpolicy/plan/headkv_budgets.hpp>

namespace kvpolicy::bench {

[[nodiscard]] inline HeadScores sample_scores() {
  return {4, 8, std::vector<double>{0.00000, 0.00000, 0.00000, 0.00000, 0.00000, 0.00001, 0.00001, 0.00001,
                                    0.22076, 0.21486, 0.23437, 0.23016, 0.21725, 0.21583, 0.00525, 0.00279,
                                    0.05779, 0.06325, 0.02492, 0.01910, 0.00247, 0.00365, 0.00348, 0.00131,
                                    0.01329, 0.00654, 0.00630, 0.00654, 0.00636, 0.00439, 0.00583, 0.01562}};
}

/// The same scores distributed over layers of at least `heads` heads.
[[nodiscard]] inline HeadScores scores_for(const HeadScores& scores, std::size_t heads) {
  if (scores.heads() % heads == 0) return scores;
  const std::size_t layers = scores.values().size() / heads;
  require(layers > 0, "scores of ", scores.values().size(), " heads, must be at least ", heads);
  const auto first = scores.values().begin();
  return {layers, heads, std::vector<double>(first, first + static_cast<std::ptrdiff_t>(layers * heads))};
}

}  // namespace kvpolicy::bench
