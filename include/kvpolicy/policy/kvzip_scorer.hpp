// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by what the model needs to repeat its own context: the most attention that any query of a scoring pass
// pays them. A row that no token of the text needs for being said again is not needed for a question about it either,
// whichever comes.
//
// Method: KVzip, arXiv:2505.23416. After a prompt the engine forks the cache and feeds the fork the prompt once more,
// after words that ask to repeat it, part by part, in calls with `AttendOptions::scores_rows`; then
// `KvCache::take_scores` brings what was found to the cache itself, and `compress` drops rows by it. The model's passes
// are the engine's; reference_model/scoring_pass.hpp shows them. With `adaptive_in_model` the rows of all heads
// compete, as published ("non-uniform budgets"). Differences: probabilities are those of attention to all rows that a
// head holds, where the published code normalises over the part that is repeated, the first rows and the pass's own;
// `recent` rows can be kept besides, none by default.
//
// The cost is a second prefill whose keys are read once more for the scores (`KvCache::observed_rows` of the fork),
// once for a prompt however many questions follow. Scores take 8 bytes a row, bookkeeping and not in `bytes()`.
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

/// An AccumulatingScorer that waits for scoring passes.
struct KvZipScorer {
  /// What is kept besides the rows that were needed.
  struct Config {
    static constexpr Votes votes = Votes::largest;
    std::size_t recent = 0;  ///< Latest rows that are always kept, besides the budget.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("recent", recent); }
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const {
      rule.ranking = Ranking::accumulated;
      rule.votes = votes;
    }
  };
  static constexpr std::string_view name = "kvzip";
  static constexpr bool waits_for_scoring = true;

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.recent <= most, "KvZipScorer: recent is ", config.recent, ", must be at most 2^40");
  }
  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.recent; }

  static void score_sums(const Config&, std::span<const double> largest, std::span<float> out) {
    std::ranges::transform(largest, out.begin(), [](double most) { return static_cast<float>(most); });
  }
};

static_assert(RowScorer<KvZipScorer>);

}  // namespace kvpolicy
