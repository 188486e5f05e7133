// SPDX-License-Identifier: Apache-2.0
//
// What a cache refuses because of how far its layers have come: rollbacks, rows beyond its room, and
// questions to queries that never came.
// The host cache and the device cache refuse the same calls in the same words. `cache` is the name
// with which a message begins, and a layer is a TextProgress with a `tree`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/progress.hpp>
#include <kvpolicy/core/token_tree.hpp>

namespace kvpolicy {

namespace detail {

/// The model's number of a layer that stands at `place` among those of a cache: a cache of layers that differ
/// leaves out those that have none.
template <class Layer>
[[nodiscard]] std::size_t number_of(const Layer& layer, std::size_t place) {
  if constexpr (requires { layer.number; }) return layer.number;
  return place;
}

}  // namespace detail

/// Refuses a rollback that some layer cannot make.
/// @throws RollbackError if a layer cannot go back to `tokens` tokens
template <class Layer>
void check_truncate(std::string_view cache, std::span<const Layer> layers, std::size_t tokens,
                    std::size_t max_rollback) {
  for (std::size_t l = 0; l < layers.size(); ++l) {
    require<RollbackError>(layers[l].can_return_to(tokens), cache, "::truncate: to ", tokens,
                           " tokens, but layer ", detail::number_of(layers[l], l), " can go back to ",
                           layers[l].committed, " to ", layers[l].tokens, " (max_rollback is ", max_rollback,
                           ")");
  }
}

/// Refuses a path that cannot be accepted in all layers.
/// @throws RollbackError if no tree is pending or the layers hold different ones, ShapeError if `path`
/// is no path of the tree
template <class Layer>
void check_accept(std::string_view cache, std::span<const Layer> layers, std::span<const std::size_t> path) {
  const Layer& first = layers.front();
  require<RollbackError>(!first.tree.empty(), cache, "::accept: no tree is pending");
  for (std::size_t l = 1; l < layers.size(); ++l) {
    require<RollbackError>(layers[l].tokens == first.tokens && layers[l].tree.nodes() == first.tree.nodes(),
                           cache, "::accept: layer ", detail::number_of(layers[l], l), " holds ",
                           layers[l].tree.size(), " nodes at ", layers[l].tokens, " tokens, layer ",
                           detail::number_of(first, 0), ' ', first.tree.size(), " at ", first.tokens,
                           "; truncate, and bring them to the same tree");
  }
  require<ShapeError>(is_path(first.tree.nodes(), path), cache, "::accept: the ", path.size(),
                      " nodes are no path that leads from the text downwards through the tree of ",
                      first.tree.size(), " nodes");
}

/// Refuses rows beyond `max_tokens`; 0 is no limit.
/// @throws CapacityError if a text that came so far has no room for `rows` more
inline void check_room(std::string_view cache, const TextProgress<std::size_t>& text, std::size_t rows,
                       std::size_t max_tokens) {
  require<CapacityError>(text.has_room(rows, max_tokens), cache, ": ", rows, " more tokens after ",
                         text.tokens, " exceed max_tokens = ", max_tokens);
}

/// Whether the latest `count` queries of a text of `tokens` tokens are known, or all of a shorter text.
/// `queries` is the ring that holds them. Rows that were only appended bring no query.
template <class Queries>
[[nodiscard]] bool knows_latest(const Queries& queries, std::size_t count, std::size_t tokens) {
  return count == 0 || (queries.end() == tokens && queries.size() >= std::min(count, tokens));
}

/// Refuses a call that asks queries which never came.
/// @throws ShapeError if `needed` and the latest `count` queries are not all known
template <class Queries>
void check_queries(std::string_view cache, std::string_view call, const Queries& queries, std::size_t count,
                   std::size_t tokens, bool needed = true) {
  require<ShapeError>(!needed || knows_latest(queries, count, tokens), cache, "::", call, ": of the latest ",
                      std::min(count, tokens), " tokens not all queries are known, ", queries.size(),
                      " up to token ", queries.end(), " of ", tokens,
                      "; rows that are only appended bring none");
}

/// Refuses to compress one layer by itself of which a head shares its budget with those of other layers.
/// @throws ConfigError
inline void check_compressed_alone(std::string_view cache, std::size_t layer, bool shares_in_model) {
  require(!shares_in_model, cache, "::compress: heads of layer ", layer,
          " share their budgets with heads of other layers (adaptive_in_model); compress all layers at once");
}

/// Refuses to compress a head of which `unscored` of its `rows` rows have no score that its scorer needs.
/// @throws ShapeError
inline void check_scored(std::string_view cache, std::size_t layer, std::size_t head, std::size_t unscored,
                         std::size_t rows) {
  require<ShapeError>(
      unscored == 0, cache, "::compress: ", unscored, " of ", rows, " rows of KV head ", head, " of layer ",
      layer,
      " were in no scoring pass, which its scorer needs; fork the cache, feed the fork the text once more "
      "with AttendOptions::scores_rows, and take_scores of it (policy/kvzip_scorer.hpp)");
}

/// Refuses scores of a head that holds `rows_there` of `tokens_there` committed tokens for one that holds `rows` of
/// `tokens`: it is no fork that has only read more since.
/// @throws ShapeError
inline void check_grew_only(std::string_view cache, std::size_t layer, std::size_t head, std::size_t rows,
                            std::size_t tokens, std::size_t rows_there, std::size_t tokens_there) {
  const bool grew_only =
      tokens_there >= tokens && rows_there >= rows && rows_there - rows == tokens_there - tokens;
  require<ShapeError>(grew_only, cache, "::take_scores: KV head ", head, " of layer ", layer, " holds ", rows,
                      " rows of ", tokens, " tokens, in the scored cache ", rows_there, " of ", tokens_there,
                      "; it must be a fork that has only read more since");
}

/// Refuses to observe a layer in a state in which its latest queries do not belong to its latest rows.
/// Returns how many of the latest `count` queries are known.
/// @throws RollbackError if a tree is pending, ShapeError if rows came without their queries
template <class Layer>
std::size_t check_observe(std::string_view cache, const Layer& layer, std::size_t count) {
  layer.tree.refuse(cache, "::observe");
  layer.check_queries("observe");
  const std::size_t known = std::min(count, layer.queries.size());
  check_queries(cache, "observe", layer.queries, known, layer.tokens);
  return known;
}

/// Refuses to save or copy a cache inside a step or while a tree is pending.
/// @throws RollbackError
template <class Layer>
void check_between_steps(const char* call, std::span<const Layer> layers, std::size_t tokens) {
  for (std::size_t l = 0; l < layers.size(); ++l) {
    layers[l].tree.refuse(call);
    std::size_t number = l;
    if constexpr (requires { layers[l].number; }) number = layers[l].number;  // some layers have no cache
    require<RollbackError>(layers[l].tokens == tokens, call, ": layer ", number, " holds ", layers[l].tokens,
                           " tokens, another one ", tokens, "; ", call,
                           " between two steps, or truncate first");
  }
}

/// Refuses an append of too many rows.
/// @throws CapacityError for an append of more rows than may wait for their `attend`
inline void check_append(std::string_view cache, std::size_t rows, std::size_t max_append) {
  require<CapacityError>(rows <= max_append, cache, "::append: ", rows,
                         " rows, must be at most max_append = ", max_append);
}

}  // namespace kvpolicy
