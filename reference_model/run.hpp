// SPDX-License-Identifier: Apache-2.0
//
// Runs a Llama over a KvCache of any plan and engine:
//
//   auto plan = ...;                                 // a HeadPlan of model.config().shape()
//   reference::limit_windows(plan, model.config());  // sliding-window layers, if there are any
//   KvCache cache{plan};
//   auto logits = reference::prefill(model, cache, prompt, 512);
//   int token = sampler.next(logits);
//   logits = reference::step(model, cache, std::array{token});
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// Limits the heads of layers that have a sliding window in the model to that window.
template <class Plan>
void limit_windows(Plan& plan, const LlamaConfig& config) {
  for (std::size_t layer = 0; layer < config.layers; ++layer) {
    if (config.windows[layer] > 0) plan.limit_window(layer, config.windows[layer]);
  }
}

/// `Model` is a Llama, or one rank's part of it (parallel/parallel_llama.hpp).
/// @throws ShapeError if the cache's plan is of another shape; RollbackError if an earlier step
/// failed between two layers and was not truncated
template <class Model, class Cache>
void require_ready(const Model& model, const Cache& cache) {
  const ModelShape shape = model.shape();
  const ModelShape planned = [&] {
    if constexpr (requires { cache.shape(); }) return cache.shape();  // of a rank
    if constexpr (requires { cache.plan(); }) return cache.plan().shape();
  }();
  if constexpr (requires { model.has_cut_heads(); } && !requires { Cache::merges_cut_heads; }) {
    require(!model.has_cut_heads(), "heads of the model are cut by rows, which needs a RankCache");
  }
  require<ShapeError>(planned == shape, "the plan is for ", planned.layers, " layers of ", planned.q_heads,
                      " query and ", planned.kv_heads, " KV heads of ", planned.head_dim,
                      " channels, the model has ", shape.layers, ", ", shape.q_heads, ", ", shape.kv_heads,
                      " and ", shape.head_dim);
  const std::size_t first = cache.tokens();
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    if (shape.layer(layer).kv_heads == 0) continue;  // of a rank
    require<RollbackError>(cache.tokens(layer) == first, "layer ", layer, " of the cache has seen ",
                           cache.tokens(layer), " tokens, another only ", first,
                           ": a step failed half-way, truncate to ", first, " before the next");
  }
}

/// Whether a cache keeps its rows in another element type than the model's float.
template <class Cache>
concept RoundingCache =
    requires { typename Cache::element_type; } && !std::same_as<typename Cache::element_type, float>;

/// One layer of a step. Keys and values are rounded to the cache's element type before queries read them, so they
/// read the same numbers whether a text comes in one call or in several, and an engine multiplies a call's rows as
/// fast as cached ones. k and v are contiguous. @throws as Cache::step
template <class Cache>
void step_layer(Cache& cache, std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                TensorView<const float> v, TensorView<float> out, const AttendOptions& options = {}) {
  if constexpr (RoundingCache<Cache>) {
    using E = typename Cache::element_type;
    check_range<E>("k", ConstTensor{k});
    check_range<E>("v", ConstTensor{v});
    const std::size_t numbers = k.tokens * k.heads * k.head_dim;
    std::vector<E> rounded(2 * numbers);
    const auto round = [&](const TensorView<const float>& rows, E* to) {
      std::transform(rows.data, rows.data + numbers, to, [](float x) { return E{x}; });
      return TensorView<const E>{to, rows.tokens, rows.heads, rows.head_dim};
    };
    cache.step(layer, q, round(k, rounded.data()), round(v, rounded.data() + numbers), out, options);
  } else {
    cache.step(layer, q, k, v, out, options);
  }
}

/// Reads tokens that follow those in the cache, and returns their logits.
/// @throws as require_ready; what forward and the cache throw
template <class Cache>
std::vector<float> step(const Llama& model, Cache& cache, std::span<const int> tokens,
                        LogitsOf logits = LogitsOf::last, const AttendOptions& options = {}) {
  require_ready(model, cache);
  const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                          TensorView<const float> v,
                          TensorView<float> out) { step_layer(cache, layer, q, k, v, out, options); };
  return model.forward(tokens, cache.tokens(), attend, logits);
}

/// Is called after each chunk with the tokens done, and with the tokens in all.
using Progress = std::function<void(std::size_t done, std::size_t total)>;

/// Reads a prompt in chunks of at most `chunk` tokens and returns the logits of its last token.
/// `options` apply to every chunk. @throws ConfigError for a chunk of 0; otherwise as step
template <class Cache>
std::vector<float> prefill(const Llama& model, Cache& cache, std::span<const int> tokens, std::size_t chunk,
                           const Progress& progress = {}, const AttendOptions& options = {}) {
  require(chunk > 0, "prefill: chunk is 0, must be at least 1");
  require<ShapeError>(!tokens.empty(), "prefill: no tokens, expected at least 1");
  std::vector<float> logits;
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(chunk, tokens.size() - done);
    const bool last = done + count == tokens.size();
    logits = step(model, cache, tokens.subspan(done, count), last ? LogitsOf::last : LogitsOf::none, options);
    done += count;
    if (progress) progress(done, tokens.size());
  }
  return logits;
}

}  // namespace kvpolicy::reference
