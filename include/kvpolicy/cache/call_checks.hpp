// SPDX-License-Identifier: Apache-2.0
//
// What a cache checks of a call before it changes anything. Shapes, strides and options cost a few
// comparisons; numbers are only looked at where they are narrowed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// @throws ShapeError, as all of them.
template <class Tensor>
void check_tensor(const char* name, const Tensor& tensor, std::size_t tokens, std::size_t heads,
                  std::size_t head_dim) {
  require<ShapeError>(tensor.tokens == tokens && tensor.heads == heads && tensor.head_dim == head_dim,
                      "KvCache: ", name, " is [", tensor.tokens, ", ", tensor.heads, ", ", tensor.head_dim,
                      "], must be [", tokens, ", ", heads, ", ", head_dim, "]");
  if (tokens == 0) return;
  require<ShapeError>(tensor.data != nullptr, "KvCache: ", name, " is null");
  require<ShapeError>(
      (heads == 1 || tensor.head_stride >= head_dim) && (tokens == 1 || tensor.token_stride >= head_dim),
      "KvCache: ", name, " has a token stride of ", tensor.token_stride, " and a head stride of ",
      tensor.head_stride, " elements, must be at least head_dim = ", head_dim);
  // The place of the last number, counted from `data`, must not wrap around.
  const std::size_t room =
      std::numeric_limits<std::ptrdiff_t>::max() / (bits_of(tensor.encoding) / 8) - head_dim;
  const auto fits = [&](std::size_t steps, std::size_t stride, std::size_t space) {
    return steps == 0 || stride <= space / steps;
  };
  require<ShapeError>(fits(heads - 1, tensor.head_stride, room) &&
                          fits(tokens - 1, tensor.token_stride, room - (heads - 1) * tensor.head_stride),
                      "KvCache: ", name, " has ", tokens, " tokens and a token stride of ",
                      tensor.token_stride, ", ", heads, " heads and a head stride of ", tensor.head_stride,
                      " elements, which reach beyond all memory; must be within ", room + head_dim,
                      " elements");
}

/// Places written twice would hold one of two results.
inline void check_written_once(const MutableTensor& out) {
  if (out.tokens <= 1 || out.heads <= 1) return;
  const std::size_t token = (out.heads - 1) * out.head_stride + out.head_dim;
  const std::size_t head = (out.tokens - 1) * out.token_stride + out.head_dim;
  require<ShapeError>(out.token_stride >= token || out.head_stride >= head,
                      "KvCache: out has a token stride of ", out.token_stride, " and a head stride of ",
                      out.head_stride, " elements, which overlap; one must be at least ", token, " or ",
                      head);
}

inline void check_options(const AttendOptions& options, std::size_t tokens, std::size_t q_heads,
                          std::size_t kv_heads) {
  require<ShapeError>(options.attention_sink_bias.empty() || options.attention_sink_bias.size() == q_heads,
                      "KvCache: attention_sink_bias has ", options.attention_sink_bias.size(),
                      " numbers, must have q_heads = ", q_heads, " or none");
  require<ShapeError>(options.log_sum_exp.empty() || options.log_sum_exp.size() == tokens * q_heads,
                      "KvCache: log_sum_exp has ", options.log_sum_exp.size(),
                      " places, must have tokens x q_heads = ", tokens * q_heads, " or none");
  require<ShapeError>(!options.selection_query || *options.selection_query < tokens || tokens == 0,
                      "KvCache: selection_query is ", options.selection_query.value_or(0),
                      ", must be one of the call's ", tokens, " tokens");
  const ReadBound& bound = options.bound;
  require<ShapeError>(!is_nan(bound.epsilon) && bound.epsilon >= 0.0F && bound.epsilon <= 1.0F,
                      "KvCache: bound.epsilon is ", bound.epsilon, ", must be from 0 to 1");
  const bool bounded = options.read == Read::bounded;
  require<ShapeError>(bounded || (bound.unread.empty() && bound.rows_read.empty()),
                      "KvCache: bound.unread has ", bound.unread.size(), " and bound.rows_read ",
                      bound.rows_read.size(), " places, must have none, since the read is not Read::bounded");
  require<ShapeError>(bound.unread.empty() || bound.unread.size() == tokens * q_heads,
                      "KvCache: bound.unread has ", bound.unread.size(),
                      " places, must have tokens x q_heads = ", tokens * q_heads, " or none");
  require<ShapeError>(bound.rows_read.empty() || bound.rows_read.size() == kv_heads,
                      "KvCache: bound.rows_read has ", bound.rows_read.size(),
                      " places, must have kv_heads = ", kv_heads, " or none");
  for (const float logit : options.attention_sink_bias) {
    require<ShapeError>(!is_nan(logit), "KvCache: a sink logit is NaN, must be a number");
  }
  require<ShapeError>(is_finite(options.softcap) && options.softcap >= 0.0F, "KvCache: softcap is ",
                      options.softcap, ", must be 0 or positive");
  if (options.tree != nullptr && options.refresh_selection) {
    const std::size_t first = options.tree->size() - std::min(options.tree->size(), tokens);
    require<ShapeError>(
        options.selection_query && is_on_all_paths(*options.tree, first + *options.selection_query),
        "KvCache: refresh_selection with a tree of guesses by a query that is not on all its paths: "
        "selection_query must name one that is");
  }
  require<ShapeError>(!options.scale || is_finite(*options.scale), "KvCache: scale is ",
                      options.scale.value_or(0.0F), ", must be finite");
}

/// A finite number must stay one in the cache's own element type E.
template <Element E>
void check_range(const char* name, const ConstTensor& rows) {
  if (encoding_of<E> == Encoding::float32 || rows.encoding == encoding_of<E>) return;
  std::array<float, max_head_dim> memory;
  const std::span<float> row = std::span{memory}.first(rows.head_dim);
  for (std::size_t token = 0; token < rows.tokens; ++token) {
    for (std::size_t head = 0; head < rows.heads; ++head) {
      load_dense(rows.encoding, rows.row(token, head), row);
      for (const float number : row) {
        const auto kept = static_cast<float>(E{number});
        require<ShapeError>(is_finite(kept) || !is_finite(number), "KvCache: ", name, " holds ", number,
                            " at token ", token, ", head ", head, ", beyond the largest ",
                            name_of(encoding_of<E>), ", in which the cache keeps its rows");
      }
    }
  }
}

/// The layers of a cache, of which one that was moved from has none.
/// @throws ConfigError for such a cache
template <class Layers>
[[nodiscard]] Layers& held(Layers& layers) {
  require(!layers.empty(), "KvCache: this cache was moved from, it can only be assigned to or destroyed");
  return layers;
}

/// One head of a chunk of keys and values as a segment.
[[nodiscard]] inline Segment call_segment(const ConstTensor& k, const ConstTensor& v, std::size_t head,
                                          std::size_t position) {
  const auto plane = [&](const ConstTensor& t) {
    return Plane{.format = {.encoding = t.encoding},
                 .base = t.row(0, head),
                 .row_stride = t.token_stride * (bits_of(t.encoding) / 8)};
  };
  return {.keys = plane(k),
          .values = plane(v),
          .rows = k.tokens,
          .position = static_cast<std::int64_t>(position)};
}

}  // namespace kvpolicy
