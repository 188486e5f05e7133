// SPDX-License-Identifier: Apache-2.0
//
// A Llama in which gates mix full and streaming attention in each head, and the gradient of a loss
// of its last hidden rows with respect to the gates. DuoAttention (Xiao et al., arXiv:2410.10819,
// 2.2) trains this. A gate a belongs to a KV head and applies to all query heads of its group:
//
//   out = a * full + (1 - a) * streaming
//
// The backward pass computes gradients of activations only; weights do not change.
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

/// Which run supplies `full`.
enum class Mixing : std::uint8_t {
  /// The unmodified model's run of the same text, at the same layer; it carries no gradient. This
  /// is what the published code does: a layer sees the unmodified model's retrieval however many
  /// gates of lower layers are closed.
  full_of_unmodified,
  /// The mixed run itself: both branches read the same queries, keys and values, and both carry
  /// gradients. This is the paper's formula taken literally.
  full_of_mixed
};

/// An AttendFn of masked_attention with a mask for each layer and KV head, narrowed where a layer
/// of the model has a sliding window. `masks` must outlive it.
[[nodiscard]] AttendFn attend_masked(const LlamaConfig& config, const HeadTable<AttentionMask>& masks);

/// The mask narrowed to a layer's sliding window, if it has one.
[[nodiscard]] AttentionMask limited(AttentionMask mask, const LlamaConfig& config, std::size_t layer);

/// Works on one text at a time: call `read`, then `mix` and `gradient` once for each set of gates.
/// The model must outlive it. It uses several threads itself but must not be shared between
/// threads; results do not depend on the number of threads.
///
/// Layers store the numbers that the backward pass needs as long as `stored_bytes` suffice. The others
/// store only their inputs and are computed a second time on the way back, with the same results.
class GatedLlama {
 public:
  static constexpr std::size_t default_stored_bytes = std::size_t{3} << 30;

  /// @throws ConfigError for a mask under which a query sees no row
  GatedLlama(const Llama& model, AttentionMask streaming, Mixing mixing = Mixing::full_of_unmodified,
             std::size_t stored_bytes = default_stored_bytes);

  /// Runs the unmodified model and returns its rows after the final norm, [tokens, hidden].
  /// @throws ShapeError as Llama::forward
  const std::vector<float>& read(std::span<const int> tokens);

  /// Runs the mixed model on the text that was read last and returns its rows after the final norm.
  /// @throws ShapeError unless there is a gate for each layer and KV head; ConfigError before
  /// `read`
  const std::vector<float>& mix(const HeadGates& gates);

  /// The derivative of a loss with respect to each gate, from its derivative `dhidden` with respect
  /// to the rows that `mix` returned last. @throws ShapeError for another size; ConfigError before
  /// `mix`
  [[nodiscard]] HeadGates gradient(std::span<const float> dhidden);

  [[nodiscard]] std::size_t tokens() const { return tokens_.size(); }

 private:
  /// The numbers of one layer that the backward pass needs besides the layer's input.
  struct LayerRun {
    std::vector<float> q, k, v;           // rotated rows
    std::vector<float> plain_q, plain_k;  // rows before their norm, where the model has one
    std::vector<float> streaming;         // [tokens, q_heads, head_dim]
    std::vector<float> full;              // the same, only for full_of_mixed
    AttentionRecord streaming_record, full_record;
    std::vector<float> middle, gate, up;  // the stream between attention and MLP; SwiGLU's factors
  };

  void forward_layer(std::size_t layer, const Rotation& rotation, std::vector<float>& x, LayerRun& run) const;
  void back_mlp(std::size_t layer, const LayerRun& run, std::vector<float>& dx) const;
  void back_attention(std::size_t layer, const LayerRun& run, const Rotation& rotation,
                      std::vector<float>& dx, HeadGates& dgates) const;
  /// The results of full attention that a layer mixes.
  [[nodiscard]] const std::vector<float>& full_of(std::size_t layer, const LayerRun& run) const {
    return mixing_ == Mixing::full_of_mixed ? run.full : unmodified_[layer];
  }
  /// How many layers may store their runs for a text of this length.
  [[nodiscard]] std::size_t stored_layers() const;
  [[nodiscard]] std::vector<AttentionMask> masks(std::size_t layer, AttentionMask mask) const;
  template <class T>
  [[nodiscard]] TensorView<T> as_queries(T* data) const;
  template <class T>
  [[nodiscard]] TensorView<T> as_keys(T* data) const;
  [[nodiscard]] Rotation rotation() const;

  const Llama* model_;
  AttentionMask streaming_;
  Mixing mixing_;
  std::size_t stored_bytes_;
  std::vector<float> frequencies_;
  std::vector<int> tokens_;
  std::vector<std::vector<float>> unmodified_;  // each layer's attention in the unmodified run
  std::vector<float> unmodified_hidden_;
  HeadGates gates_;
  std::vector<std::vector<float>> inputs_;  // of each layer, [tokens, hidden]
  std::vector<LayerRun> layers_;            // of the last layers, as many as are stored
  std::vector<float> last_;                 // the stream after the last layer
  std::vector<float> hidden_;               // the same after the final norm; empty before a mixed run
};

}  // namespace kvpolicy::reference
