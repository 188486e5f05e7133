// SPDX-License-Identifier: Apache-2.0
//
// A Llama's forward pass in plain loops, for tests of equality to the last bit: no sum depends on how many
// tokens a call reads, unlike the products of a BLAS. The same holds for the attention of ScalarEngine, so
// over that engine reading tokens together and one by one gives the same bits. It shares only the weights
// with the reference model.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// A LanguageModel without biases, windows and tied embeddings, for calls of at most the cache's `max_append`
/// tokens, or longer ones such as prompts.
class RowByRow {
 public:
  explicit RowByRow(const Llama& model)
      : model_{&model}, frequencies_{inverse_frequencies(model.config().rotary, model.config().head_dim)} {}

  [[nodiscard]] const Llama& llama() const { return *model_; }
  [[nodiscard]] std::size_t vocabulary() const { return model_->config().vocabulary; }

  template <class Cache>
  [[nodiscard]] std::vector<float> read(Cache& cache, const ModelCall& call) const {
    const LlamaConfig& c = model_->config();
    const std::size_t rows = call.tokens.size();
    const std::vector<std::size_t> positions = call.positions(cache.tokens());
    std::vector<std::vector<float>> x(rows);
    for (std::size_t row = 0; row < rows; ++row) {
      x[row].resize(c.hidden);
      model_->weights().embedding.weight.copy_rows(static_cast<std::size_t>(call.tokens[row]), 1,
                                                   x[row].data());
    }
    std::vector<float> q, k, v, out(rows * c.q_heads * c.head_dim);
    for (std::size_t l = 0; l < c.layers; ++l) {
      const LlamaLayer& layer = model_->weights().layers[l];
      q.clear(), k.clear(), v.clear();
      for (std::size_t row = 0; row < rows; ++row) {
        const auto normed = normalised(x[row], layer.attention_norm);
        join(q, rotated(product(layer.q, normed), positions[row]));
        join(k, rotated(product(layer.k, normed), positions[row]));
        join(v, product(layer.v, normed));
      }
      attend(cache, l, {q.data(), rows, c.q_heads, c.head_dim}, {k.data(), rows, c.kv_heads, c.head_dim},
             {v.data(), rows, c.kv_heads, c.head_dim}, {out.data(), rows, c.q_heads, c.head_dim},
             call.attend);
      for (std::size_t row = 0; row < rows; ++row) {
        add(x[row],
            product(layer.o, std::span{out}.subspan(row * c.q_heads * c.head_dim, c.q_heads * c.head_dim)));
        const auto normed = normalised(x[row], layer.mlp_norm);
        std::vector<float> gate = product(layer.gate, normed);
        const std::vector<float> up = product(layer.up, normed);
        for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0F + std::exp(-gate[i]));
        add(x[row], product(layer.down, gate));
      }
    }
    std::vector<float> logits;
    const std::size_t wanted = call.logits == LogitsOf::all ? rows : call.logits == LogitsOf::last ? 1 : 0;
    for (std::size_t row = rows - wanted; row < rows; ++row) {
      join(logits, product(model_->weights().head, normalised(x[row], model_->weights().norm)));
    }
    return logits;
  }

 private:
  template <class Cache>
  static void attend(Cache& cache, std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                     TensorView<const float> v, TensorView<float> out, const AttendOptions& options) {
    if (q.tokens > cache.options().max_append) return cache.step(layer, q, k, v, out, options);
    cache.append(layer, k, v, options);
    cache.attend(layer, q, out, options);
  }
  [[nodiscard]] std::vector<float> normalised(std::span<const float> x, std::span<const float> weight) const {
    float squares = 0.0F;
    for (const float value : x) squares += value * value;
    const float scale = 1.0F / std::sqrt(squares / static_cast<float>(x.size()) + model_->config().norm_eps);
    std::vector<float> result(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) result[i] = x[i] * scale * weight[i];
    return result;
  }
  [[nodiscard]] static std::vector<float> product(const Linear& layer, std::span<const float> x) {
    std::vector<float> result(layer.outputs());
    std::vector<float> weight(layer.inputs());
    for (std::size_t o = 0; o < layer.outputs(); ++o) {
      layer.weight.copy_rows(o, 1, weight.data());
      for (std::size_t i = 0; i < layer.inputs(); ++i) result[o] += weight[i] * x[i];
    }
    return result;
  }
  [[nodiscard]] std::vector<float> rotated(std::vector<float> x, std::size_t position) const {
    const std::size_t pairs = frequencies_.size();
    for (std::size_t at = 0; at < x.size(); at += 2 * pairs) {
      for (std::size_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(position) * static_cast<double>(frequencies_[i]);
        const auto c = static_cast<float>(std::cos(angle));
        const auto s = static_cast<float>(std::sin(angle));
        const float a = x[at + i];
        const float b = x[at + i + pairs];
        x[at + i] = a * c - b * s;
        x[at + i + pairs] = b * c + a * s;
      }
    }
    return x;
  }
  static void add(std::vector<float>& x, std::span<const float> more) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += more[i];
  }
  static void join(std::vector<float>& x, std::span<const float> more) {
    x.insert(x.end(), more.begin(), more.end());
  }

  const Llama* model_;
  std::vector<float> frequencies_;
};

}  // namespace kvpolicy::reference
