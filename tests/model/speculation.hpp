// SPDX-License-Identifier: Apache-2.0
//
// Shared by tests of speculative decoding over real models and caches: tiny Llamas, plain greedy decoding
// that shares no code with speculation, a model that checks the logits of every verification, and one type
// for drafts of all kinds.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <reference_model/language_model.hpp>
#include <reference_model/llama.hpp>

#include "model/row_by_row.hpp"
#include "support/sanitizer.hpp"

namespace kvpolicy::reference {

// Sanitizers take ten times as long, so each test then makes only one of every `runs_share` runs.
#if defined(KVPOLICY_TEST_ASAN) || defined(KVPOLICY_TEST_TSAN)
inline constexpr std::size_t runs_share = 6;
#else
inline constexpr std::size_t runs_share = 1;
#endif

// ---- models

struct TinyShape {
  std::size_t vocabulary = 32;
  std::size_t hidden = 32;
  std::size_t layers = 2;
  std::size_t q_heads = 4;
  std::size_t kv_heads = 2;
  std::size_t head_dim = 64;
};

/// Random weights whose size lets attention decide: the likeliest token depends on the text, also on tokens
/// far back.
inline Llama tiny_llama(const TinyShape& shape, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::normal_distribution<float> normal;
  const auto linear = [&](std::size_t inputs, std::size_t outputs, float deviation) {
    std::vector<float> weights(inputs * outputs);
    const float scale = deviation / std::sqrt(static_cast<float>(inputs));
    for (float& weight : weights) weight = scale * normal(random);
    return Linear{inputs, outputs, std::move(weights), {}};
  };
  LlamaConfig config;
  config.vocabulary = shape.vocabulary;
  config.hidden = shape.hidden;
  config.intermediate = shape.hidden + 16;
  config.layers = shape.layers;
  config.q_heads = shape.q_heads;
  config.kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.max_positions = 4096;
  config.windows.assign(shape.layers, 0);
  LlamaWeights weights;
  weights.embedding = linear(shape.hidden, shape.vocabulary, std::sqrt(static_cast<float>(shape.hidden)));
  for (std::size_t i = 0; i < shape.layers; ++i) {
    LlamaLayer layer;
    layer.attention_norm.assign(shape.hidden, 1.0F);
    layer.mlp_norm.assign(shape.hidden, 1.0F);
    layer.q = linear(shape.hidden, shape.q_heads * shape.head_dim, 1.6F);
    layer.k = linear(shape.hidden, shape.kv_heads * shape.head_dim, 1.6F);
    layer.v = linear(shape.hidden, shape.kv_heads * shape.head_dim, 1.0F);
    layer.o = linear(shape.q_heads * shape.head_dim, shape.hidden, 2.0F);
    layer.gate = linear(shape.hidden, config.intermediate, 1.0F);
    layer.up = linear(shape.hidden, config.intermediate, 1.0F);
    layer.down = linear(config.intermediate, shape.hidden, 1.0F);
    weights.layers.push_back(std::move(layer));
  }
  weights.norm.assign(shape.hidden, 1.0F);
  weights.head = linear(shape.hidden, shape.vocabulary, 3.0F);
  return Llama{config, std::move(weights)};
}

/// The same model with an error of about `share` in every weight: a draft that often agrees.
inline Llama with_noise(const Llama& model, float share, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::normal_distribution<float> normal;
  LlamaWeights weights = model.weights();
  const auto disturb = [&](Linear& layer) {
    layer.weight = layer.weight.changed([&](std::span<float> numbers) {
      for (float& weight : numbers) weight *= 1.0F + share * normal(random);
    });
  };
  disturb(weights.head);
  for (LlamaLayer& layer : weights.layers) {
    for (Linear* part : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      disturb(*part);
    }
  }
  return Llama{model.config(), std::move(weights)};
}

inline std::vector<int> random_text(std::size_t vocabulary, std::size_t tokens, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::vector<int> text(tokens);
  for (int& token : text) token = static_cast<int>(random() % vocabulary);
  return text;
}

// ---- plain decoding

struct PlainText {
  std::vector<int> text;  ///< prompt and continuation
  std::size_t prompt = 0;
  std::vector<float> logits;  ///< [text - prompt, vocabulary]; row i is that of text[prompt + i]
  /// The margin of the likeliest token before the next, for each token after the prompt.
  std::vector<float> margins;

  [[nodiscard]] std::span<const int> continuation() const { return std::span{text}.subspan(prompt); }
  /// Number of tokens of the continuation before the first whose margin is at most `tie`.
  [[nodiscard]] std::size_t tokens_before_tie(float tie) const {
    const auto at = std::ranges::find_if(margins, [&](float margin) { return !(margin > tie); });
    return static_cast<std::size_t>(at - margins.begin());
  }
};

/// Reads tokens that follow those in the cache, and returns the logits of the last. In short calls queries
/// read rows as they are stored, as in LlamaReader.
template <class Cache>
std::vector<float> read_plainly(const Llama& model, Cache& cache, std::span<const int> tokens) {
  const bool halves = tokens.size() <= cache.options().max_append;
  return model.forward(tokens, cache.tokens(),
                       [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                           TensorView<const float> v, TensorView<float> out) {
                         if (!halves) return step_layer(cache, layer, q, k, v, out);
                         cache.append(layer, k, v);
                         cache.attend(layer, q, out);
                       });
}

template <class Cache>
std::vector<float> read_plainly(const RowByRow& model, Cache& cache, std::span<const int> tokens) {
  return model.read(cache, {.tokens = tokens});
}

/// Reads the prompt except its last token in calls of `chunk`, then `tokens` greedy tokens one by one.
/// `commit_every`: the cache commits after the prompt and at each multiple of so many tokens.
template <class Model, class Cache>
PlainText decode_plainly(const Model& model, Cache& cache, std::span<const int> prompt, std::size_t chunk,
                         std::size_t tokens, std::size_t commit_every = 0) {
  PlainText result{{prompt.begin(), prompt.end()}, prompt.size(), {}, {}};
  for (std::size_t done = 0; done + 1 < prompt.size();) {
    const std::size_t count = std::min(chunk, prompt.size() - 1 - done);
    (void)read_plainly(model, cache, prompt.subspan(done, count));
    done += count;
  }
  if (commit_every > 0) cache.commit();
  for (std::size_t i = 0; i < tokens; ++i) {
    if (commit_every > 0 && cache.tokens() % commit_every == 0) cache.commit();
    const std::array last{result.text.back()};
    const std::vector<float> logits = read_plainly(model, cache, last);
    std::size_t best = 0;
    for (std::size_t token = 1; token < logits.size(); ++token) {
      if (logits[token] > logits[best]) best = token;
    }
    float next = -std::numeric_limits<float>::infinity();
    for (std::size_t token = 0; token < logits.size(); ++token) {
      if (token != best) next = std::max(next, logits[token]);
    }
    result.margins.push_back(logits[best] - next);
    result.logits.insert(result.logits.end(), logits.begin(), logits.end());
    result.text.push_back(static_cast<int>(best));
  }
  return result;
}

// ---- a model that checks

/// Compares the logits of a verification after every token of the plain text with those of plain decoding.
/// Only reads of all rows are compared, because reads of selected rows give other logits.
template <class Reader>
class Watched {
 public:
  Watched(const Llama& model, const PlainText& plain) : reader_{model}, plain_{&plain} {}

  [[nodiscard]] std::size_t vocabulary() const { return reader_.vocabulary(); }

  template <class Cache>
  std::vector<float> read(Cache& cache, const ModelCall& call) {
    const std::size_t seen = cache.tokens();
    auto logits = reader_.read(cache, call);
    compare(seen, call, logits);
    return logits;
  }
  /// The largest difference so far; infinite after a NaN.
  [[nodiscard]] float deviation() const { return deviation_; }
  [[nodiscard]] std::size_t compared() const { return compared_; }

 private:
  void compare(std::size_t seen, const ModelCall& call, std::span<const float> logits) {
    if (call.logits != LogitsOf::all || call.attend.read != Read::all) return;
    const TokenTree* tree = call.attend.tree;
    std::vector<bool> agrees(call.tokens.size());
    for (std::size_t i = 0; i < call.tokens.size(); ++i) {
      std::size_t position = seen + i;
      bool parent = i == 0 || agrees[i - 1];
      if (tree != nullptr) {
        position = seen + tree->depth(i);
        parent = tree->parent(i) == TokenTree::text || agrees[tree->parent(i)];
      }
      if (position >= plain_->text.size()) continue;
      agrees[i] = parent && call.tokens[i] == plain_->text[position];
      if (!agrees[i] || position + 1 < plain_->prompt || position + 1 >= plain_->text.size()) continue;
      const std::size_t row = (position + 1 - plain_->prompt) * vocabulary();
      for (std::size_t token = 0; token < vocabulary(); ++token) {
        const float error = std::abs(logits[i * vocabulary() + token] - plain_->logits[row + token]);
        deviation_ = error <= std::numeric_limits<float>::max() ? std::max(deviation_, error)
                                                                : std::numeric_limits<float>::infinity();
      }
      ++compared_;
    }
  }

  Reader reader_;
  const PlainText* plain_;
  float deviation_ = 0.0F;
  std::size_t compared_ = 0;
};

using WatchedReader = Watched<LlamaReader>;

// ---- drafts of all kinds

/// Any draft; copies share it.
class AnyDraft {
 public:
  AnyDraft() : AnyDraft(NoDraft{}) {}
  template <class D>
    requires(!std::same_as<D, AnyDraft> && Draft<D>)
  explicit AnyDraft(D draft) : vocabulary_{draft.vocabulary()} {
    const auto held = std::make_shared<D>(std::move(draft));
    choose_anew_ = [held] { kvpolicy::refresh_selection(*held); };
    propose_ = [held](std::span<const int> text, std::size_t most, const SamplingOptions& sampling,
                      Random& random,
                      DraftTokens& guesses) { held->propose(text, most, sampling, random, guesses); };
  }
  [[nodiscard]] std::size_t vocabulary() const { return vocabulary_; }
  void refresh_selection() { choose_anew_(); }
  void propose(std::span<const int> text, std::size_t most, const SamplingOptions& sampling, Random& random,
               DraftTokens& guesses) {
    propose_(text, most, sampling, random, guesses);
  }

 private:
  std::size_t vocabulary_;
  std::function<void()> choose_anew_;
  std::function<void(std::span<const int>, std::size_t, const SamplingOptions&, Random&, DraftTokens&)>
      propose_;
};

}  // namespace kvpolicy::reference
