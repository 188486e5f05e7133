// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by the attention that the last queries of a text pay them, smoothed along the text.
//
// Method: SnapKV, arXiv:2404.14469, with the max pooling of width 7 of HeadKV, arXiv:2410.19258.
// Differences: one score per KV head, the mean over its query heads, where the published code
// expands the cache to query heads and ranks the rows of each apart. This keeps the cache as small
// as the model made it, and it is the difference that counts most: on the shipped model 23 of 25
// questions are answered this way, and 3 of 25 by the published rule. Rows of equal scores (max
// pooling makes plateaus) go by their own votes (row_ranking.hpp), which the published code
// leaves to topk.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// An ObservingScorer.
struct SnapKvScorer {
  /// Whose votes count, and how they are smoothed.
  struct Config {
    std::size_t observation_window = 8;  ///< Latest queries that vote; their own rows are always kept.
    Pooling pooling = Pooling::max;
    std::size_t kernel = 7;  ///< Rows pooled together; odd.
    /// What the votes of the queries and of the query heads come to. `largest` is DefensiveKV's worst case
    /// (arXiv:2510.13334), the first of its two steps.
    Votes votes = Votes::mean;
    /// The second step, its adaptive prior-risk correction: no score is below this share of the mean of all
    /// candidates' scores, because a row that few queries have looked at so far may matter yet. 1 in the authors'
    /// code; 0: scores stay as they are. Rows that are lifted are equal, so it pays with `weigh_values`, which
    /// tells them apart, or where heads share their budgets.
    double prior_share = 0.0;
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) {
      visit.renamed("observation_window", "window", observation_window);
      visit("pooling", pooling);
      visit("kernel", kernel);
      visit.later("votes", votes, Votes::mean);
      visit.later("prior_share", prior_share, 0.0);
    }
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const {
      rule.ranking = Ranking::attention;
      rule.votes = votes;
      rule.prior_share = prior_share;
      rule.pooling = pooling;
      rule.pooled_rows = kernel;
    }
  };
  static constexpr std::string_view name = "snapkv";

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 20;
    require(config.observation_window >= 1 && config.observation_window <= most,
            "SnapKvScorer: observation_window is ", config.observation_window, ", must be 1 to ", most);
    require(config.kernel % 2 == 1 && config.kernel <= most, "SnapKvScorer: kernel is ", config.kernel,
            ", must be odd and at most ", most);
    // Written so that NaN fails.
    require(config.prior_share >= 0.0 && config.prior_share <= 1.0, "SnapKvScorer: prior_share is ",
            config.prior_share, ", must be 0 to 1");
  }

  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.observation_window; }
  [[nodiscard]] static std::size_t observed_queries(const Config& config) {
    return config.observation_window;
  }

  static void score(const Config& config, std::span<const float> sums, std::size_t group, std::size_t queries,
                    std::span<float> out) {
    const std::size_t rows = sums.size() / group;
    const std::size_t candidates = out.size();
    const std::size_t half_width = config.kernel / 2;
    std::ranges::fill(out, 0.0F);
    for (std::size_t head = 0; head < group; ++head) {
      // Window rows are not candidates: they are neither ranked nor pooled into a neighbour.
      const auto votes = sums.subspan(head * rows, candidates);
      for (std::size_t row = 0; row < candidates; ++row) {
        const std::size_t first = row - std::min(row, half_width);
        const std::size_t last = std::min(candidates, row + half_width + 1);
        const auto near = votes.subspan(first, last - first);
        float pooled = 0.0F;
        if (config.pooling == Pooling::max) {
          pooled = *std::ranges::max_element(near);
        } else {
          // Beyond the ends stand zeros, which count: the divisor is the whole kernel.
          for (const float vote : near) pooled += vote;
          pooled /= static_cast<float>(config.kernel);
        }
        if (config.votes == Votes::mean) pooled /= static_cast<float>(queries * group);
        out[row] = with_vote(config.votes, out[row], pooled);
      }
    }
    if (config.prior_share > 0.0 && candidates > 0) lift(config.prior_share, out);
  }

 private:
  static void lift(double share, std::span<float> scores) {
    double sum = 0.0;
    for (const float score : scores) sum += static_cast<double>(score);
    const auto least = static_cast<float>(share * sum / static_cast<double>(scores.size()));
    for (float& score : scores) score = std::max(score, least);
  }
};

static_assert(RowScorer<SnapKvScorer>);

}  // namespace kvpolicy
