// SPDX-License-Identifier: Apache-2.0
//
// The complete interface between a cache and an attention engine: one layer's queries, the segments of each
// KV head, and three operations, with a fourth that is optional. `ScalarEngine` defines what the operations compute;
// `cpu::Engine` computes the same fast.
#pragma once

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/core/token_tree.hpp>

namespace kvpolicy {

/// What a read shows: every row; of a ChunkRetrieval head only the rows of its selection; every row, but of codes
/// that are stored in halves only the upper one (QuantSpec, arXiv:2502.10424); or, of keys in halves, every upper
/// half and then only the rows that can matter, with a bound on what the others could have been
/// (core/bounded_attention.hpp). A head without a selection, or without codes in halves, shows the same as for `all`.
/// All but `all` read less and are approximate: what is drafted over them is verified over `all`.
enum class Read : std::uint8_t { all, selected, upper_half, bounded };

/// What makes sure that a key's lower half does not lift its logit above the bound.
enum class Certainty : std::uint8_t {
  sure,        ///< Nothing can: each channel is off by its half step in the worst direction.
  four_sigma,  ///< Four standard deviations of the logit, as if lower halves were drawn at random. An estimate.
  none         ///< The upper halves are taken for the keys, as for the top-p of Twilight (arXiv:2502.02770).
};

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 3> names_of(Certainty) {
  return {"sure", "four_sigma", "none"};
}

/// How much attention a query may leave unread (Read::bounded), and what it left. A call with more than
/// `most_bounded_queries` queries for a KV head (core/bounded_attention.hpp), tokens times group, reads all rows: it
/// heeds neither `epsilon` nor `most_rows`. What the spans hold after a call that throws is not specified.
struct ReadBound {
  /// Rows are read until those that are left can hold at most this share of the query's attention, from 0 to 1. 0
  /// reads all rows, whatever `most_rows` is.
  float epsilon = 0.05F;
  /// At most so many rows in halves are read in full for a KV head. Where that ends a read early, `unread` says so.
  std::size_t most_rows = std::numeric_limits<std::size_t>::max();
  Certainty certainty = Certainty::sure;
  /// [tokens, q_heads], written unless it is empty: the share of the query's attention, over all rows that it sees,
  /// that the rows it did not read hold at most. It is at most `epsilon` unless `most_rows` ended the read, and a
  /// bound as far as `certainty` goes; weights of rows that are not in halves are taken as the engine computes them.
  /// The output is off by at most this share of the distance between two values of the head, or between a value and 0
  /// where there are sink logits, besides rounding.
  std::span<float> unread = {};
  /// [kv_heads], unless it is empty: increased by the rows that the call read in full for any query of the head, those
  /// that are not in halves included.
  std::span<std::size_t> rows_read = {};
};

/// Options of one attention call. The defaults give plain causal attention over all rows.
struct AttendOptions {
  std::optional<float> scale = {};                  ///< multiplies logits; default 1 / sqrt(head_dim)
  float softcap = 0.0F;                             ///< logit -> cap * tanh(logit / cap); 0: no cap
  std::span<const float> attention_sink_bias = {};  ///< [q_heads] learned logits; empty: none
  std::span<float> log_sum_exp = {};                ///< [tokens, q_heads], written unless it is empty
  Read read = Read::all;
  ReadBound bound = {};  ///< for Read::bounded
  /// Makes ChunkRetrieval heads choose a new selection. A `selected` read chooses before it reads. An `all`
  /// or `bounded` read (the end of a prompt, say) chooses afterwards, for the `selected` reads that follow.
  bool refresh_selection = false;
  /// Index of the call's token whose query chooses the selection; default: the last. A rollback to before
  /// that token undoes the selection. In a call with a tree it must be set, to a node that all paths
  /// contain.
  std::optional<std::size_t> selection_query = {};
  /// The call belongs to a scoring pass: heads whose scorer waits for one (policy/kvzip_scorer.hpp) note how much
  /// attention its queries pay to their rows. Other heads do not heed it.
  bool scores_rows = false;
  /// If set, the call's tokens are the last nodes of this tree of draft tokens, and the latest
  /// calls appended its earlier nodes. If null, the tokens continue the text one after another. The
  /// tree is read only during the call.
  const TokenTree* tree = nullptr;
};

/// One layer to attend. Query row i has text position `first_position + i`. With `options.tree`,
/// row i is one of the tree's last nodes, `first_position` is the position of nodes of depth 0, and
/// the row has position `first_position + depth`.
struct LayerAttention {
  ConstTensor queries;  ///< [tokens, q_heads, head_dim]
  MutableTensor out;    ///< [tokens, q_heads, value_dim]
  std::int64_t first_position = 0;
  std::span<const std::span<const Segment>> heads;  ///< [kv_heads]
  AttendOptions options;

  [[nodiscard]] std::size_t queries_per_kv() const { return queries.heads / heads.size(); }
  [[nodiscard]] float scale() const {
    return options.scale.value_or(1.0F / std::sqrt(static_cast<float>(queries.head_dim)));
  }
  /// The tree's node that query row `token` belongs to. Requires a tree.
  [[nodiscard]] std::size_t node(std::size_t token) const {
    return options.tree->size() - queries.tokens + token;
  }
  [[nodiscard]] std::int64_t position(std::size_t token) const {
    const std::size_t offset = options.tree == nullptr ? token : options.tree->depth(node(token));
    return first_position + static_cast<std::int64_t>(offset);
  }
  /// Whether query row `token` sees row `row` of the segment.
  [[nodiscard]] bool sees(std::size_t token, const Segment& segment, std::size_t row) const {
    return is_visible(segment.position_of(row), position(token), segment.window) &&
           (segment.node == no_node || options.tree->sees(node(token), segment.node_of(row)));
  }
};

/// Asks how much attention each row gets: its attention probability, summed over the queries (the column
/// sums of the attention matrix), or the largest of them. No segment may contain nodes of a tree. Values are not
/// read, so their planes may be empty.
struct LayerObservation {
  ConstTensor queries;  ///< [tokens, q_heads, head_dim]
  std::int64_t first_position = 0;
  std::span<const std::span<const Segment>> heads;  ///< [kv_heads]; an empty list is skipped
  std::span<const std::span<float>> sums;           ///< [kv_heads] of [group, rows of the head]
  AttendOptions options;
  Votes votes = Votes::mean;  ///< `mean`: probabilities are summed; `largest`: `sums` get the largest

  [[nodiscard]] std::size_t queries_per_kv() const { return queries.heads / heads.size(); }
  [[nodiscard]] float scale() const {
    return options.scale.value_or(1.0F / std::sqrt(static_cast<float>(queries.head_dim)));
  }
};

/// Rows that are bounded together and read together.
inline constexpr std::size_t bounded_unit = 8;

/// How large the logits of a unit of rows can be for one query, by the upper halves of their keys. All of it is NaN
/// where that is not known, because a number is not finite.
struct UnitBound {
  float highest = 0;  ///< the largest of the rows' bounds, each its logit by upper halves plus its width
  float mass = 0;     ///< sum over the rows of exp(bound - highest)
  float width = 0;    ///< the largest width: what lower halves can add to a logit, and `slack`
  float slack = 0;    ///< the largest error that an engine's arithmetic may make in a logit
};

/// Asks how large the logits of rows can be by the upper halves of their keys. Segments show upper halves (Plane::
/// upper_half) of rows of the text that have consecutive positions, all of which count for every query; they have no
/// runs and no rotation. Values are not read. The units of a segment begin at its first row, and the last one may
/// have fewer rows.
struct LayerBounds {
  ConstTensor queries;                              ///< [tokens, q_heads, head_dim]
  std::span<const std::span<const Segment>> heads;  ///< [kv_heads]; an empty list is skipped
  std::span<const std::span<UnitBound>> units =
      {};  ///< [kv_heads] of [tokens, group, units of the head's segments]
  float scale = 1.0F;
  float softcap = 0.0F;
  Certainty certainty = Certainty::sure;

  [[nodiscard]] std::size_t queries_per_kv() const { return queries.heads / heads.size(); }
};

/// The units of so many rows of a segment.
[[nodiscard]] constexpr std::size_t units_of(std::size_t rows) {
  return (rows + bounded_unit - 1) / bounded_unit;
}
/// The units of some segments.
[[nodiscard]] inline std::size_t units_of(std::span<const Segment> segments) {
  std::size_t units = 0;
  for (const Segment& segment : segments) units += units_of(segment.rows);
  return units;
}

/// The interface that a backend implements. `attend` writes outputs, with zeros for a query that sees no
/// row. `observe` writes sums. `score` writes the dot products of one query [head_dim] with `out.size()`
/// dense rows. Calls on one engine object must not overlap.
template <class E>
concept AttentionEngine =
    requires(E& engine, const LayerAttention& attention, const LayerObservation& observation,
             const Plane& rows, std::span<const float> query, std::span<float> out) {
      engine.attend(attention);
      engine.observe(observation);
      engine.score(rows, query, out);
    };

/// An engine that attends the calls of several sequences together. Each gets the same bits as by `attend`
/// alone. The outputs of the calls do not overlap.
template <class E>
concept BatchedEngine = AttentionEngine<E> && requires(E& engine, std::span<const LayerAttention> works) {
  engine.attend_all(works);
};

/// An engine that bounds logits by itself; for others ScalarEngine does it.
template <class E>
concept BoundingEngine =
    AttentionEngine<E> && requires(E& engine, const LayerBounds& work) { engine.bound(work); };

}  // namespace kvpolicy
