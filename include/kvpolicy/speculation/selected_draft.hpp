// SPDX-License-Identifier: Apache-2.0
//
// The target over part of its cache, as a draft for itself. Over the rows that the cache selects it is the middle level
// of TriForce (arXiv:2404.11912), which verifies what a smaller draft proposes; without a smaller draft it is the
// paper's self-speculation. Over every row, but the upper half of each code, it is QuantSpec's (arXiv:2502.10424).
//
// We differ in one point. After a refusal the published code draws from p and reports p. The token at that
// position, accepted or drawn, is then not distributed as p, and the level above, which divides by the
// reported probability, is biased. This code draws from the positive part of p - q, so the token is
// distributed as p whether it was accepted or drawn, and p is the correct report.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/draft_length.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <kvpolicy/speculation/pending_call.hpp>
#include <kvpolicy/speculation/statistics.hpp>
#include <kvpolicy/speculation/verification.hpp>

namespace kvpolicy {

/// Options of a SelectedDraft: what it reads, and how many tokens of the inner draft are verified at a time.
struct SelectedDraftOptions {
  /// Draft tokens that are verified at once; in the paper it is one. With `adapt` the length is chosen from
  /// measured acceptance and times, up to `max_length`.
  std::size_t length = 1;
  bool adapt = true;
  std::size_t max_length = 4;
  Read read = Read::selected;  ///< Or `upper_half`, of a cache whose codes are in halves.
};

/// A Draft: the target over the rows that its cache selects, or over halves of codes, with an inner draft. Its rows
/// come from partial attention and are tentative: the verifier takes them back and reads the tokens over all rows. Not
/// synchronised.
template <class Model, TentativeCache Cache, Draft Inner = NoDraft, class Rule = SpeculativeSampling>
  requires LanguageModel<Model, Cache>
class SelectedDraft {
 public:
  using Options = SelectedDraftOptions;

  /// Model and cache must outlive it. `inner` proposes the tokens that it verifies.
  /// @throws ConfigError if `inner` has another vocabulary
  SelectedDraft(Model& model, Cache& cache, Inner inner = {}, const Options& options = {})
      : model_{&model},
        cache_{&cache},
        inner_{std::move(inner)},
        read_{options.read},
        length_{length_config(options)} {
    require(inner_.vocabulary() == 0 || inner_.vocabulary() == model.vocabulary(),
            "SelectedDraft: the draft has a vocabulary of ", inner_.vocabulary(), ", must have the target's ",
            model.vocabulary());
  }

  [[nodiscard]] std::size_t vocabulary() const { return model_->vocabulary(); }
  /// Makes the next call select rows by the text's last token. This selection is undone together with the
  /// rows of the draft tokens; the verifier then makes the lasting one, by the same token over all rows. Does nothing
  /// for a draft that does not read a selection.
  void refresh_selection() { refresh_due_ = read_ == Read::selected; }
  [[nodiscard]] const LevelStatistics& statistics() const { return statistics_; }
  [[nodiscard]] Inner& inner() { return inner_; }
  [[nodiscard]] const Inner& inner() const { return inner_; }

  /// The cache must have read a prefix of `text`, at most all but its last token.
  /// @throws ShapeError for draft tokens of `inner` that cannot be verified; what model, cache and `inner`
  /// throw
  void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions& sampling,
               Random& random, DraftTokens& guesses) {
    guesses.clear();
    text_.assign(text.begin(), text.end());
    while (guesses.size() < max_guesses) {
      const std::size_t wanted = max_guesses - guesses.size();
      // The pass adds one token of the model's own, so one draft token fewer is needed.
      const Verification verification = ask(std::min(length_.length(), wanted - 1), sampling, random);
      for (std::size_t i = 0; i <= verification.path.size(); ++i) {
        const bool own = i == verification.path.size();
        const std::size_t parent = guesses.empty() ? TokenTree::text : guesses.size() - 1;
        const int token = own ? verification.next : guesses_[verification.path[i]].token;
        const unsigned level = own ? 0 : guesses_[verification.path[i]].level + 1;
        guesses.push_back({token, verification.distributions[i], parent, level});
        text_.push_back(token);
        ++statistics_.tokens;
      }
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] static DraftLengthConfig length_config(const Options& options) {
    const bool adapt = options.adapt && !std::same_as<Inner, NoDraft>;
    DraftLengthConfig config;
    config.max_length = adapt ? std::max(options.length, options.max_length) : options.length;
    config.first = options.length;
    if (!adapt) config.fixed = options.length;
    return config;
  }

  // One pass over the selected rows, with at most `max_guesses` draft tokens. The cache keeps the rows of
  // the accepted ones.
  Verification ask(std::size_t max_guesses, const SamplingOptions& sampling, Random& random) {
    const auto start = Clock::now();
    inner_.propose(text_, max_guesses, sampling, random, guesses_);
    detail::check_guesses(guesses_, max_guesses, vocabulary());
    const auto drafted = Clock::now();
    const std::size_t seen = cache_->tokens();
    PendingCall pending{std::span{text_}.subspan(seen), guesses_};
    const auto logits =
        model_->read(*cache_, pending.call({.read = read_, .refresh_selection = refresh_due_}));
    refresh_due_ = false;
    Verification verification =
        verify<Rule>(guesses_, pending.last_rows(logits, vocabulary()), sampling, random);
    pending.keep(*cache_, seen, verification.path);
    note(verification, std::chrono::duration<double>(drafted - start).count(),
         std::chrono::duration<double>(Clock::now() - drafted).count());
    return verification;
  }

  void note(const Verification& verification, double draft_seconds, double verify_seconds) {
    ++statistics_.verifications;
    statistics_.draft_tokens += guesses_.size();
    statistics_.positions += verification.positions;
    statistics_.accepted += verification.path.size();
    statistics_.draft_seconds += draft_seconds;
    statistics_.verify_seconds += verify_seconds;
    if (!is_chain(guesses_)) return;  // the cost model describes chains only
    length_.observe({.drafted = guesses_.size(),
                     .accepted = verification.path.size(),
                     .draft_seconds = draft_seconds,
                     .verify_seconds = verify_seconds});
  }

  Model* model_;
  Cache* cache_;
  Inner inner_;
  Read read_;
  DraftLength length_;
  DraftTokens guesses_;
  std::vector<int> text_;
  bool refresh_due_ = false;
  LevelStatistics statistics_;
};

}  // namespace kvpolicy
