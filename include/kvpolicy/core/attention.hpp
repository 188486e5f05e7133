// SPDX-License-Identifier: Apache-2.0
//
// The whole interface between a cache and an attention engine: one layer's queries, each KV head's
// segments, and three operations. The scalar engine is its plain definition; cpu/ has a fast one.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/core/token_tree.hpp>

namespace kvpolicy {

/// Which rows a head that can choose shows: a ChunkRetrieval head shows its selected chunks or all
/// rows, every other head the same for both.
enum class Read : std::uint8_t { all, selected };

/// What a call of attention may ask for besides; the defaults are plain causal attention over all
/// rows.
struct AttendOptions {
  std::optional<float> scale = {};             ///< of the logits; default 1 / sqrt(head_dim)
  float softcap = 0.0F;                        ///< logit -> cap * tanh(logit / cap); 0: none
  std::span<const float> sink_logits = {};     ///< [q_heads]: a logit that weighs but has no value
  std::span<float> log_sum_exp = {};           ///< [tokens, q_heads], written where not empty
  Read read = Read::all;
  /// Selecting heads choose anew: before a `selected` read, and behind an `all` read (the end of a
  /// prompt, say), for the selected reads that follow.
  bool refresh_selection = false;
  /// By the query of which of the call's tokens, and as of that token: a rollback to before it undoes
  /// the choice. Default: the last. With a tree it must be named, and stand on all its paths.
  std::optional<std::size_t> selection_query = {};
  /// The call's tokens are the last nodes of this tree of guesses, whose earlier nodes, if any, the
  /// latest calls appended; null: they continue the text one after another. Read only during the
  /// call.
  const TokenTree* tree = nullptr;
};

/// One layer to attend. Query row i stands at text position `first_position + i`; with
/// `options.tree` it is one of the tree's last nodes, `first_position` is where the tree hangs on the
/// text, and the row stands at `first_position + depth`.
struct LayerAttention {
  ConstTensor queries;                                  ///< [tokens, q_heads, head_dim]
  MutableTensor out;                                    ///< [tokens, q_heads, head_dim]
  std::int64_t first_position = 0;
  std::span<const std::span<const Segment>> heads;      ///< [kv_heads]
  AttendOptions options;

  [[nodiscard]] std::size_t group() const { return queries.heads / heads.size(); }
  [[nodiscard]] float scale() const {
    return options.scale.value_or(1.0F / std::sqrt(static_cast<float>(queries.head_dim)));
  }
  /// The tree's node whose query is row `token`; only for calls with a tree.
  [[nodiscard]] std::size_t node(std::size_t token) const {
    return options.tree->size() - queries.tokens + token;
  }
  [[nodiscard]] std::int64_t position(std::size_t token) const {
    const std::size_t behind = options.tree == nullptr ? token : options.tree->depth(node(token));
    return first_position + static_cast<std::int64_t>(behind);
  }
  /// Whether query row `token` sees row `row` of the segment.
  [[nodiscard]] bool sees(std::size_t token, const Segment& segment, std::size_t row) const {
    return is_visible(segment.position_of(row), position(token), segment.reach) &&
           (segment.node == no_node || options.tree->sees(node(token), segment.node_of(row)));
  }
};

/// Asks how much attention each row gets: the sum over the queries of each row's probability. Text
/// only: no segment is one of a tree.
struct LayerObservation {
  ConstTensor queries;                                  ///< [tokens, q_heads, head_dim]
  std::int64_t first_position = 0;
  std::span<const std::span<const Segment>> heads;      ///< [kv_heads]; an empty one is skipped
  std::span<const std::span<float>> sums;               ///< [kv_heads] of [group, rows of the head]
  AttendOptions options;

  [[nodiscard]] std::size_t group() const { return queries.heads / heads.size(); }
  [[nodiscard]] float scale() const {
    return options.scale.value_or(1.0F / std::sqrt(static_cast<float>(queries.head_dim)));
  }
};

/// What a backend offers. `attend` writes outputs (zeros for a query that sees no row), `observe`
/// writes sums, `score` writes the dot products of one query [head_dim] with `out.size()` dense
/// rows. Calls on one engine object must not overlap.
template <class E>
concept AttentionEngine =
    requires(E& engine, const LayerAttention& attention, const LayerObservation& observation,
             const Plane& rows, std::span<const float> query, std::span<float> out) {
      engine.attend(attention);
      engine.observe(observation);
      engine.score(rows, query, out);
    };

}  // namespace kvpolicy
