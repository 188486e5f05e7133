// SPDX-License-Identifier: Apache-2.0
//
// How the rows of a head with a budget rank (policy/head_budget_cache.hpp): by the scores that its scorer gives them,
// and by these times norms of their values where values are weighed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/value_outputs.hpp>
#include <kvpolicy/policy/row_scorer.hpp>
#include <kvpolicy/policy/shared_rows.hpp>
#include <kvpolicy/policy/top_rows.hpp>
#include <kvpolicy/policy/weighed_scores.hpp>

namespace kvpolicy::detail {

/// The rows that are ranked, and what ranks them. `Config`: HeadBudgetCache's.
template <RowScorer Scorer, class Storage, class Config>
struct RowRanking {
  const Config& config;
  const Storage& storage;
  std::span<const double> accumulated;  ///< of each row, where the scorer adds up
  std::size_t candidates = 0;           ///< the first so many rows are ranked
  std::size_t head_dim = 0;
  std::size_t value_dim = 0;
  const ValueOutput* value_output = nullptr;  ///< null: scores are not weighed by the output

  /// The ranks of the candidates, by scores, and by scores and values where a share of the budget goes by scores alone.
  /// `sums` [group, rows] are of `queries` observed queries (empty for a scorer that observes none).
  [[nodiscard]] SharingHead ranked(std::span<const float> sums, std::size_t group,
                                   std::size_t queries) const {
    const std::vector<float> scored = scores(sums, group, queries);
    if (!config.weigh_values) return {.ranks = ranks_of(scored, sums, group)};
    std::vector<std::uint64_t> by_values = ranks_of(weighed(scored, sums, group, queries), sums, group);
    if (config.unweighed_share == 0.0) return {.ranks = std::move(by_values)};
    return {.ranks = ranks_of(scored, sums, group),
            .weighed = std::move(by_values),
            .unweighed_share = config.unweighed_share};
  }

 private:
  // The ranks of the candidates; higher ranks survive. Max pooling gives equal scores to the neighbours of a row with
  // much attention, so rows of equal score are ranked by the attention that they got themselves.
  [[nodiscard]] std::vector<std::uint64_t> ranks_of(std::span<const float> scored,
                                                    [[maybe_unused]] std::span<const float> sums,
                                                    [[maybe_unused]] std::size_t group) const {
    std::vector<std::uint64_t> ranks(scored.size());
    for (std::size_t row = 0; row < ranks.size(); ++row) {
      float own = 0.0F;
      if constexpr (ObservingScorer<Scorer>) {
        for (std::size_t head = 0; head < group; ++head) {
          own = with_vote(votes_of(config.scorer), own, sums[head * storage.end() + row]);
        }
      }
      ranks[row] = rank_of(scored[row], own);
    }
    return ranks;
  }

  [[nodiscard]] std::vector<float> scores([[maybe_unused]] std::span<const float> sums,
                                          [[maybe_unused]] std::size_t group,
                                          [[maybe_unused]] std::size_t queries) const {
    std::vector<float> scores(candidates);
    if constexpr (ObservingScorer<Scorer>) {
      Scorer::score(config.scorer, sums, group, queries, scores);
    } else if constexpr (AccumulatingScorer<Scorer>) {
      Scorer::score_sums(config.scorer, accumulated.first(scores.size()), scores);
    } else if constexpr (AnchoredKeyScorer<Scorer>) {
      typename Scorer::Anchor anchor(head_dim);
      for_each_key(storage.end(), [&](std::size_t, std::span<const float> key) { anchor.add(key); });
      for_each_key(scores.size(), [&](std::size_t row, std::span<const float> key) {
        scores[row] = Scorer::score_key(config.scorer, std::as_const(anchor), key);
      });
    } else {
      for_each_key(scores.size(), [&](std::size_t row, std::span<const float> key) {
        scores[row] = Scorer::score_key(config.scorer, key);
      });
    }
    return scores;
  }

  // The scores times the norms of the rows' values.
  [[nodiscard]] std::vector<float> weighed(std::vector<float> scored,
                                           [[maybe_unused]] std::span<const float> sums,
                                           [[maybe_unused]] std::size_t group,
                                           [[maybe_unused]] std::size_t queries) const {
    if (value_output == nullptr) {
      for_each_row<&Segment::values>(storage, scored.size(), value_dim,
                                     [&](std::size_t row, std::span<const float> value) {
                                       scored[row] = times_norm(scored[row], length_of(value));
                                     });
      return scored;
    }
    const std::vector<double> norms = output_norms(*value_output, storage, scored.size());
    if constexpr (ObservingScorer<Scorer>) {
      return times_norms<Scorer>(config.scorer, sums, group, queries, norms, std::move(scored));
    } else {
      // Sums are of all query heads together, and so are the norms.
      return times_norms(votes_of(config.scorer), norms, std::move(scored));
    }
  }
  // visit(row, key) for the first `count` rows.
  template <class Visit>
  void for_each_key(std::size_t count, Visit visit) const {
    for_each_row<&Segment::keys>(storage, count, head_dim, visit);
  }
};

}  // namespace kvpolicy::detail
