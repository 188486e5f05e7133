// SPDX-License-Identifier: Apache-2.0
//
// The tree of guesses that a layer's latest rows are, until one of its paths is accepted. The rows
// lie in the tail in the order of the nodes; what this adds is which continues which, and where each
// stands in the text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/policy/policy.hpp>

namespace kvpolicy {

/// Copying copies the nodes. Not synchronised.
class PendingTree {
 public:
  [[nodiscard]] const TokenTree& nodes() const { return nodes_; }
  [[nodiscard]] std::size_t size() const { return nodes_.size(); }
  [[nodiscard]] bool empty() const { return nodes_.empty(); }

  /// @param call who asks, in as many parts as it takes
  /// @throws RollbackError if a tree is pending
  template <class... Call>
  void refuse(const Call&... call) const {
    require<RollbackError>(empty(), call..., ": a tree of ", size(), " nodes waits for accept or truncate");
  }

  /// Whether `tree` is this one with `added` nodes more.
  /// @throws ShapeError if not, CapacityError if it cannot be tentative as a whole
  void check_grows_to(const TokenTree& tree, std::size_t added, std::size_t max_rollback) const {
    require<ShapeError>(added <= tree.size() && tree.size() - added == size(), "KvCache: ", added,
                        " tokens are to be the last of a tree of ", tree.size(),
                        " nodes, but the cache holds ", size(), " of its nodes, must hold all the others");
    require<ShapeError>(tree.begins_with(nodes_), "KvCache: the first ", size(), " of the tree's ",
                        tree.size(), " nodes are not those that the cache holds");
    require<CapacityError>(tree.size() <= max_rollback, "KvCache: a tree of ", tree.size(),
                           " nodes, must be at most max_rollback = ", max_rollback);
  }

  /// Whether `tree` is this one, and `queries` queries may be those of its last nodes.
  /// @throws ShapeError if not
  void check_is(const TokenTree& tree, std::size_t queries) const {
    require<ShapeError>(tree == nodes_, "KvCache::attend: a tree of ", tree.size(),
                        " nodes is not the one of ", size(), " nodes that was appended");
    require<ShapeError>(queries <= size(), "KvCache::attend: ", queries, " queries, but the tree has ",
                        size(), " nodes");
  }

  /// Makes room for `tree`, which hangs on a text of `root` tokens: nothing that is seen changes
  /// before `keep`, but `place` and `request` know all its nodes.
  /// @throws std::bad_alloc
  void prepare(const TokenTree& tree, std::size_t root) {
    nodes_.reserve(tree.size());
    positions_.resize(tree.size());
    for (std::size_t node = size(); node < tree.size(); ++node) {
      positions_[node] = static_cast<std::int64_t>(root + tree.depth(node));
    }
  }
  /// Takes the nodes that `prepare` made room for.
  void keep(const TokenTree& tree) noexcept {
    for (std::size_t node = size(); node < tree.size(); ++node) nodes_.add(tree.parent(node));
  }
  /// Only the first `nodes` nodes stay.
  void truncate(std::size_t nodes) noexcept { nodes_.truncate(nodes); }

  /// `rows` as the nodes from `first` on. Points to memory that lives until the next call.
  [[nodiscard]] Segment place(Segment rows, std::size_t first) const {
    rows.node = first;
    rows.positions = positions_.data() + first;
    rows.position = positions_[first];
    return rows;
  }

  /// What the queries of the nodes [first, last) ask of a policy.
  [[nodiscard]] ReadRequest request(std::size_t first, std::size_t last, Read read) const {
    const auto begin = positions_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = positions_.begin() + static_cast<std::ptrdiff_t>(last);
    const auto [lowest, highest] = std::minmax_element(begin, end);
    return {*lowest, static_cast<std::size_t>(*highest - *lowest) + 1, read};
  }

 private:
  TokenTree nodes_;
  std::vector<std::int64_t> positions_;  // at least of the nodes
};

}  // namespace kvpolicy
