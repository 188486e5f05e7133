// SPDX-License-Identifier: Apache-2.0
//
// A tree of draft tokens, prepared for the queries of one call: the position of each query, and the nodes
// that it sees as a bit mask. A walk from node to node for every row, head and query would cost more than
// the products that it saves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/core/attention.hpp>

namespace kvpolicy::cpu {

/// The positions and the visible nodes of the queries of one call with a tree.
class TreeMask {
 public:
  /// @throws std::bad_alloc
  void set(const LayerAttention& work) {
    const TokenTree& tree = *work.options.tree;
    words_ = (tree.size() + 63) / 64;
    bits_.assign(work.queries.tokens * words_, 0);
    positions_.resize(work.queries.tokens);
    for (std::size_t query = 0; query < work.queries.tokens; ++query) {
      positions_[query] = work.position(query);
      for (std::size_t node = work.node(query); node != TokenTree::text; node = tree.parent(node)) {
        bits_[query * words_ + node / 64] |= std::uint64_t{1} << node % 64;
      }
    }
  }

  [[nodiscard]] std::int64_t position(std::size_t query) const { return positions_[query]; }
  /// Whether a query sees a node; every query sees the rows of the text, `no_node`.
  [[nodiscard]] bool sees(std::size_t query, std::size_t node) const {
    return node == no_node || (bits_[query * words_ + node / 64] >> node % 64 & 1) != 0;
  }

 private:
  std::size_t words_ = 0;
  std::vector<std::uint64_t> bits_;  // [queries, words]
  std::vector<std::int64_t> positions_;
};

}  // namespace kvpolicy::cpu
