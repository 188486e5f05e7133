// SPDX-License-Identifier: Apache-2.0
//
// Speculative decoding needs one thing from an engine: a model that reads tokens over a cache and returns
// logits of the next token. Your model needs two functions; kvpolicy's caches fit without changes.
//
//     struct MyModel {
//       std::size_t vocabulary() const;
//       std::vector<float> read(MyCache& cache, const ModelCall& call);   // logits
//     };
//
// reference_model/language_model.hpp has one for the reference Llama.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/token_tree.hpp>

namespace kvpolicy {

/// The tokens of a call that need logits. `none` saves the product with the vocabulary matrix, for all
/// calls of a prompt but the last.
enum class LogitsOf : std::uint8_t { none, last, all };

/// Tokens to read after those that a cache has read.
struct ModelCall {
  std::span<const int> tokens;
  LogitsOf logits = LogitsOf::last;
  /// How the layers attend: which rows they read, whether and by which query ChunkRetrieval heads refresh
  /// their selection, and, for a tree of draft tokens, which token continues which.
  AttendOptions attend = {};

  /// Text position of each token if the cache has read `seen` tokens; nodes of the tree count as tokens.
  [[nodiscard]] std::vector<std::size_t> positions(std::size_t seen) const {
    std::vector<std::size_t> result(tokens.size());
    const TokenTree* tree = attend.tree;
    const std::size_t first = tree == nullptr ? 0 : tree->size() - tokens.size();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      result[i] = tree == nullptr ? seen + i : seen - first + tree->depth(first + i);
    }
    return result;
  }
};

/// A cache whose latest rows can be taken back, such as KvCache and gpu::KvCache with `max_rollback`.
/// These members are used if the cache has them: `options()` with `max_rollback` and `max_tokens`,
/// `commit()`, and `commit_changes_rows()`, which says whether a commit can change how rows read.
template <class C>
concept TentativeCache =
    requires(C& cache, const C& seen, std::size_t tokens, std::span<const std::size_t> path) {
      { seen.tokens() } -> std::convertible_to<std::size_t>;
      cache.truncate(tokens);
      cache.accept(path);
    };

/// Reads tokens over a cache and returns logits [0, 1 or tokens, vocabulary]. If speculative decoding must
/// equal plain decoding bit for bit in the storage's type, all rows must be read as they are stored, those
/// of the call included (KvCache: `append`, then `attend`).
template <class M, class Cache>
concept LanguageModel = requires(M& model, Cache& cache, const ModelCall& call) {
  { model.vocabulary() } -> std::convertible_to<std::size_t>;
  { model.read(cache, call) } -> std::convertible_to<std::vector<float>>;
};

namespace detail {

/// Checks the number of logits.
/// @throws ShapeError unless a model of `vocabulary` tokens gave the logits of `tokens` tokens
inline void check_logits(std::span<const float> logits, std::size_t tokens, std::size_t vocabulary) {
  require<ShapeError>(logits.size() == tokens * vocabulary, "LanguageModel: gave ", logits.size(),
                      " logits for ", tokens, " tokens and a vocabulary of ", vocabulary, ", must give ",
                      tokens * vocabulary);
}

/// Checks a token. @throws ShapeError for a token outside the vocabulary
inline void check_token(const char* who, int token, std::size_t vocabulary) {
  require<ShapeError>(token >= 0 && static_cast<std::size_t>(token) < vocabulary, who, ": token ", token,
                      " is outside the vocabulary of ", vocabulary);
}

}  // namespace detail

/// One of several calls that a model can serve together, each over its own cache.
template <class Cache>
struct BatchCall {
  Cache* cache;
  ModelCall call;
};

/// A model that reads its weights once for several sequences; returns the logits of each call.
template <class M, class Cache>
concept BatchedLanguageModel =
    LanguageModel<M, Cache> && requires(M& model, std::span<const BatchCall<Cache>> calls) {
      { model.read_batch(calls) } -> std::convertible_to<std::vector<std::vector<float>>>;
    };

}  // namespace kvpolicy
