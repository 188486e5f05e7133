// SPDX-License-Identifier: Apache-2.0
//
// A draft that is a model with its own cache: a smaller model over a streaming cache (TriForce,
// arXiv:2404.11912: 16 sinks, 256 rows in total), or the target itself over such a cache, which is the
// paper's naive baseline.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/language_model.hpp>

namespace kvpolicy {

/// Keeps a draft's cache up to date with a text that other code changes.
template <class Model, TentativeCache Cache>
  requires LanguageModel<Model, Cache>
class TextReader {
 public:
  /// Reads at most `chunk` tokens in one call. `read` are the tokens that the cache has read already.
  TextReader(Model& model, Cache& cache, std::size_t chunk, std::span<const int> read)
      : model_{&model}, cache_{&cache}, chunk_{chunk}, read_{read.begin(), read.end()} {
    require(chunk > 0, "TextReader: chunk is 0, must be at least 1");
    require(cache.tokens() == read.size(), "TextReader: the cache has read ", cache.tokens(), " tokens, but ",
            read.size(), " are named: a draft must know which it has read");
  }

  [[nodiscard]] Model& model() const { return *model_; }
  [[nodiscard]] Cache& cache() const { return *cache_; }
  [[nodiscard]] std::span<const int> tokens() const { return read_; }

  /// Takes back tokens that are not in `text`, then reads the rest of it. Returns the logits of its
  /// last token.
  /// @throws what model and cache throw; the next call repairs the state after an error
  std::vector<float> follow(std::span<const int> text) {
    // The last token is always read again, for its logits.
    keep(std::min(agreeing(text), text.size() - 1));
    std::vector<float> logits;
    while (read_.size() < text.size()) {
      const std::size_t count = std::min(chunk_, text.size() - read_.size());
      const bool last = read_.size() + count == text.size();
      logits = read(text.subspan(read_.size(), count), last);
    }
    return logits;
  }
  /// Reads one more token and returns its logits.
  std::vector<float> read(int token) { return read(std::array{token}, true); }

  /// How many of the first tokens of `text` the cache has read.
  [[nodiscard]] std::size_t agreeing(std::span<const int> text) const {
    return static_cast<std::size_t>(std::ranges::mismatch(read_, text).in1 - read_.begin());
  }
  void keep(std::size_t tokens) {
    // Also drops rows that a failed call left after those in read_.
    if (cache_->tokens() != tokens || read_.size() != tokens || interrupted_) cache_->truncate(tokens);
    read_.resize(tokens);
    interrupted_ = false;
  }
  /// Records tokens whose rows the cache accepted as a path of a tree.
  void note(std::span<const int> tokens) { read_.insert(read_.end(), tokens.begin(), tokens.end()); }

 private:
  std::vector<float> read(std::span<const int> tokens, bool wanted) {
    read_.reserve(read_.size() + tokens.size());
    interrupted_ = true;
    auto logits =
        model_->read(*cache_, {.tokens = tokens, .logits = wanted ? LogitsOf::last : LogitsOf::none});
    if (wanted) detail::check_logits(logits, 1, model_->vocabulary());
    interrupted_ = false;
    note(tokens);
    return logits;
  }

  Model* model_;
  Cache* cache_;
  std::size_t chunk_;
  std::vector<int> read_;
  bool interrupted_ = false;  // a call failed, perhaps between two layers
};

/// Options of a draft that is a model.
struct ModelDraftOptions {
  /// Tokens of a text that are read in one call. If a call fails half-way through the layers, the next one
  /// can take its rows back only if `chunk` is at most max_rollback; otherwise all later calls throw
  /// RollbackError.
  std::size_t chunk = 512;
};

/// A Draft whose tokens come from a model, usually a smaller one. Model and cache must outlive it, and
/// nothing else may write to the cache. Not synchronised.
template <class Model, TentativeCache Cache>
  requires LanguageModel<Model, Cache>
class ModelDraft {
 public:
  using Options = ModelDraftOptions;

  /// `read` are the tokens that the cache has read. The cache must be able to take back as many rows as
  /// draft tokens will be requested.
  /// @throws ConfigError
  ModelDraft(Model& model, Cache& cache, const Options& options = {}, std::span<const int> read = {})
      : reader_{model, cache, options.chunk, read} {}

  [[nodiscard]] std::size_t vocabulary() const { return reader_.model().vocabulary(); }
  [[nodiscard]] const Cache& cache() const { return reader_.cache(); }

  void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions& sampling,
               Random& random, DraftTokens& guesses) {
    guesses.clear();
    if (max_guesses == 0) return;
    std::vector<float> logits = reader_.follow(text);
    for (;;) {
      Distribution from = distribution_of(logits, sampling);
      const int token = from.draw(random.uniform());
      const std::size_t parent = guesses.empty() ? TokenTree::text : guesses.size() - 1;
      guesses.push_back({token, std::move(from), parent});
      if (guesses.size() == max_guesses) return;
      logits = reader_.read(token);
    }
  }

 private:
  TextReader<Model, Cache> reader_;
};

}  // namespace kvpolicy
