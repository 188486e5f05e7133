// SPDX-License-Identifier: Apache-2.0
//
// RazorAttention: heads that look back at an earlier place with the same token (echo) or at what
// followed it (induction) keep the whole text, the others its opening and its latest rows. For
// models whose heads have not been trained apart: scores come from reading random tokens repeated.
//
//     auto plan = kvpolicy::razor_attention_plan<kvpolicy::half>(shape, echo, induction);
//     kvpolicy::RazorAttentionCache<kvpolicy::half> cache{plan};
//
// Method: Tang et al., arXiv:2407.15891. Where we differ: there is no compensation token (the mean
// of the rows that were dropped, read as one more row), so what is dropped is gone; heads are KV
// heads, the heads that are stored, each with the highest score of its query heads; and the window
// is fixed when the plan is made, max(S0, L / C) for the L tokens that it is told.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>
#include <kvpolicy/plan/highest.hpp>
#include <kvpolicy/plan/require_fits.hpp>

namespace kvpolicy {

/// Settings of `razor_attention_plan`: how many heads keep everything, and what the others keep.
struct RazorAttentionConfig {
  double echo_share = 0.01;       ///< Of the heads, the best by echo score, that keep everything.
  double induction_share = 0.14;  ///< The same by induction score; both are rounded up.
  std::size_t sinks = 4;          ///< Opening rows of the other heads (N0).
  std::size_t min_recent = 4000;  ///< Latest rows that they keep at least (S0).
  double compression = 5.0;       ///< Of a text of `tokens` they keep 1 / compression (C).
  std::size_t tokens = 0;         ///< Expected tokens of a text (L); 0: min_recent is kept.
  Mask mask = Mask::exact;

  void validate() const {
    // Written so that NaN fails.
    require(echo_share >= 0.0 && echo_share <= 1.0, "RazorAttentionConfig: echo_share is ",
            echo_share, ", must be 0 to 1");
    require(induction_share >= 0.0 && induction_share <= 1.0,
            "RazorAttentionConfig: induction_share is ", induction_share, ", must be 0 to 1");
    require(compression >= 1.0, "RazorAttentionConfig: compression is ", compression,
            ", must be at least 1");
  }
  /// max(S0, L / C), rounded up.
  [[nodiscard]] std::size_t recent() const {
    return std::max(min_recent,
                    static_cast<std::size_t>(std::ceil(static_cast<double>(tokens) / compression)));
  }
};

/// Which KV heads keep everything: [layers, kv_heads]. Of equal scores at the cut, heads spread
/// evenly over the layers (plan/highest.hpp). @throws ConfigError unless both tables of scores
/// [layers, q_heads] fit the shape and are finite and not negative.
[[nodiscard]] inline HeadKinds razor_attention_kinds(const ModelShape& shape,
                                                     const HeadScores& echo,
                                                     const HeadScores& induction,
                                                     const RazorAttentionConfig& config = {}) {
  config.validate();
  const LayerShape layer = same_heads(shape, "razor_attention_kinds");
  HeadKinds kinds{shape.layers, layer.kv_heads, HeadKind::streaming};
  const auto keep_best = [&](const HeadScores& scores, double share) {
    check_scores(detail::checked_scores(scores, shape));
    std::vector<double> best(shape.kv_head_count());
    for (std::size_t i = 0; i < scores.values().size(); ++i) {
      double& own = best[i / layer.queries_per_kv()];
      own = std::max(own, scores.values()[i]);
    }
    // A rounding error above a whole number is that number: 0.14 * 50 comes out
    // as 7.000000000000001.
    const auto count = static_cast<std::size_t>(
        std::ceil(share * static_cast<double>(best.size()) * (1.0 - 1e-12)));
    for (const std::size_t head : highest(best, count).places) {
      kinds.values()[head] = HeadKind::retrieval;
    }
  };
  keep_best(echo, config.echo_share);
  keep_best(induction, config.induction_share);
  return kinds;
}

/// The plan that echo and induction scores ask for.
/// @throws ConfigError as above, or if the others would keep no latest rows.
template <Element E = float>
[[nodiscard]] HeadPlan<E> razor_attention_plan(
    const ModelShape& shape, const HeadScores& echo, const HeadScores& induction,
    const RazorAttentionConfig& config = {}) {
  using Dense = DenseStorage<E>;
  return plan_of_kinds<E>(
      shape, razor_attention_kinds(shape, echo, induction, config),
      typename FullCache<Dense>::Config{},
      typename SinkRecentCache<Dense>::Config{
          .sinks = config.sinks, .recent = config.recent(), .mask = config.mask});
}

}  // namespace kvpolicy
