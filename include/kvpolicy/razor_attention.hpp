// SPDX-License-Identifier: Apache-2.0
//
// RazorAttention: heads that attend to an earlier occurrence of the same token (echo) or to what followed
// it (induction) keep the whole text; the others keep its first and its latest rows. It suits models whose
// heads have not been classified by training: the scores come from reading repeated random tokens.
//
//     auto plan = kvpolicy::razor_attention_plan<kvpolicy::float16>(shape, echo, induction);
//     kvpolicy::KvCache cache{plan};
//
// Method: Tang et al., arXiv:2407.15891. Where we differ: there is no compensation token (the mean of the
// dropped rows, read as one more row), so dropped rows are lost; heads are KV heads, the heads that are
// stored, each with the highest score of its query heads; and the window is fixed when the plan is made, as
// max(S0, L / C) for the expected number L of tokens.
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
  double echo_share = 0.01;       ///< Share of heads, by echo score, that keep everything.
  double induction_share = 0.14;  ///< Share of heads by induction score; both are rounded up.
  std::size_t sinks = 4;          ///< First rows that the other heads keep (N0).
  std::size_t min_recent = 4000;  ///< Latest rows that the other heads keep at least (S0).
  double compression = 5.0;       ///< The other heads keep 1 / compression of `tokens` (C).
  std::size_t tokens = 0;         ///< Expected tokens of a text (L); 0: they keep min_recent.
  Mask mask = Mask::exact;

  void validate() const {
    // Written so that NaN fails.
    require(echo_share >= 0.0 && echo_share <= 1.0, "RazorAttentionConfig: echo_share is ", echo_share,
            ", must be 0 to 1");
    require(induction_share >= 0.0 && induction_share <= 1.0, "RazorAttentionConfig: induction_share is ",
            induction_share, ", must be 0 to 1");
    require(compression >= 1.0, "RazorAttentionConfig: compression is ", compression, ", must be at least 1");
  }
  /// The latest rows that the other heads keep: max(S0, L / C), rounded up.
  [[nodiscard]] std::size_t recent() const {
    return std::max(min_recent,
                    static_cast<std::size_t>(std::ceil(static_cast<double>(tokens) / compression)));
  }
};

/// The kind of each KV head [layers, kv_heads]. If a cut falls into a tie, the heads taken are spread
/// evenly over the layers (plan/highest.hpp). @throws ConfigError unless both tables of scores [layers,
/// q_heads] fit the shape and are finite and not negative.
[[nodiscard]] inline HeadKinds razor_attention_kinds(const ModelShape& shape, const HeadScores& echo,
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
    // The factor removes rounding errors just above a whole number: 0.14 * 50 gives 7.000000000000001.
    const auto count =
        static_cast<std::size_t>(std::ceil(share * static_cast<double>(best.size()) * (1.0 - 1e-12)));
    for (const std::size_t head : highest(best, count).indices) {
      kinds.values()[head] = HeadKind::retrieval;
    }
  };
  keep_best(echo, config.echo_share);
  keep_best(induction, config.induction_share);
  return kinds;
}

/// The plan that follows from echo and induction scores.
/// @throws ConfigError like `razor_attention_kinds`, or if the other heads would keep no latest rows.
template <Element E = float>
[[nodiscard]] HeadPlan<E> razor_attention_plan(const ModelShape& shape, const HeadScores& echo,
                                               const HeadScores& induction,
                                               const RazorAttentionConfig& config = {}) {
  using Dense = DenseStorage<E>;
  return plan_of_kinds<E>(shape, razor_attention_kinds(shape, echo, induction, config),
                          typename FullCache<Dense>::Config{},
                          typename SinkRecentCache<Dense>::Config{
                              .sinks = config.sinks, .recent = config.recent(), .mask = config.mask});
}

}  // namespace kvpolicy
