// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by all the attention they have got since they came ("heavy hitters"), and keeps the
// latest rows besides. With `compress_every = 1` a full head drops a row at each token.
//
// Method: H2O, arXiv:2306.14048. Differences: a rank per KV head, by the mean over its query heads
// (the published models have one query head to each). As in the published code, a call (the whole
// prompt, if it is one call) attends to all of its own rows, all of its queries count, and it is
// compressed after it; a row that is dropped takes its sum along.
//
// The cost is a second pass over the keys at every call, which attention kernels that never write
// their probabilities cannot avoid: `KvCache::observed_rows` counts it. Sums (8 bytes a row) are
// bookkeeping and not in `bytes()`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// An AccumulatingScorer.
struct H2oScorer {
  /// What is kept besides the heavy hitters.
  struct Config {
    /// Latest rows that are always kept, besides the budget; the paper keeps as many as it ranks.
    std::size_t recent = 64;
    /// What the attention of all queries comes to: the mean over the query heads of what they add up to, as published,
    /// or the largest that one query pays (DefensiveKV's worst case, arXiv:2510.13334).
    Votes votes = Votes::mean;
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) {
      visit("recent", recent);
      visit.later("votes", votes, Votes::mean);
    }
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const {
      rule.ranking = Ranking::accumulated;
      rule.votes = votes;
    }
  };
  static constexpr std::string_view name = "h2o";

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.recent <= most, "H2oScorer: recent is ", config.recent, ", must be at most 2^40");
  }
  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.recent; }

  static void score_sums(const Config&, std::span<const double> sums, std::span<float> out) {
    std::ranges::transform(sums, out.begin(), [](double sum) { return static_cast<float>(sum); });
  }
};

static_assert(RowScorer<H2oScorer>);

}  // namespace kvpolicy
