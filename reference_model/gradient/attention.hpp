// SPDX-License-Identifier: Apache-2.0
//
// Attention of a whole text at once, forward and back, in blocks of queries and matrix products. A
// block meets only the rows that its mask lets it see: with sinks and a window the work grows with
// the text, not with its square.
//
// Not an engine of a cache: it reads no segments and keeps nothing. The library's engines, which do,
// have no way back.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/tensor_view.hpp>

namespace kvpolicy::reference {

/// Which rows the query at position t sees: the first `sinks`, and the latest `recent`, its own
/// included; none behind its own. `recent` may be 0 if there are sinks.
struct AttentionMask {
  static constexpr std::size_t all = std::numeric_limits<std::size_t>::max();

  std::size_t sinks = 0;
  std::size_t recent = all;

  friend bool operator==(const AttentionMask&, const AttentionMask&) = default;
};

/// What the way back needs of the way there.
struct AttentionRecord {
  std::vector<float> log_sums;  ///< [q_heads, tokens]: log of the sum of exponentials
};

/// out [tokens, q_heads, head_dim] = softmax(q kᵀ / sqrt(head_dim)) v of a text from its first token
/// on; a mask for each KV head. Heads go to several threads; the numbers do not depend on how many.
/// @throws ShapeError for sizes that do not fit, ConfigError for a mask that shows a query nothing.
void masked_attention(TensorView<const float> q, TensorView<const float> k,
                      TensorView<const float> v, std::span<const AttentionMask> masks,
                      TensorView<float> out, AttentionRecord* record = nullptr);

/// Adds to dq, dk and dv what `dout` makes of them; `out` and `record` as masked_attention left
/// them. KV heads whose dout is 0 throughout cost nothing, nor do blocks of queries. @throws as there
void masked_attention_back(TensorView<const float> q, TensorView<const float> k,
                           TensorView<const float> v, std::span<const AttentionMask> masks,
                           TensorView<const float> out, const AttentionRecord& record,
                           TensorView<const float> dout, TensorView<float> dq,
                           TensorView<float> dk, TensorView<float> dv);

}  // namespace kvpolicy::reference
