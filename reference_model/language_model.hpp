// SPDX-License-Identifier: Apache-2.0
//
// The reference Llama as kvpolicy::LanguageModel, for speculative decoding over KvCache:
//
//   reference::LlamaReader target{model};
//   SpeculativeDecoder decoder{target, cache, draft, options};
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// The model must outlive it. Several threads may use one reader, each with caches of its own.
class LlamaReader {
 public:
  explicit LlamaReader(const Llama& model) : model_{&model} {}

  [[nodiscard]] std::size_t vocabulary() const { return model_->config().vocabulary; }

  /// Queries read the call's own rows rounded to the cache's element type. @throws as reference::step
  template <class Cache>
  [[nodiscard]] std::vector<float> read(Cache& cache, const ModelCall& call) const {
    require_ready(*model_, cache);
    return model_->forward(
        call.tokens, call.positions(cache.tokens()),
        [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v,
            TensorView<float> out) { attend(cache, layer, q, k, v, out, call.attend); },
        call.logits);
  }

  /// The same for several calls at once; each layer's products are computed once for the tokens of
  /// all.
  template <class Cache>
  [[nodiscard]] std::vector<std::vector<float>> read_batch(
      std::span<const BatchCall<Cache>> calls) const {
    std::vector<int> tokens;
    std::vector<std::size_t> positions;
    for (const auto& [cache, call] : calls) {
      require_ready(*model_, *cache);
      const auto own = call.positions(cache->tokens());
      tokens.insert(tokens.end(), call.tokens.begin(), call.tokens.end());
      positions.insert(positions.end(), own.begin(), own.end());
    }
    const auto attend_all = [&](std::size_t layer, TensorView<const float> q,
                                TensorView<const float> k, TensorView<const float> v,
                                TensorView<float> out) {
      std::size_t first = 0;
      for (const auto& [cache, call] : calls) {
        const std::size_t count = call.tokens.size();
        attend(*cache, layer, q.slice(first, count), k.slice(first, count), v.slice(first, count),
               out.slice(first, count), call.attend);
        first += count;
      }
    };
    const auto logits = model_->forward(tokens, positions, attend_all, LogitsOf::all);
    std::vector<std::vector<float>> result;
    std::size_t first = 0;
    for (const auto& [cache, call] : calls) {
      const std::size_t count = call.tokens.size();
      const std::size_t wanted = call.logits == LogitsOf::all    ? count
                                 : call.logits == LogitsOf::last ? std::min<std::size_t>(count, 1)
                                                                 : 0;
      const auto end = logits.begin() + static_cast<std::ptrdiff_t>((first + count) * vocabulary());
      result.emplace_back(end - static_cast<std::ptrdiff_t>(wanted * vocabulary()), end);
      first += count;
    }
    return result;
  }

 private:
  template <class Cache>
  static void attend(Cache& cache, std::size_t layer, TensorView<const float> q,
                     TensorView<const float> k, TensorView<const float> v, TensorView<float> out,
                     const AttendOptions& options) {
    if (q.tokens > cache.options().max_append) return step_layer(cache, layer, q, k, v, out, options);
    cache.append(layer, k, v, options);
    cache.attend(layer, q, out, options);
  }

  const Llama* model_;
};

}  // namespace kvpolicy::reference
