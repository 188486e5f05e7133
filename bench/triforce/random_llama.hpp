// SPDX-License-Identifier: Apache-2.0
//
// A Llama of a given shape with random weights: it takes the time of a trained one, and its text is
// meaningless.
#pragma once

#include <cmath>
#include <cstddef>
#include <random>
#include <utility>
#include <vector>

#include <reference_model/llama.hpp>

namespace kvpolicy::bench {

struct LlamaSize {
  std::size_t layers, hidden, intermediate, q_heads, kv_heads, head_dim, vocabulary;
};

inline reference::Linear random_linear(std::size_t inputs, std::size_t outputs, std::mt19937& random) {
  std::vector<float> weights(inputs * outputs);
  const float scale = std::sqrt(3.0F / static_cast<float>(inputs));
  for (float& weight : weights) weight = (static_cast<float>(random()) * 0x1p-31F - 1.0F) * scale;
  return reference::Linear{inputs, outputs, std::move(weights), {}};
}

inline reference::Llama random_llama(const LlamaSize& size, unsigned seed) {
  std::mt19937 random{seed};
  reference::LlamaConfig config;
  config.vocabulary = size.vocabulary;
  config.hidden = size.hidden;
  config.intermediate = size.intermediate;
  config.layers = size.layers;
  config.q_heads = size.q_heads;
  config.kv_heads = size.kv_heads;
  config.head_dim = size.head_dim;
  config.max_positions = std::size_t{1} << 20;
  config.windows.assign(size.layers, 0);
  const std::size_t q = size.q_heads * size.head_dim;
  const std::size_t kv = size.kv_heads * size.head_dim;
  reference::LlamaWeights weights;
  weights.embedding = random_linear(size.hidden, size.vocabulary, random);
  weights.head = random_linear(size.hidden, size.vocabulary, random);
  weights.norm.assign(size.hidden, 1.0F);
  for (std::size_t layer = 0; layer < size.layers; ++layer) {
    weights.layers.push_back({.attention_norm = std::vector<float>(size.hidden, 1.0F),
                              .q = random_linear(size.hidden, q, random),
                              .k = random_linear(size.hidden, kv, random),
                              .v = random_linear(size.hidden, kv, random),
                              .o = random_linear(q, size.hidden, random),
                              .q_norm = {},
                              .k_norm = {},
                              .mlp_norm = std::vector<float>(size.hidden, 1.0F),
                              .gate = random_linear(size.hidden, size.intermediate, random),
                              .up = random_linear(size.hidden, size.intermediate, random),
                              .down = random_linear(size.intermediate, size.hidden, random)});
  }
  return {config, std::move(weights)};
}

inline std::size_t weight_bytes(const reference::Llama& model) { return model.weight_bytes(); }

}  // namespace kvpolicy::bench
