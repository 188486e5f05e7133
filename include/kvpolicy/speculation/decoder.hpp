// SPDX-License-Identifier: Apache-2.0
//
// Lossless speculative decoding: a draft proposes the next tokens, the target verifies all of them in one
// pass, and every resulting token has exactly the target's distribution (Leviathan et al.,
// arXiv:2211.17192). With SelectedDraft between draft and target this is TriForce's hierarchy,
// arXiv:2404.11912 (triforce.hpp joins the parts).
//
//     SpeculativeDecoder decoder{model, cache, ModelDraft{small, small_cache}, {.length = 6}};
//     decoder.read_prompt(prompt);
//     decoder.generate(200, [](const NewToken& t) { std::cout << text_of(t.token); return true; });
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
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

/// Decides when ChunkRetrieval heads choose a new selection, in addition to the end of a prompt. Which rows
/// attract attention changes slowly (TriForce, section 3), so a selection serves many tokens.
struct RefreshRule {
  std::size_t every = 0;          ///< after so many tokens; 0: not by count
  double below_acceptance = 0.5;  ///< if a smaller share of the latest draft tokens was accepted; 0: never
  std::size_t min_tokens = 32;    ///< fewest tokens between two refreshes by acceptance
};

/// Options of a SpeculativeDecoder: how tokens are sampled, how many are drafted, and when the text ends.
struct SpeculationOptions {
  SamplingOptions sampling = {};
  std::uint64_t seed = 0;
  /// Draft tokens per verification; 0 decodes token by token. With `adapt` this is only the first length.
  /// Later lengths, 0 to `max_length`, are chosen from measured acceptance and times, except for trees.
  /// Times differ from run to run, so only a fixed length reproduces sampled tokens.
  std::size_t length = 6;
  bool adapt = true;
  std::size_t max_length = 16;
  RefreshRule refresh_selection = {};
  /// When rows are committed. This matters for quantised heads, whose rows change when they are committed.
  /// With a value n > 0, all rows are committed in the first step after a prompt and whenever n divides their
  /// number. No verification crosses such a position, so its tokens read the same rows as in plain
  /// decoding. With 0, the cache commits rows once they are `max_rollback` rows old, which is right if
  /// committed rows do not change. If it is not set, it is max_rollback if the cache's
  /// `commit_changes_rows()` is true, otherwise 0. At most max_rollback.
  ///
  /// Decoding with draft tokens then gives the same tokens as plain decoding, which means a decoder of
  /// `length` 0 over a cache with the same plan and max_rollback. Your own loop over such a cache is
  /// equivalent if it reads the prompt except its last token in calls of `prompt_chunk`, commits, and then
  /// reads one token at a time, with a commit before each token at which `cache.tokens() %
  /// decoder.commit_every()` is 0. A cache with another max_rollback (0, say) keeps its latest rows exact
  /// for longer or shorter. With quantised heads it generates another text, with or without draft tokens.
  std::optional<std::size_t> commit_every = {};
  std::vector<int> stop_tokens = {};  ///< the text ends after the first of these tokens
  /// Tokens of a prompt that are read in one call. If a call fails half-way through the layers (because
  /// memory runs out, say), the next step can repair it only if `prompt_chunk` is at most max_rollback.
  std::size_t prompt_chunk = 512;
};

/// A token of the text, and the level that proposed it: 0 the target, 1 the draft, 2 the draft's
/// draft, ...
struct NewToken {
  int token = 0;
  unsigned level = 0;
};

/// Why a text has ended.
enum class Ending : std::uint8_t {
  open,  ///< it has not ended
  stop_token,
  length,    ///< it has as many new tokens as requested
  capacity,  ///< the target's cache has no room for another token (CacheOptions::max_tokens)
  cancelled  ///< the callback returned false
};

/// The result of one step: what it added to the text.
struct DecodedStep {
  std::vector<NewToken> tokens;
  Ending ending = Ending::open;
};

/// Decodes one text. Model and cache must outlive it, and nothing else may use the cache meanwhile.
/// Not synchronised. An error leaves the text as it was, and the next step tries again.
template <class Model, TentativeCache Cache, Draft DraftType, class Rule = SpeculativeSampling>
  requires LanguageModel<Model, Cache>
class SpeculativeDecoder {
 public:
  /// The cache must be able to take back one row more than the number of draft tokens.
  /// @throws ConfigError for options that do not work together or with the cache, or for a draft with
  /// another vocabulary
  SpeculativeDecoder(Model& model, Cache& cache, DraftType draft, SpeculationOptions options = {})
      : model_{&model},
        cache_{&cache},
        draft_{std::move(draft)},
        options_{std::move(options)},
        random_{options_.seed},
        length_{length_config(options_)} {
    options_.sampling.validate();
    require(options_.prompt_chunk > 0, "SpeculativeDecoder: prompt_chunk is 0, must be at least 1");
    const double below = options_.refresh_selection.below_acceptance;
    require(below >= 0.0 && below <= 1.0, "SpeculativeDecoder: refresh_selection.below_acceptance is ", below,
            ", must be 0 to 1");
    require(draft_.vocabulary() == 0 || draft_.vocabulary() == model.vocabulary(),
            "SpeculativeDecoder: the draft has a vocabulary of ", draft_.vocabulary(),
            ", must have the target's ", model.vocabulary());
    const std::size_t most = most_guesses(options_);
    require(most == 0 || most < rollback(), "SpeculativeDecoder: ", most,
            " draft tokens, but the cache can take back max_rollback = ", rollback(),
            " rows, must be one more than draft tokens");
    if (!options_.commit_every) options_.commit_every = changes_rows() ? rollback() : 0;
    require(commit_every() == 0 || (commits && commit_every() <= rollback()),
            "SpeculativeDecoder: commit_every is ", commit_every(),
            ", must be 0 or at most max_rollback = ", rollback(), " of a cache that has commit()");
  }

  /// Continues a text of which the cache has read all tokens but the last, for example because it
  /// is a fork of a cache that read the prompt.
  /// @throws ConfigError if the cache has read another number of tokens, or the decoder has a text
  /// already; ShapeError for a token outside the vocabulary
  void continue_text(std::span<const int> text) {
    require(text_.empty() && !text.empty() && cache_->tokens() == text.size() - 1,
            "SpeculativeDecoder: to continue a text of ", text.size(), " tokens the cache must have read ",
            "all but one of them, but has read ", cache_->tokens(), ", and there must be no text yet");
    check_tokens(text);
    text_.assign(text.begin(), text.end());
    unselected_ = true;  // whether the cache has a selection is unknown
    commit_due_ = true;
  }

  /// Appends a prompt, or a later turn, to the text and reads its tokens except the last, which the
  /// next step reads. `progress` gets the number of tokens read and the number to read. If a call
  /// fails, the tokens stay part of the text, and `read_prompt({})` or the next step reads the
  /// rest.
  /// @throws ShapeError for a token outside the vocabulary, CapacityError for a text that is too
  /// long for the cache, ConfigError for a cache that has read another text, all before anything
  /// changed; what model and cache throw
  void read_prompt(std::span<const int> tokens,
                   const std::function<void(std::size_t, std::size_t)>& progress = {}) {
    check_tokens(tokens);
    require<CapacityError>(tokens.size() <= capacity() - std::min(capacity(), text_.size()),
                           "SpeculativeDecoder: ", tokens.size(), " more tokens after ", text_.size(),
                           " exceed the cache's max_tokens = ", capacity());
    abandon();
    require(cache_->tokens() <= text_.size(), "SpeculativeDecoder: the cache has read ", cache_->tokens(),
            " tokens of a text that the decoder does not know; continue_text tells it");
    text_.insert(text_.end(), tokens.begin(), tokens.end());
    unselected_ = unselected_ || !tokens.empty();
    commit_due_ = true;
    read_all_but_last(progress);
  }

  /// One verification. It adds at least one token, at most one more than there were draft tokens, and at
  /// most `max_tokens`. It adds none if the text has ended. The first step after a prompt reads the
  /// prompt's last token, and ChunkRetrieval heads choose their selection by its query.
  /// @throws ShapeError for NaN or infinite logits of target or draft, and for draft tokens that cannot be
  /// verified because the token is outside the vocabulary or not in `DraftToken::from`; what model and
  /// cache throw
  DecodedStep step(std::size_t max_tokens = static_cast<std::size_t>(-1)) {
    if (!begin(max_tokens)) return {{}, ending_};
    std::vector<float> logits;
    KVPOLICY_TRY { logits = model_->read(*cache_, call()); }
    KVPOLICY_CATCH_ALL {
      abandon();
      KVPOLICY_RETHROW;
    }
    return conclude(logits);
  }

  /// Steps until the text ends, `max_tokens` tokens were added, or `accept`, which is called for
  /// each token, returns false. Later tokens of the same step are part of the text nevertheless.
  Ending generate(std::size_t max_tokens, const std::function<bool(const NewToken&)>& accept = {}) {
    for (std::size_t count = 0; count < max_tokens;) {
      const DecodedStep done = step(max_tokens - count);
      count += done.tokens.size();
      bool go_on = true;
      for (const NewToken& token : done.tokens) go_on = !accept || (go_on && accept(token));
      if (done.ending != Ending::open) return done.ending;
      if (!go_on) return Ending::cancelled;
    }
    return Ending::length;
  }

  // ---- a step in three parts, for batches and engines that run the model themselves

  /// Makes the draft tokens. Returns false if the text has ended. Otherwise read `call` over `cache` and
  /// pass its logits to `conclude`, or abandon the step.
  [[nodiscard]] bool begin(std::size_t max_tokens = static_cast<std::size_t>(-1)) {
    require<ShapeError>(!text_.empty(), "SpeculativeDecoder: no text, expected a prompt first");
    abandon();
    if (max_tokens == 0 || ending_ != Ending::open) return false;
    read_all_but_last();  // tokens that a failed call left unread
    const std::size_t room = capacity() - cache_->tokens();
    if (room < text_.size() - cache_->tokens()) {
      ending_ = Ending::capacity;
      return false;
    }
    std::size_t guesses =
        std::min({length_.length(), max_tokens - 1, room - (text_.size() - cache_->tokens())});
    if constexpr (commits) {
      if (commit_every() > 0) {
        if (commit_due_) cache_->commit();
        commit_due_ = false;
        const std::size_t room_before_commit = commit_every() - cache_->tokens() % commit_every();
        guesses = std::min(guesses, room_before_commit - 1);
      }
    }
    if (unselected_) refresh_selection(draft_);
    guesses_.clear();
    const std::size_t seen = cache_->tokens();
    const auto start = Clock::now();
    KVPOLICY_TRY {
      if (guesses > 0) draft_.propose(text_, guesses, options_.sampling, random_, guesses_);
      detail::check_guesses(guesses_, guesses, model_->vocabulary());
      // A draft that reads over the target's own cache has left rows there; they are dropped here.
      if (guesses > 0) cache_->truncate(seen);
      pending_ = PendingCall{std::span<const int>{text_}.subspan(seen), guesses_};
    }
    KVPOLICY_CATCH_ALL {
      take_back(seen);
      KVPOLICY_RETHROW;
    }
    draft_seconds_ = seconds_since(start);
    seen_ = seen;
    begun_ = true;
    verify_start_ = Clock::now();
    return true;
  }
  [[nodiscard]] ModelCall call() const {
    return pending_.call({.refresh_selection = refresh_due_ || unselected_});
  }
  [[nodiscard]] Cache& cache() const { return *cache_; }

  /// Ends a step; `logits` are those of all the call's tokens.
  /// @throws ShapeError for a wrong number of logits, NaN or infinity, or if no step has begun; the
  /// step is then abandoned
  DecodedStep conclude(std::span<const float> logits) {
    require<ShapeError>(begun_, "SpeculativeDecoder: conclude without begin, expected a begun step");
    Verification verification;
    DecodedStep result;
    KVPOLICY_TRY {
      const auto rows = pending_.last_rows(logits, model_->vocabulary());
      verification = verify<Rule>(guesses_, rows, options_.sampling, random_);
      for (const std::size_t guess : verification.path) {
        result.tokens.push_back({guesses_[guess].token, guesses_[guess].level + 1});
      }
      result.tokens.push_back({verification.next, 0});
      const auto stop = std::ranges::find_if(result.tokens, [&](const NewToken& token) {
        return std::ranges::find(options_.stop_tokens, token.token) != options_.stop_tokens.end();
      });
      if (stop != result.tokens.end()) {
        const auto before = static_cast<std::size_t>(stop - result.tokens.begin());
        if (before < verification.path.size()) verification.positions = before;  // up to the stop
        result.tokens.erase(stop + 1, result.tokens.end());
        result.ending = Ending::stop_token;
      }
      text_.reserve(text_.size() + result.tokens.size());
      // The cache has read the new text except its last token.
      verification.path.resize(result.tokens.size() - 1);
      observe(verification);
      pending_.keep(*cache_, seen_, verification.path);
    }
    KVPOLICY_CATCH_ALL {
      abandon();
      KVPOLICY_RETHROW;
    }
    begun_ = false;
    for (const NewToken& token : result.tokens) text_.push_back(token.token);
    ending_ = result.ending;
    note(verification, result.tokens.size());
    return result;
  }
  /// Undoes `begin` if the call could not be read. Does nothing if no step has begun.
  void abandon() noexcept {
    if (std::exchange(begun_, false)) take_back(seen_);
  }

  // ---- state

  /// The prompt and all tokens after it.
  [[nodiscard]] std::span<const int> text() const { return text_; }
  [[nodiscard]] Ending ending() const { return ending_; }
  /// Allows a text that has ended to continue, after a stop token, say.
  void reopen() { ending_ = Ending::open; }
  [[nodiscard]] const LevelStatistics& statistics() const { return statistics_; }
  [[nodiscard]] DraftType& draft() { return draft_; }
  [[nodiscard]] const DraftType& draft() const { return draft_; }
  /// Draft tokens that the next step will request.
  [[nodiscard]] std::size_t length() const { return length_.length(); }
  /// Rows are committed whenever this divides their number; 0: once they are max_rollback rows old.
  [[nodiscard]] std::size_t commit_every() const { return *options_.commit_every; }
  /// How often ChunkRetrieval heads refreshed their selection since the prompt.
  [[nodiscard]] std::size_t refreshes() const { return refreshes_; }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  [[nodiscard]] static DraftLengthConfig length_config(const SpeculationOptions& options) {
    DraftLengthConfig config;
    config.max_length = most_guesses(options);
    config.first = options.length;
    if (!options.adapt) config.fixed = options.length;
    return config;
  }
  [[nodiscard]] static std::size_t most_guesses(const SpeculationOptions& options) {
    return options.adapt ? std::max(options.length, options.max_length) : options.length;
  }
  [[nodiscard]] std::size_t rollback() const {
    if constexpr (requires { cache_->options().max_rollback; }) return cache_->options().max_rollback;
    return unlimited;
  }
  [[nodiscard]] bool changes_rows() const {
    if constexpr (commits && requires { cache_->commit_changes_rows(); }) {
      return cache_->commit_changes_rows();
    }
    return false;
  }
  [[nodiscard]] std::size_t capacity() const {
    if constexpr (requires { cache_->options().max_tokens; }) {
      if (cache_->options().max_tokens > 0) return cache_->options().max_tokens;
    }
    return unlimited;
  }
  void check_tokens(std::span<const int> tokens) const {
    for (const int token : tokens) {
      detail::check_token("SpeculativeDecoder", token, model_->vocabulary());
    }
  }
  void read_all_but_last(const std::function<void(std::size_t, std::size_t)>& progress = {}) {
    const std::size_t first = cache_->tokens();
    // Fails if a failed call committed rows, or if other code wrote to the cache.
    require<RollbackError>(first == 0 || first < text_.size(), "SpeculativeDecoder: the cache has read ",
                           first, " tokens, must be fewer than the ", text_.size(), " of the text");
    while (cache_->tokens() + 1 < text_.size()) {
      const std::size_t done = cache_->tokens();
      const std::size_t count = std::min(options_.prompt_chunk, text_.size() - 1 - done);
      KVPOLICY_TRY {
        (void)model_->read(
            *cache_, {.tokens = std::span<const int>{text_}.subspan(done, count), .logits = LogitsOf::none});
      }
      KVPOLICY_CATCH_ALL {
        take_back(done);
        KVPOLICY_RETHROW;
      }
      if (progress) progress(done + count - first, text_.size() - 1 - first);
    }
  }
  // Takes rows back after a call that failed, perhaps between two layers. If that is impossible because
  // rows were committed, the next call throws.
  void take_back(std::size_t tokens) noexcept {
    KVPOLICY_TRY { cache_->truncate(tokens); }
    KVPOLICY_CATCH(const Error&) {}
  }

  // May run out of memory, so it must be called before the text changes.
  void observe(const Verification& verification) {
    verify_seconds_ = seconds_since(verify_start_);
    // The cost model describes chains, not trees.
    if (!is_chain(guesses_)) return;
    length_.observe({.drafted = guesses_.size(),
                     .accepted = verification.path.size(),
                     .draft_seconds = draft_seconds_,
                     .verify_seconds = verify_seconds_});
  }

  void note(const Verification& verification, std::size_t tokens) {
    ++statistics_.verifications;
    statistics_.draft_tokens += guesses_.size();
    statistics_.positions += verification.positions;
    statistics_.accepted += verification.path.size();
    statistics_.tokens += tokens;
    statistics_.draft_seconds += draft_seconds_;
    statistics_.verify_seconds += verify_seconds_;
    commit_due_ = commit_every() > 0 && (text_.size() - 1) % commit_every() == 0;
    if (refresh_due_ || unselected_) {
      if (!unselected_) ++refreshes_;
      refresh_due_ = unselected_ = false;
      chosen_at_ = text_.size();
      recent_positions_ = recent_accepted_ = 0.0;
    }
    // An exponential average over about the last ten steps.
    recent_positions_ = 0.9 * recent_positions_ + static_cast<double>(verification.positions);
    recent_accepted_ = 0.9 * recent_accepted_ + static_cast<double>(verification.path.size());
    const std::size_t since = text_.size() - chosen_at_;
    const RefreshRule& rule = options_.refresh_selection;
    const bool poor = since >= rule.min_tokens && recent_positions_ > 0.0 &&
                      recent_accepted_ < rule.below_acceptance * recent_positions_;
    refresh_due_ = (rule.every > 0 && since >= rule.every) || poor;
  }

  static constexpr std::size_t unlimited = static_cast<std::size_t>(-1);
  static constexpr bool commits = requires(Cache& cache) { cache.commit(); };

  Model* model_;
  Cache* cache_;
  DraftType draft_;
  SpeculationOptions options_;
  Random random_;
  DraftLength length_;
  std::vector<int> text_;
  Ending ending_ = Ending::open;
  LevelStatistics statistics_;
  // The current step.
  DraftTokens guesses_;
  PendingCall pending_;
  std::size_t seen_ = 0;  // tokens in the cache before the step
  bool begun_ = false;
  double draft_seconds_ = 0.0;
  double verify_seconds_ = 0.0;
  Clock::time_point verify_start_ = {};
  bool commit_due_ = false;
  // How the selection is refreshed.
  bool unselected_ = true;    // there is no selection yet by the latest prompt
  bool refresh_due_ = false;  // by RefreshRule
  std::size_t chosen_at_ = 0;
  std::size_t refreshes_ = 0;
  double recent_positions_ = 0.0;
  double recent_accepted_ = 0.0;
};

}  // namespace kvpolicy
