// SPDX-License-Identifier: Apache-2.0
//
// The reference Llama as kvpolicy::LanguageModel, for speculative decoding over KvCache:
//
//   reference::LlamaReader target{model};
//   SpeculativeDecoder decoder{target, cache, draft, options};
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// What one sequence of several has read.
struct BatchedRead {
  std::vector<float> logits;  ///< [0, 1 or tokens, vocabulary], as the call asked
  std::exception_ptr error;   ///< std::bad_alloc or StorageError, if the sequence was left out
};

/// What steps several caches at once.
template <class Cache>
struct BatchOf {
  using type =
      Batch<typename Cache::element_type, std::remove_cvref_t<decltype(std::declval<Cache&>().engine())>>;
};

/// Reads over caches of the model's `shape()`. `Model` is a Llama, or one rank's part of it, whose caches have that
/// rank's heads (parallel/parallel_llama.hpp). The model must outlive it. Several threads may use one reader, each with
/// caches of its own.
template <class Model>
class ModelReader {
 public:
  explicit ModelReader(const Model& model) : model_{&model} {}

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

  /// The same for several calls at once: each layer's products are computed once for the tokens of all, and its
  /// attention in one call of the first cache's engine (Batch).
  /// @throws as `read`; a sequence that cannot get its memory throws for all
  template <class Cache>
  [[nodiscard]] std::vector<std::vector<float>> read_batch(std::span<const BatchCall<Cache>> calls) const {
    if (calls.empty()) return {};
    std::vector<int> tokens;
    std::vector<std::size_t> positions;
    for (const auto& [cache, call] : calls) {
      require_ready(*model_, *cache);
      const auto own = call.positions(cache->tokens());
      tokens.insert(tokens.end(), call.tokens.begin(), call.tokens.end());
      positions.insert(positions.end(), own.begin(), own.end());
    }
    std::vector<BatchSequence<Cache>> sequences;
    std::vector<std::int32_t> indptr{0};
    bool fit = true;
    for (const auto& [cache, call] : calls) {
      sequences.push_back({cache, call.attend});
      indptr.push_back(indptr.back() + static_cast<std::int32_t>(call.tokens.size()));
      fit = fit && call.tokens.size() <= cache->options().max_append;
    }
    typename BatchOf<Cache>::type batch{calls.front().cache->engine()};
    const auto attend_all = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                                TensorView<const float> v, TensorView<float> out) {
      if constexpr (!is_appendable<Cache>) {
        for (const LeftOut& one :
             batch.step(layer, std::span<const BatchSequence<Cache>>{sequences}, indptr, q, k, v, out))
          std::rethrow_exception(one.error);
        return;
      } else {
        if (k.heads == 0) return;  // of a rank
        // A call of more rows than can be appended at once is a step of its own.
        for (std::size_t i = 0; !fit && i < calls.size(); ++i) {
          const auto first = static_cast<std::size_t>(indptr[i]);
          const std::size_t count = calls[i].call.tokens.size();
          attend(*calls[i].cache, layer, q.slice(first, count), k.slice(first, count), v.slice(first, count),
                 out.slice(first, count), calls[i].call.attend);
        }
        if (!fit) return;
        for (const LeftOut& one : batch.append(layer, sequences, indptr, k, v))
          std::rethrow_exception(one.error);
        for (const LeftOut& one : batch.attend(layer, sequences, indptr, q, out))
          std::rethrow_exception(one.error);
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

  /// Reads the tokens of many sequences, of any number each: a prompt's part beside decoding ones. Keys and values are
  /// rounded to the cache's element type before queries read them. A sequence that gets no memory is left out from
  /// there on, and its cache is of no more use; all others go on.
  /// @throws as `read`, with no cache changed if it is for want of a right call
  template <class Cache>
  [[nodiscard]] std::vector<BatchedRead> read_each(std::span<const BatchCall<Cache>> calls) const {
    using E = typename Cache::element_type;
    if (calls.empty()) return {};
    std::vector<int> tokens;
    std::vector<std::size_t> positions;
    std::vector<std::size_t> rows;  // whose logits are wanted
    std::vector<BatchSequence<Cache>> sequences;
    std::vector<std::int32_t> indptr{0};
    for (const auto& [cache, call] : calls) {
      require_ready(*model_, *cache);
      const auto own = call.positions(cache->tokens());
      tokens.insert(tokens.end(), call.tokens.begin(), call.tokens.end());
      positions.insert(positions.end(), own.begin(), own.end());
      sequences.push_back({cache, call.attend});
      indptr.push_back(static_cast<std::int32_t>(tokens.size()));
      const std::size_t wanted = wanted_of(call);
      for (std::size_t i = tokens.size() - wanted; i < tokens.size(); ++i) rows.push_back(i);
    }
    std::vector<BatchedRead> result(calls.size());
    typename BatchOf<Cache>::type batch{calls.front().cache->engine()};
    std::vector<E> rounded;
    const auto round = [&](const TensorView<const float>& from, std::size_t at) {
      const std::size_t numbers = from.tokens * from.heads * from.head_dim;
      std::transform(from.data, from.data + numbers, rounded.begin() + static_cast<std::ptrdiff_t>(at),
                     [](float x) { return E{x}; });
      return TensorView<const E>{rounded.data() + at, from.tokens, from.heads, from.head_dim};
    };
    const auto attend_all = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                                TensorView<const float> v, TensorView<float> out) {
      if constexpr (is_appendable<Cache>) {
        if (k.heads == 0) return;  // of a rank
      }
      check_range<E>("k", ConstTensor{k});
      check_range<E>("v", ConstTensor{v});
      const std::size_t numbers = k.tokens * k.heads * k.head_dim;
      rounded.resize(2 * numbers);
      const auto keys = round(k, 0);
      const auto values = round(v, numbers);
      // Over ranks a sequence that was left out goes on with the others, for its messages are theirs.
      const bool all_go_on =
          !is_appendable<Cache> ||
          std::ranges::none_of(result, [](const BatchedRead& one) { return one.error != nullptr; });
      if (all_go_on) {
        for (const LeftOut& one : batch.step(layer, std::span<const BatchSequence<Cache>>{sequences}, indptr,
                                             q, keys, values, out)) {
          if (result[one.sequence].error == nullptr) result[one.sequence].error = one.error;
        }
        return;
      }
      // Somebody was left out in an earlier layer: the others one by one.
      for (std::size_t i = 0; i < calls.size(); ++i) {
        if (result[i].error != nullptr) continue;
        const auto first = static_cast<std::size_t>(indptr[i]);
        const std::size_t count = calls[i].call.tokens.size();
        try {
          calls[i].cache->step(layer, q.slice(first, count), keys.slice(first, count),
                               values.slice(first, count), out.slice(first, count), calls[i].call.attend);
        } catch (const std::bad_alloc&) {
          result[i].error = std::current_exception();
        } catch (const StorageError&) {
          result[i].error = std::current_exception();
        }
      }
    };
    const auto logits = model_->forward(tokens, positions, attend_all, std::span<const std::size_t>{rows});
    // A sequence that one rank left out is of no use on the others.
    if constexpr (requires(std::vector<bool>& left_out) { model_->any_of_ranks(left_out); }) {
      std::vector<bool> left_out;
      for (const BatchedRead& one : result) left_out.push_back(one.error != nullptr);
      model_->any_of_ranks(left_out);
      for (std::size_t i = 0; i < result.size(); ++i) {
        if (left_out[i] && result[i].error == nullptr)
          result[i].error = std::make_exception_ptr(std::bad_alloc{});
      }
    }
    auto next = logits.begin();
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const auto end = next + static_cast<std::ptrdiff_t>(wanted_of(calls[i].call) * vocabulary());
      if (result[i].error == nullptr) result[i].logits.assign(next, end);
      next = end;
    }
    return result;
  }

 private:
  // RankCache is not: its `step` reads rows as they are stored, and sends one message.
  template <class Cache>
  static constexpr bool is_appendable =
      requires(Cache& cache, TensorView<const float> rows) { cache.append(std::size_t{0}, rows, rows); };

  [[nodiscard]] static std::size_t wanted_of(const ModelCall& call) {
    if (call.logits == LogitsOf::all) return call.tokens.size();
    return call.logits == LogitsOf::last ? std::min<std::size_t>(call.tokens.size(), 1) : 0;
  }

  template <class Cache>
  static void attend(Cache& cache, std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                     TensorView<const float> v, TensorView<float> out, const AttendOptions& options) {
    if constexpr (is_appendable<Cache>) {
      if (k.heads == 0) return;  // of a rank
      if (q.tokens <= cache.options().max_append) {
        cache.append(layer, k, v, options);
        cache.attend(layer, q, out, options);
        return;
      }
    }
    step_layer(cache, layer, q, k, v, out, options);
  }

  const Model* model_;
};

using LlamaReader = ModelReader<Llama>;

}  // namespace kvpolicy::reference
