// SPDX-License-Identifier: Apache-2.0
//
// A model with a cache of its own as a draft: a smaller one over a streaming cache (TriForce,
// arXiv:2404.11912: 16 sinks, 256 rows in all), or the target itself over one, which is the naive
// way that the paper compares with.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/language_model.hpp>

namespace kvpolicy {

/// The tokens that a draft's cache has read, kept in step with a text that others decide.
template <class Model, TentativeCache Cache>
  requires LanguageModel<Model, Cache>
class TextReader {
 public:
  /// Reads at most `chunk` tokens in one call. `read`: the tokens that the cache has read already.
  TextReader(Model& model, Cache& cache, std::size_t chunk, std::span<const int> read)
      : model_{&model}, cache_{&cache}, chunk_{chunk}, read_{read.begin(), read.end()} {
    require(chunk > 0, "TextReader: chunk is 0, must be at least 1");
    require(cache.tokens() == read.size(), "TextReader: the cache has read ", cache.tokens(),
            " tokens, but ", read.size(), " are named: a draft must know which it has read");
  }

  [[nodiscard]] Model& model() const { return *model_; }
  [[nodiscard]] Cache& cache() const { return *cache_; }
  [[nodiscard]] std::span<const int> tokens() const { return read_; }

  /// Takes back what is not in `text`, then reads the rest of it; the logits of its last token.
  /// @throws what model and cache throw; the next call mends what that left.
  std::vector<float> follow(std::span<const int> text) {
    // The last token is always read, for its logits.
    keep(std::min(agreeing(text), text.size() - 1));
    std::vector<float> logits;
    while (read_.size() < text.size()) {
      const std::size_t count = std::min(chunk_, text.size() - read_.size());
      const bool last = read_.size() + count == text.size();
      logits = read(text.subspan(read_.size(), count), last);
    }
    return logits;
  }
  /// Reads one more token; its logits.
  std::vector<float> read(int token) { return read(std::array{token}, true); }

  /// How many tokens of `text` it has read.
  [[nodiscard]] std::size_t agreeing(std::span<const int> text) const {
    return static_cast<std::size_t>(std::ranges::mismatch(read_, text).in1 - read_.begin());
  }
  void keep(std::size_t tokens) {
    // Also what a failed call left behind read_.
    if (cache_->tokens() != tokens || read_.size() != tokens || unsettled_) cache_->truncate(tokens);
    read_.resize(tokens);
    unsettled_ = false;
  }
  /// Tokens whose rows the cache has accepted as a path of a tree.
  void note(std::span<const int> tokens) { read_.insert(read_.end(), tokens.begin(), tokens.end()); }

 private:
  std::vector<float> read(std::span<const int> tokens, bool wanted) {
    read_.reserve(read_.size() + tokens.size());
    unsettled_ = true;
    auto logits = model_->read(
        *cache_, {.tokens = tokens, .logits = wanted ? LogitsOf::last : LogitsOf::none});
    if (wanted) detail::check_logits(logits, 1, model_->vocabulary());
    unsettled_ = false;
    note(tokens);
    return logits;
  }

  Model* model_;
  Cache* cache_;
  std::size_t chunk_;
  std::vector<int> read_;
  bool unsettled_ = false;  // a call failed, perhaps between two layers
};

/// How a draft model reads.
struct ModelDraftOptions {
  /// Tokens of a text read at once. A call that fails half-way through the layers can be taken back
  /// by the next one if these are no more than max_rollback; else all calls throw RollbackError.
  std::size_t chunk = 512;
};

/// A Draft: a model guesses, most often a smaller one.
/// Model and cache must outlive it; nothing else may write the cache. Not synchronised.
template <class Model, TentativeCache Cache>
  requires LanguageModel<Model, Cache>
class ModelDraft {
 public:
  using Options = ModelDraftOptions;

  /// The cache has read `read`, and can take back at least as many rows as guesses will be asked for.
  /// @throws ConfigError
  ModelDraft(Model& model, Cache& cache, const Options& options = {}, std::span<const int> read = {})
      : reader_{model, cache, options.chunk, read} {}

  [[nodiscard]] std::size_t vocabulary() const { return reader_.model().vocabulary(); }
  [[nodiscard]] const Cache& cache() const { return reader_.cache(); }

  void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions& sampling,
               Random& random, Guesses& guesses) {
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
