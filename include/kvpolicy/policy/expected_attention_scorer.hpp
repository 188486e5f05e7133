// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by the attention that queries to come can be expected to pay them, whatever these queries are. Needs no
// question and no second pass.
//
// Method: Expected Attention, arXiv:2510.00636. The text's queries, without their rotation, are taken for draws of one
// normal distribution; a query to come is such a draw, rotated to one of the `future` next positions. The attention
// that it pays a key is then expected to be exp(scale * k.m + scale^2 / 2 * k'Ck), normalised over the rows, with mean
// m and covariance C of the rotated draws; a row's score is the mean over the query heads. With
// `HeadBudgetCache::Config::weigh_values` the score is multiplied by the length of the row's value, as published.
// Differences: the draws are the latest `observation_window` queries, which the cache keeps anyway for such a scorer,
// where the published code takes all of the prompt's but the first four; cached keys are used as they are stored; a
// soft cap and a sink's logit are left out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/expected_queries.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// An ObservingScorer of queries that have not come.
struct ExpectedAttentionScorer {
  /// What is expected, and what is kept besides.
  struct Config {
    std::size_t observation_window = 64;  ///< Latest queries that stand for those to come.
    std::size_t future = 512;             ///< Positions from the text's end on at which these may be.
    std::size_t sinks = 4;                ///< First rows that are always kept, within the budget.
    std::size_t recent = 0;               ///< Latest rows that are always kept, besides the budget.
    RotaryConfig rotary = {};             ///< The model's.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) {
      visit("observation_window", observation_window);
      visit("future", future);
      visit("sinks", sinks);
      visit("recent", recent);
      visit("rotary", rotary);
    }
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const {
      rule.ranking = Ranking::expected;
      rule.expected = ExpectedQueries{rotary, future};
      rule.first_rows = sinks;
    }
  };
  static constexpr std::string_view name = "expected_attention";

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 20;
    require(config.observation_window >= 1 && config.observation_window <= most,
            "ExpectedAttentionScorer: observation_window is ", config.observation_window, ", must be 1 to ",
            most);
    require(config.future >= 1 && config.future <= most, "ExpectedAttentionScorer: future is ", config.future,
            ", must be 1 to ", most);
    require(config.sinks <= most, "ExpectedAttentionScorer: sinks is ", config.sinks, ", must be at most ",
            most);
    require(config.recent <= most, "ExpectedAttentionScorer: recent is ", config.recent, ", must be at most ",
            most);
    config.rotary.validate();
  }
  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.recent; }
  [[nodiscard]] static std::size_t observed_queries(const Config& config) {
    return config.observation_window;
  }
  /// What `sums` are to be made of.
  [[nodiscard]] static ExpectedQueries expected_queries(const Config& config) {
    return {config.rotary, config.future};
  }

  /// `sums` are the expected probabilities [group, rows] of one query to come.
  static void score(const Config& config, std::span<const float> sums, std::size_t group, std::size_t,
                    std::span<float> out) {
    const std::size_t rows = sums.size() / group;
    for (std::size_t row = 0; row < out.size(); ++row) {
      out[row] = 0.0F;
      for (std::size_t head = 0; head < group; ++head) {
        out[row] += sums[head * rows + row] / static_cast<float>(group);
      }
    }
    // First rows stay first rows, because they are never dropped.
    std::ranges::fill(out.first(std::min(config.sinks, out.size())), std::numeric_limits<float>::max());
  }
};

static_assert(RowScorer<ExpectedAttentionScorer>);

}  // namespace kvpolicy
