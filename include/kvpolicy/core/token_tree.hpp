// SPDX-License-Identifier: Apache-2.0
//
// Draft tokens that branch, each continuing the text. A model reads all of them in one pass: every
// node sees the text and its own ancestors, so each path is read as if it were the only one.
// Afterwards the cache keeps one path (`accept`).
//
// Method: tree attention, SpecInfer, arXiv:2305.09781. speculation/tree_shape.hpp computes which
// trees are worth their nodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Draft tokens that may branch, and which of them see which.
/// Node i continues node `parent(i)`, which comes before it, or the text if `parent(i)` is `text`.
/// A chain of nodes is the ordinary case: consecutive tokens, read causally.
class TokenTree {
 public:
  /// Parent of a node that continues the text.
  static constexpr std::size_t text = static_cast<std::size_t>(-1);
  /// Limit on nodes, because work and masks grow with their square.
  static constexpr std::size_t max_nodes = 4096;

  TokenTree() = default;
  /// @throws ConfigError as `add`
  explicit TokenTree(std::span<const std::size_t> parents) {
    for (const std::size_t parent : parents) add(parent);
  }

  /// Appends a node; returns its number.
  /// @throws ConfigError if there is no node `parent`, or there are `max_nodes` already;
  /// std::bad_alloc
  std::size_t add(std::size_t parent) {
    const std::size_t node = size();
    require(parent == text || parent < node, "TokenTree: node ", node, " cannot continue node ", parent,
            ", must continue the text or one of the ", node, " nodes before it");
    require(node < max_nodes, "TokenTree: a tree has at most ", max_nodes, " nodes");
    nodes_.push_back({parent, parent == text ? 0 : depth(parent) + 1});
    return node;
  }

  /// Reserves memory for `nodes` nodes, so that adding them allocates nothing.
  void reserve(std::size_t nodes) { nodes_.reserve(nodes); }
  /// Keeps only the first `nodes` nodes.
  void truncate(std::size_t nodes) noexcept {
    nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(std::min(nodes, size())), nodes_.end());
  }

  [[nodiscard]] std::size_t size() const { return nodes_.size(); }
  [[nodiscard]] bool empty() const { return nodes_.empty(); }
  [[nodiscard]] std::size_t parent(std::size_t node) const { return nodes_[node].parent; }
  /// Number of nodes between the text and this node, whose position is `tokens of the text +
  /// depth`.
  [[nodiscard]] std::size_t depth(std::size_t node) const { return nodes_[node].depth; }

  /// Whether the query of node `query` sees the row of node `row`: a query sees its own row and
  /// those of its ancestors.
  [[nodiscard]] bool sees(std::size_t query, std::size_t row) const {
    while (query != text && query > row) query = parent(query);
    return query == row;
  }

  /// Whether the first nodes of this tree are the nodes of `smaller`.
  [[nodiscard]] bool begins_with(const TokenTree& smaller) const {
    return smaller.size() <= size() &&
           std::equal(smaller.nodes_.begin(), smaller.nodes_.end(), nodes_.begin());
  }
  /// The tree of the first `nodes` nodes.
  [[nodiscard]] TokenTree first(std::size_t nodes) const {
    TokenTree part;
    part.nodes_.assign(nodes_.begin(), nodes_.begin() + static_cast<std::ptrdiff_t>(std::min(nodes, size())));
    return part;
  }

  friend bool operator==(const TokenTree&, const TokenTree&) = default;

 private:
  struct Node {
    std::size_t parent;
    std::size_t depth;
    friend bool operator==(const Node&, const Node&) = default;
  };
  std::vector<Node> nodes_;
};

/// Whether `path` is a path from the text downwards: each node continues the previous one.
[[nodiscard]] inline bool is_path(const TokenTree& tree, std::span<const std::size_t> path) {
  std::size_t parent = TokenTree::text;
  for (const std::size_t node : path) {
    if (node >= tree.size() || tree.parent(node) != parent) return false;
    parent = node;
  }
  return true;
}

/// How many nodes of `path` keep the index of their row when the path becomes the text: a node does if it
/// and all nodes before it in the path do.
[[nodiscard]] inline std::size_t unmoved_nodes(std::span<const std::size_t> path) {
  std::size_t count = 0;
  while (count < path.size() && path[count] == count) ++count;
  return count;
}

/// Whether the nodes up to `node` form a chain after the text and all other nodes descend from it.
[[nodiscard]] inline bool is_on_all_paths(const TokenTree& tree, std::size_t node) {
  if (node >= tree.size()) return false;
  for (std::size_t i = 0; i < tree.size(); ++i) {
    if (i <= node ? tree.depth(i) != i : !tree.sees(i, node)) return false;
  }
  return true;
}

}  // namespace kvpolicy
