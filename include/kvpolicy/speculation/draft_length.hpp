// SPDX-License-Identifier: Apache-2.0
//
// Chooses how many tokens to draft, from the measured costs of drafts and verifications and the measured
// acceptance of draft tokens. The caller measures the times, so the choice depends on the inputs only.
//
//     DraftLength length{{.max_length = 8}};
//     while (decoding) {
//       ... draft length.length() tokens, verify them ...
//       length.observe({.drafted = 5, .accepted = 3, .draft_seconds = a, .verify_seconds = b});
//     }
//
// The model is in speculation/cost_model.hpp. TriForce's hierarchy uses two objects, one per level; the
// outer one gets the time of the inner level as its drafting time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/speculation/cost_model.hpp>
#include <kvpolicy/speculation/pass_times.hpp>

namespace kvpolicy {

/// The possible lengths, and how fast the choice follows measurements.
struct DraftLengthConfig {
  std::size_t max_length = 16;  ///< Longest draft; 0 is plain decoding.
  /// If set, the length is always this one, at most `max_length`; times are measured nevertheless.
  std::optional<std::size_t> fixed = {};
  std::size_t first = 4;         ///< Length until times are known, at most `max_length`.
  double prior = 0.7;            ///< Acceptance assumed before anything is measured,
  double prior_trials = 2.0;     ///< as if measured on so many draft tokens; above 0.
  double memory = 256.0;         ///< About how many of the latest draft tokens count.
  std::size_t probe_every = 16;  ///< Rounds until another length is tried; 0: never.
  std::size_t retry_every = 64;  ///< Rounds of plain decoding until a draft is tried; 0: never.

  /// @throws ConfigError
  void validate() const {
    require(max_length < TokenTree::max_nodes, "DraftLengthConfig: max_length is ", max_length,
            ", must be below ", TokenTree::max_nodes);
    require(fixed.value_or(0) <= max_length, "DraftLengthConfig: fixed is ", fixed.value_or(0),
            ", must be at most max_length = ", max_length);
    // Written so that NaN fails.
    require(prior >= 0.0 && prior <= 1.0, "DraftLengthConfig: prior is ", prior, ", must be 0 to 1");
    require(prior_trials > 0.0 && std::isfinite(prior_trials), "DraftLengthConfig: prior_trials is ",
            prior_trials, ", must be positive");
    require(memory >= 1.0, "DraftLengthConfig: memory is ", memory, ", must be at least 1");
  }
};

/// One verification.
struct DraftRound {
  std::size_t drafted = 0;      ///< tokens that were proposed; 0: plain decoding
  std::size_t accepted = 0;     ///< how many of them were accepted
  double draft_seconds = 0.0;   ///< time of drafting all of them
  double verify_seconds = 0.0;  ///< time of one pass over drafted + 1 tokens
};

/// Chooses the number of draft tokens. Not synchronised.
class DraftLength {
 public:
  /// @throws ConfigError
  explicit DraftLength(const DraftLengthConfig& config = {}) : config_{config} {
    config_.validate();
    best_ = config_.fixed.value_or(std::min(config_.first, config_.max_length));
    next_ = best_;
  }

  /// How many tokens to draft now: mostly the best number, and at times another, to measure its
  /// cost. 0 is plain decoding. Drafting fewer tokens is allowed.
  [[nodiscard]] std::size_t length() const { return next_; }
  /// The best number by the measurements so far.
  [[nodiscard]] std::size_t best() const { return best_; }

  /// How often a draft token is accepted, given that those before it were.
  [[nodiscard]] double acceptance() const {
    return (accepted_ + config_.prior * config_.prior_trials) / (trials_ + config_.prior_trials);
  }
  /// The measured costs; 0 for a cost that was not measured yet.
  [[nodiscard]] DraftCosts costs() const { return {draft_.typical(), verify_.cost()}; }

  /// Records one verification. Implausible times are ignored (`plausible_time`), but the acceptance counts.
  /// @throws ConfigError for more accepted than drafted tokens, or drafts of
  /// TokenTree::max_nodes or more
  void observe(const DraftRound& round) {
    require(round.drafted < TokenTree::max_nodes, "DraftLength: ", round.drafted,
            " drafted tokens, must be below ", TokenTree::max_nodes);
    require(round.accepted <= round.drafted, "DraftLength: ", round.accepted, " of ", round.drafted,
            " drafted tokens were accepted");
    verify_.add(round.drafted + 1, round.verify_seconds);  // first, because it allocates
    if (round.drafted > 0) {
      draft_.add(round.draft_seconds / static_cast<double>(round.drafted));
    }
    // Tokens after the first refused one do not count, because they continued a text that was
    // rejected.
    const bool refused = round.accepted < round.drafted;
    const double trials = static_cast<double>(round.accepted) + (refused ? 1.0 : 0.0);
    const double kept = std::pow(1.0 - 1.0 / config_.memory, trials);
    trials_ = trials_ * kept + trials;
    accepted_ = accepted_ * kept + static_cast<double>(round.accepted);
    // The cost of a draft is unknown until one was tried, so the first length is kept.
    const bool untried = trials_ == 0.0 && next_ > 0;
    if (!config_.fixed && !untried && !verify_.empty()) choose();
  }

 private:
  // Chooses the best length. A draft that takes no measurable time counts as free.
  void choose() {
    best_ = best_length(acceptance(), costs(), config_.max_length);
    next_ = best_;
    if (config_.max_length == 0) return;
    if (best_ == 0) {
      since_probe_ = 0;
      if (config_.retry_every == 0 || ++plain_ < config_.retry_every) return;
      plain_ = 0;
      retry();
    } else {
      plain_ = 0;
      // Fitting a line needs two lengths, each measured a few times, so other lengths are tried often at
      // first.
      const std::size_t every =
          verify_.has_slope() ? config_.probe_every : std::min<std::size_t>(config_.probe_every, 2);
      if (config_.probe_every == 0 || ++since_probe_ < every) return;
      since_probe_ = 0;
      probe();
    }
  }

  // Tries the length that would be best at the prior acceptance. Old measurements then get half their
  // weight; otherwise a draft that has become good would have to outweigh all of them.
  void retry() {
    constexpr double enough_trials = 16.0;
    next_ = std::max<std::size_t>(best_length(config_.prior, costs(), config_.max_length), 1);
    const double kept = std::max(0.5, std::min(1.0, enough_trials / std::max(trials_, 1.0)));
    trials_ *= kept;
    accepted_ *= kept;
  }

  // Tries a length 1.5 times as long and one half as long, alternately.
  void probe() {
    const std::size_t step = std::max<std::size_t>(best_ / 2, 1);
    const std::size_t longer = std::min(best_ + step, config_.max_length);
    const std::size_t shorter = best_ - step;
    next_ = probe_longer_ && longer != best_ ? longer : shorter;
    probe_longer_ = !probe_longer_;
  }

  DraftLengthConfig config_;
  RecentTimes draft_;
  PassTimes verify_;
  double trials_ = 0.0;
  double accepted_ = 0.0;
  std::size_t best_ = 0;
  std::size_t next_ = 0;
  std::size_t plain_ = 0;        // rounds since plain decoding was chosen or a draft was tried
  std::size_t since_probe_ = 0;  // rounds since another length was measured
  bool probe_longer_ = true;
};

}  // namespace kvpolicy
