// SPDX-License-Identifier: Apache-2.0
#include <reference_model/model_digest.hpp>

#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/state/archive.hpp>
#include <kvpolicy/state/checksum.hpp>

namespace kvpolicy::reference {

std::uint64_t digest_of(const Llama& model) {
  const LlamaConfig& c = model.config();
  const LlamaWeights& weights = model.weights();
  std::vector<std::span<const std::byte>> parts;
  std::vector<std::size_t> numbers{c.vocabulary, c.hidden,   c.intermediate,  c.layers,  c.q_heads,
                                   c.kv_heads,   c.head_dim, c.max_positions, c.qk_norm, c.tied_embeddings};
  numbers.insert(numbers.end(), c.windows.begin(), c.windows.end());
  const auto add = [&](std::span<const float> values) { parts.push_back(std::as_bytes(values)); };
  const std::vector<float> frequencies = inverse_frequencies(c.rotary, c.head_dim);
  add({&c.norm_eps, 1});
  add(frequencies);
  add(weights.norm);
  for (const LlamaLayer& layer : weights.layers) {
    for (const auto* norm : {&layer.attention_norm, &layer.q_norm, &layer.k_norm, &layer.mlp_norm})
      add(*norm);
  }
  for_each_linear(weights, [&](const Linear& linear) {
    numbers.insert(numbers.end(), {linear.outputs(), linear.inputs(), std::size_t(linear.weight.format())});
    parts.push_back(linear.weight.numbers());
    add(linear.weight.scales());
    add(linear.bias);
  });
  std::vector<std::uint64_t> digests(parts.size());
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = 0; i < parts.size(); ++i) digests[i] = checksum(parts[i]);
  return digest(numbers, digests);
}

}  // namespace kvpolicy::reference
