// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of the Llama family on a CPU, with activations in float: RMSNorm, rotary positions, grouped-query
// attention, SwiGLU. It holds weights and no cache: attention is a callback, so that one model runs
// over every plan, engine and test oracle. run.hpp connects it to a KvCache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/core/value_outputs.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <reference_model/config.hpp>
#include <reference_model/linear.hpp>

namespace kvpolicy::reference {

struct LlamaLayer {
  std::vector<float> attention_norm;  // [hidden]
  Linear q, k, v, o;
  std::vector<float> q_norm, k_norm;  // [head_dim], the same for all heads; empty without qk_norm
  std::vector<float> mlp_norm;        // [hidden]
  Linear gate, up, down;
};

struct LlamaWeights {
  Linear embedding;  // [vocabulary, hidden]; also the output layer where embeddings are tied
  std::vector<LlamaLayer> layers;
  std::vector<float> norm;  // [hidden]
  Linear head;              // empty where embeddings are tied
};

/// Calls visit(layer) for every Linear of a model's weights: embedding, head, and seven in each layer.
template <class Weights, class Visit>
void for_each_linear(Weights& weights, Visit visit) {
  visit(weights.embedding);
  visit(weights.head);
  for (auto& layer : weights.layers) {
    for (auto* part : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
      visit(*part);
  }
}

/// One layer's attention: q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim],
/// rotated to their text positions; the result is written to out, shaped like q. Called once per
/// layer in ascending order; forward() passes on what it throws.
using AttendFn = std::function<void(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                                    TensorView<const float> v, TensorView<float> out)>;

/// Normalises each head's row of q [rows, heads, head_dim] and k in place, where the model does that. There are as many
/// heads as the layer's matrices have.
void normalise_heads(const LlamaConfig& config, const LlamaLayer& layer, std::size_t rows, float* q,
                     float* k);

using kvpolicy::LogitsOf;

/// How a checkpoint's weights are kept in memory, and multiplied.
struct LoadOptions {
  /// The format of all matrices; none: each as it is stored, in the mapped file, without a copy. Another
  /// format is a copy in memory; the blocks of a quantised GGUF file are decoded to bfloat16 if none is
  /// given. Norms and biases are always float.
  std::optional<WeightFormat> weights = {};
  bool round_activations = false;  ///< as in Linear
};

class Llama {
 public:
  /// Loads an unmodified Hugging Face folder or GGUF file. Files must not be overwritten or shortened
  /// while the model lives (mapped_file.hpp).
  /// @throws FormatError for a damaged file or one that does not fit config.json, ConfigError for a
  /// model that this class cannot compute
  [[nodiscard]] static Llama load(const std::string& path, const LoadOptions& options = {});

  /// @throws ConfigError, ShapeError if the weights do not have the config's shapes.
  Llama(LlamaConfig config, LlamaWeights weights);

  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }
  /// That a cache of the model has.
  [[nodiscard]] ModelShape shape() const { return config_.shape(); }
  [[nodiscard]] const LlamaWeights& weights() const noexcept { return weights_; }
  [[nodiscard]] std::size_t parameters() const noexcept;
  /// Bytes of all weights, mapped or in memory of their own.
  [[nodiscard]] std::size_t weight_bytes() const noexcept;

  /// Logits [0, 1 or tokens, vocabulary] of tokens at positions first_position, first_position + 1,
  /// ... Several threads may call it at once, each with its own `attend`.
  /// @throws ShapeError for no tokens, or one outside the vocabulary
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens, std::size_t first_position,
                                           const AttendFn& attend, LogitsOf logits = LogitsOf::last) const;

  /// The same for tokens at any positions, as in a token tree.
  /// @throws ShapeError also if there are not as many positions as tokens
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens,
                                           std::span<const std::size_t> positions, const AttendFn& attend,
                                           LogitsOf logits = LogitsOf::last) const;

  /// Logits [rows, vocabulary] of some of the tokens, by their indices.
  /// @throws ShapeError also for a row that is none of the tokens
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens,
                                           std::span<const std::size_t> positions, const AttendFn& attend,
                                           std::span<const std::size_t> rows) const;

  /// The input of the output layer, [tokens, hidden] after the final norm, for a text from its
  /// first token on. @throws as forward
  [[nodiscard]] std::vector<float> hidden(std::span<const int> tokens, const AttendFn& attend) const;

  /// The output layer: the embedding where they are tied.
  [[nodiscard]] const Linear& head() const noexcept {
    return config_.tied_embeddings ? weights_.embedding : weights_.head;
  }

  /// The output projections of the layers, for caches whose heads weigh rows by them (`CacheOptions::value_outputs`):
  /// views of these weights, made and checked by the first call. They live as long as this model or a copy of it. Null
  /// if a layer's are int8, which are no floating-point numbers to view. Several threads may call it at once.
  /// @throws ShapeError for a weight that is not finite, std::bad_alloc
  [[nodiscard]] const ValueOutputs* value_outputs() const;

 private:
  struct Projections;

  void check_weights() const;
  /// The residual stream after the last layer, [tokens, hidden].
  [[nodiscard]] std::vector<float> run(std::span<const int> tokens, std::span<const std::size_t> positions,
                                       const AttendFn& attend) const;

  LlamaConfig config_;
  LlamaWeights weights_;
  std::vector<float> frequencies_;  // [head_dim / 2]
  std::shared_ptr<Projections> projections_;
};

}  // namespace kvpolicy::reference
