// SPDX-License-Identifier: Apache-2.0
//
// A Llama whose heads are mixed of full and streaming attention by gates, and how a loss of its last
// hidden rows changes with the gates: what DuoAttention (Xiao et al., arXiv:2410.10819, 2.2) trains.
// A gate a belongs to a KV head and serves all query heads of its group:
//
//   out = a * full + (1 - a) * streaming
//
// The way back goes through activations alone; weights stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvpolicy/plan/duo_gates.hpp>
#include <kvpolicy/plan/head_table.hpp>
#include <reference_model/gradient/attention.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/operations.hpp>

namespace kvpolicy::reference {

/// Where `full` comes from.
enum class Mixing : std::uint8_t {
  /// The unmodified model's run of the same text, at the same layer; it carries no gradient. The
  /// published code's way: a layer sees the unmodified model's retrieval however far the layers
  /// below have been closed.
  full_of_unmodified,
  /// The mixed run itself: both branches read the same queries, keys and values, and both carry
  /// gradients. The paper's formula read as it stands.
  full_of_mixed
};

/// An AttendFn of masked_attention, a mask for each layer and KV head; narrower where a layer of the
/// model has a sliding window. `masks` must outlive it.
[[nodiscard]] AttendFn attend_masked(const LlamaConfig& config,
                                     const HeadTable<AttentionMask>& masks);

/// The mask narrowed to a layer's sliding window, if it has one.
[[nodiscard]] AttentionMask limited(AttentionMask mask, const LlamaConfig& config,
                                    std::size_t layer);

/// One text at a time: `read`, then `mix` and `gradient` as often as there are gates to try. The
/// model must outlive it. Uses several threads by itself and may not be shared by them; results do
/// not depend on their number.
class GatedLlama {
 public:
  /// @throws ConfigError for a mask that shows a query nothing.
  GatedLlama(const Llama& model, AttentionMask streaming,
             Mixing mixing = Mixing::full_of_unmodified);

  /// Runs the unmodified model. Returns its rows behind the final norm, [tokens, hidden].
  /// @throws ShapeError as Llama::forward
  const std::vector<float>& read(std::span<const int> tokens);

  /// Runs the mixed model over the text read last; the same rows of it.
  /// @throws ShapeError unless there is a gate for each layer and KV head; ConfigError without a text
  const std::vector<float>& mix(const HeadGates& gates);

  /// How a loss changes with each gate, from how it changes with each of the rows that `mix` gave
  /// last. @throws ShapeError for another number of them; ConfigError without a mixed run
  [[nodiscard]] HeadGates gradient(std::span<const float> dhidden);

  [[nodiscard]] std::size_t tokens() const { return tokens_.size(); }

 private:
  /// What one layer's way there leaves for the way back.
  struct LayerRun {
    std::vector<float> x, q, k, v;         // what came in; rotated rows
    std::vector<float> streaming;          // [tokens, q_heads, head_dim]
    std::vector<float> full;               // the same
    AttentionRecord streaming_record, full_record;
    std::vector<float> middle, gate, up;   // the stream between attention and MLP; of SwiGLU
  };

  void forward_layer(std::size_t layer, const Rotation& rotation, std::vector<float>& x);
  void back_mlp(std::size_t layer, std::vector<float>& dx) const;
  void back_attention(std::size_t layer, const Rotation& rotation, std::vector<float>& dx,
                      HeadGates& dgates) const;
  [[nodiscard]] std::vector<AttentionMask> masks(std::size_t layer, AttentionMask mask) const;
  template <class T>
  [[nodiscard]] TensorView<T> as_queries(T* data) const;
  template <class T>
  [[nodiscard]] TensorView<T> as_keys(T* data) const;
  [[nodiscard]] Rotation rotation() const;

  const Llama* model_;
  AttentionMask streaming_;
  Mixing mixing_;
  std::vector<float> frequencies_;
  std::vector<int> tokens_;
  std::vector<std::vector<float>> unmodified_;  // each layer's attention in the unmodified run
  std::vector<float> unmodified_hidden_;
  HeadGates gates_;
  std::vector<LayerRun> layers_;
  std::vector<float> last_;    // the stream behind the last layer
  std::vector<float> hidden_;  // and the final norm; empty before a mixed run
};

}  // namespace kvpolicy::reference
