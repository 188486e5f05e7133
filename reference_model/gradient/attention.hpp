// SPDX-License-Identifier: Apache-2.0
//
// Attention of a whole text at once, forward and backward, in blocks of queries and matrix
// products. A block only reads the rows that its mask allows, so with sinks and a window the work
// grows linearly with the text and not with its square.
//
// This is not an engine of a cache: it reads no segments and stores nothing. The library's engines
// have no backward pass.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/tensor_view.hpp>

namespace kvpolicy::reference {

/// Which rows the query at position t sees: the first `sinks` and the latest `recent` ones, its own
/// included, and none after its own. `recent` may be 0 if there are sinks.
struct AttentionMask {
  static constexpr std::size_t all = std::numeric_limits<std::size_t>::max();

  std::size_t sinks = 0;
  std::size_t recent = all;

  friend bool operator==(const AttentionMask&, const AttentionMask&) = default;
};

/// The numbers of the forward pass that the backward pass needs.
struct AttentionRecord {
  std::vector<float> log_sums;  ///< [q_heads, tokens]: log of the sum of exponentials
};

/// Computes out [tokens, q_heads, head_dim] = softmax(q kᵀ / sqrt(head_dim)) v for a text from its
/// first token on, with a mask for each KV head. Heads are distributed over threads; results do not
/// depend on their number.
/// @throws ShapeError for sizes that do not fit, ConfigError for a mask under which a query sees no
/// row
void masked_attention(TensorView<const float> q, TensorView<const float> k, TensorView<const float> v,
                      std::span<const AttentionMask> masks, TensorView<float> out,
                      AttentionRecord* record = nullptr);

/// Adds the gradients that follow from `dout` to dq, dk and dv; `out` and `record` are those of
/// masked_attention. KV heads and blocks of queries whose dout is all 0 cost nothing.
/// @throws as masked_attention
void masked_attention_back(TensorView<const float> q, TensorView<const float> k, TensorView<const float> v,
                           std::span<const AttentionMask> masks, TensorView<const float> out,
                           const AttentionRecord& record, TensorView<const float> dout, TensorView<float> dq,
                           TensorView<float> dk, TensorView<float> dv);

}  // namespace kvpolicy::reference
