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
//
// `ModelReader<ParallelLlama>` (language_model.hpp) reads many texts at once, and for speculative decoding.
#pragma once

#include <cstddef>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/value_outputs.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/parallel/communicator.hpp>

namespace kvpolicy::reference {

/// Checks that every rank has the same model and version of the library: of the model sizes, norms, biases, rotary
/// settings, and some rows of each matrix. @throws ConfigError, on every rank; CommunicationError
void require_same_model(Communicator& ranks, const Llama& model);
/// The same of what a call reads. @throws the same
void require_same_tokens(Communicator& ranks, std::span<const int> tokens,
                         std::span<const std::size_t> positions, std::span<const std::size_t> logits_of);

/// What a call reads is compared over ranks before anything changes, so that ranks that disagree about tokens end with
/// an error that says so; and what fails on one rank fails on all, at the end of the call. Not synchronised.
class ParallelLlama {
 public:
  /// Copies this rank's part of the model's weights, as float. Shards are those of the caches.
  /// @throws ConfigError if they are of another shape or number of ranks, on every rank if one has other shards or
  /// weights, or another version of the library; CommunicationError
  ParallelLlama(const Llama& model, const Shards& shards, Communicator& ranks);

  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }
  /// Of this rank's caches (`shape_of_rank`).
  [[nodiscard]] const ModelShape& shape() const noexcept { return shape_; }
  /// Whether a head is cut by rows on any rank, so that attention takes messages, which RankCache sends.
  [[nodiscard]] bool has_cut_heads() const noexcept { return has_cut_heads_; }
  [[nodiscard]] Communicator& ranks() const noexcept { return *ranks_; }
  /// Bytes of the weights of this rank's layers.
  [[nodiscard]] std::size_t layer_bytes() const noexcept;
  /// As Llama::value_outputs, of this rank's heads. @throws ShapeError for a weight that is not finite, std::bad_alloc
  [[nodiscard]] const ValueOutputs* value_outputs();

  /// Logits as Llama::forward, the same on every rank, of tokens that follow those in `cache`.
  /// @throws as Llama::forward and RankCache::step
  template <class Cache>
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens, Cache& cache,
                                           LogitsOf logits = LogitsOf::last) const {
    cache.require_even();
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v,
                            TensorView<float> out) { cache.step(layer, q, k, v, out); };
    std::vector<std::size_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), cache.tokens());
    return forward(tokens, positions, attend, logits);
  }
  /// As Llama::forward; `attend` is given this rank's heads.
  /// @throws ConfigError, on every rank, if ranks do not have the same tokens, positions and rows; what `attend`
  /// throws, on other ranks as RankError; CommunicationError, after which the model is of no further use
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens,
                                           std::span<const std::size_t> positions, const AttendFn& attend,
                                           LogitsOf logits = LogitsOf::last) const;
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens,
                                           std::span<const std::size_t> positions, const AttendFn& attend,
                                           std::span<const std::size_t> rows) const;

  /// For each of some questions, whether it is true on any rank. @throws CommunicationError
  void any_of_ranks(std::vector<bool>& own) const { reference::any_of_ranks(*ranks_, own); }

 private:
  void check_same(const Llama& model, const Shards& shards);
  void add_over_ranks(const Linear& linear, const float* input, std::vector<float>& part,
                      std::vector<float>& x) const;

  Communicator* ranks_;
  LlamaConfig config_;
  ModelShape shape_;
  bool has_cut_heads_ = false;
  Linear embedding_, head_;
  std::vector<float> norm_, frequencies_;
  std::vector<LlamaLayer> layers_;  // this rank's part
  std::optional<ValueOutputs> value_outputs_;
};

}  // namespace kvpolicy::reference
