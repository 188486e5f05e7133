// SPDX-License-Identifier: Apache-2.0
//
// Computes how many tokens to draft: what a round of drafting and verifying yields and costs if every draft
// token is accepted with the same probability, independently of the others. Decoders that measure both use
// it (speculation/draft_length.hpp), and benchmarks use it for predictions.
//
// Method: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192;
// in two levels, Sun et al., "TriForce", arXiv:2404.11912. Both assume a fixed cost of a verification; here
// the cost may grow with the number of tokens. A verification of g draft tokens reads g + 1 tokens, because
// it starts with the text's latest token. g = 0 is plain decoding.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// The cost of a pass of a model over some tokens, in seconds or any other unit; use one unit throughout.
struct PassCost {
  double base = 0.0;       ///< cost of any pass: reading weights and cached rows once
  double per_token = 0.0;  ///< added for each token

  [[nodiscard]] double operator()(std::size_t tokens) const {
    return base + per_token * static_cast<double>(tokens);
  }

  /// @throws ConfigError unless both are finite and not negative, and one is positive
  void validate() const {
    // Written so that NaN fails.
    require(base >= 0.0 && per_token >= 0.0 && base + per_token > 0.0 && std::isfinite(base + per_token),
            "PassCost: ", base, " and ", per_token,
            " for each token, must be 0 or more, and one of them more");
  }
};

/// The costs of drafting and verifying, in the same unit of time.
struct DraftCosts {
  double draft = 0.0;  ///< cost of one draft token
  PassCost verify;     ///< cost of the target's pass

  /// @throws ConfigError
  void validate() const {
    require(draft >= 0.0 && std::isfinite(draft), "DraftCosts: a drafted token costs ", draft,
            ", must be 0 or more");
    verify.validate();
  }
};

namespace detail {

/// Checks that a number is a probability.
/// @throws ConfigError
inline void check_acceptance(double acceptance) {
  require(acceptance >= 0.0 && acceptance <= 1.0, "acceptance is ", acceptance, ", must be 0 to 1");
}

}  // namespace detail

/// How many tokens a verification of `length` draft tokens yields on average, including the
/// target's own token: 1 + a + a^2 + ... + a^length.
/// @throws ConfigError
[[nodiscard]] inline double expected_tokens(double acceptance, std::size_t length) {
  detail::check_acceptance(acceptance);
  const double refused = 1.0 - acceptance;
  if (refused == 0.0) return static_cast<double>(length) + 1.0;
  // (1 - a^(g + 1)) / (1 - a), without the loss of digits near a = 1.
  return -std::expm1((static_cast<double>(length) + 1.0) * std::log1p(-refused)) / refused;
}

/// The speed-up over plain decoding: tokens per time, divided by those of plain decoding.
/// @throws ConfigError
[[nodiscard]] inline double speedup(double acceptance, std::size_t length, const DraftCosts& costs) {
  costs.validate();
  const double seconds = static_cast<double>(length) * costs.draft + costs.verify(length + 1);
  return expected_tokens(acceptance, length) * costs.verify(1) / seconds;
}

/// The length from 0 to `max_length` with the highest speed-up; the shortest of equally good ones; 0 if
/// drafting does not pay off.
/// @throws ConfigError
[[nodiscard]] inline std::size_t best_length(double acceptance, const DraftCosts& costs,
                                             std::size_t max_length) {
  std::size_t best = 0;
  double highest = speedup(acceptance, 0, costs);
  for (std::size_t length = 1; length <= max_length; ++length) {
    const double value = speedup(acceptance, length, costs);
    if (value <= highest) continue;
    highest = value;
    best = length;
  }
  return best;
}

/// Costs in TriForce's hierarchy: a draft proposes tokens to the target over selected rows (the middle
/// level), and the tokens accepted there are proposed to the target over all rows.
struct HierarchyCosts {
  double draft = 0.0;  ///< cost of one token of the draft
  PassCost selected;   ///< cost of the target's pass over selected rows
  PassCost all;        ///< cost of the target's pass over all rows
};

/// The share of tokens that each level accepts.
struct HierarchyAcceptance {
  double selected = 0.0;  ///< share of draft tokens that the target over selected rows accepts
  double all = 0.0;       ///< share of the middle level's tokens that the target over all rows accepts
};

/// The number of draft tokens that each level makes at a time.
struct HierarchyLengths {
  std::size_t inner = 0;  ///< tokens that the draft proposes at a time; 0: there is no draft
  std::size_t outer = 0;  ///< tokens of the middle level per pass over all rows; 0: plain decoding
  friend bool operator==(const HierarchyLengths&, const HierarchyLengths&) = default;
};

/// For each `outer` from 0 to `max_outer`, the average cost until the middle level has `outer`
/// tokens. Each round drafts `inner` tokens, or fewer, so that the middle level gets no more than
/// `outer`.
/// @throws ConfigError
[[nodiscard]] inline std::vector<double> standing_costs(double acceptance, std::size_t inner,
                                                        std::size_t max_outer, const DraftCosts& costs) {
  detail::check_acceptance(acceptance);
  costs.validate();
  std::vector<double> until(max_outer + 1);
  for (std::size_t left = 1; left <= max_outer; ++left) {
    const std::size_t drafted = std::min(inner, left - 1);
    double seconds = static_cast<double>(drafted) * costs.draft + costs.verify(drafted + 1);
    double reached = 1.0;  // probability that the first `accepted` draft tokens are accepted
    for (std::size_t accepted = 0; accepted < drafted; ++accepted) {
      seconds += reached * (1.0 - acceptance) * until[left - accepted - 1];
      reached *= acceptance;
    }
    until[left] = seconds + reached * until[left - drafted - 1];
  }
  return until;
}

/// The speed-up of the hierarchy over plain decoding over all rows.
/// @throws ConfigError
[[nodiscard]] inline double speedup(const HierarchyAcceptance& acceptance, const HierarchyLengths& lengths,
                                    const HierarchyCosts& costs) {
  costs.all.validate();
  const std::vector<double> until =
      standing_costs(acceptance.selected, lengths.inner, lengths.outer, {costs.draft, costs.selected});
  return expected_tokens(acceptance.all, lengths.outer) * costs.all(1) /
         (until.back() + costs.all(lengths.outer + 1));
}

/// The lengths up to `longest` with the highest speed-up; of equally good ones those with the shortest
/// outer, then the shortest inner length. {0, 0} if drafting does not pay off.
/// @throws ConfigError
[[nodiscard]] inline HierarchyLengths best_lengths(const HierarchyAcceptance& acceptance,
                                                   const HierarchyCosts& costs,
                                                   const HierarchyLengths& longest) {
  costs.all.validate();
  std::vector<std::vector<double>> until(longest.inner + 1);
  for (std::size_t inner = 0; inner <= longest.inner; ++inner) {
    until[inner] = standing_costs(acceptance.selected, inner, longest.outer, {costs.draft, costs.selected});
  }
  HierarchyLengths best;
  double highest = 1.0 / costs.all(1);
  for (std::size_t outer = 1; outer <= longest.outer; ++outer) {
    const double tokens = expected_tokens(acceptance.all, outer);
    for (std::size_t inner = 0; inner <= longest.inner; ++inner) {
      const double value = tokens / (until[inner][outer] + costs.all(outer + 1));
      if (value <= highest) continue;
      highest = value;
      best = {inner, outer};
    }
  }
  return best;
}

}  // namespace kvpolicy
