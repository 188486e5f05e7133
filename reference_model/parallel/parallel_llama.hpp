// SPDX-License-Identifier: Apache-2.0
//
// The reference Llama over ranks (tensor parallelism, Megatron-LM, arXiv:1909.08053): a rank has the rows of the query,
// key and value matrices of the heads that it holds, and the columns of the output matrix that read them; of the gate,
// up and down matrices the neurons that are its own. Two sums over ranks a layer put the residual stream together.
// Norms, embedding and output layer are on every rank.
//
//   auto shards = balance(plan, tokens, {.ranks = ranks.size()});
//   ParallelLlama model{Llama::load(folder), shards, ranks};
//   RankCache<float> cache{plan, shards, ranks};
//   auto logits = model.forward(tokens, cache);
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <kvpolicy/plan/shards.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/parallel/communicator.hpp>

namespace kvpolicy::reference {

/// Tells models from others: sizes, norms, biases, rotary settings, and some rows of each matrix.
[[nodiscard]] std::uint64_t digest_of(const Llama& model);

class ParallelLlama {
 public:
  /// Copies this rank's part of the model's weights, as float. Shards are those of `RankCache`.
  /// @throws ConfigError if they are of another shape or number of ranks, on every rank if one has other shards or
  /// weights; CommunicationError
  ParallelLlama(const Llama& model, const Shards& shards, Communicator& ranks);

  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }
  /// Bytes of the weights of this rank's layers.
  [[nodiscard]] std::size_t layer_bytes() const noexcept;

  /// Logits as Llama::forward, the same on every rank, of tokens that follow those in `cache`.
  /// @throws as Llama::forward and RankCache::step
  template <class Cache>
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens, Cache& cache,
                                           LogitsOf logits = LogitsOf::last) {
    cache.require_even();
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v,
                            TensorView<float> out) { cache.step(layer, q, k, v, out); };
    return run(tokens, cache.tokens(), attend, logits);
  }

 private:
  [[nodiscard]] std::vector<float> run(std::span<const int> tokens, std::size_t first_position,
                                       const AttendFn& attend, LogitsOf logits);
  void check_same(const Llama& model, const Shards& shards);

  Communicator* ranks_;
  LlamaConfig config_;
  Linear embedding_, head_;
  std::vector<float> norm_, frequencies_;
  std::vector<LlamaLayer> layers_;  // this rank's part
};

}  // namespace kvpolicy::reference
