// SPDX-License-Identifier: Apache-2.0
//
// Trees for tests of the attention kernels: a mask bit by bit in memory from `new`, and, for the
// oracles, who sees whom by walking up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/cuda/kernels/tree.cuh>

namespace test {

inline bool is_ancestor_or_same(const kvpolicy::TokenTree& tree, std::size_t node, std::size_t of) {
  while (of != kvpolicy::TokenTree::text && of != node) of = tree.parent(of);
  return of == node;
}

/// For a call whose queries are the last nodes. Words and depths end where they must: what is read
/// after them, a sanitizer sees.
class TreeMask {
 public:
  TreeMask() = default;
  TreeMask(const kvpolicy::TokenTree& tree, int queries) {
    const auto nodes = static_cast<int>(tree.size());
    const int older = nodes - queries;
    const int own_word = kvpolicy::gpu::CallTree::word_of(older);
    view_ = {.nodes = nodes, .words = kvpolicy::gpu::CallTree::words_of(nodes, queries)};
    seen_.assign(static_cast<std::size_t>(queries * view_.words), 0);
    for (int node = 0; node < nodes; ++node) {
      depths_.push_back(static_cast<int>(tree.depth(static_cast<std::size_t>(node))));
      for (int query = 0; query < queries; ++query) {
        if (!is_ancestor_or_same(tree, static_cast<std::size_t>(node),
                                 static_cast<std::size_t>(older + query))) {
          continue;
        }
        const int bit = node < older ? node : own_word * 32 + node - older;
        seen_[static_cast<std::size_t>(query * view_.words + bit / 32)] |= 1U << bit % 32;
      }
    }
    const auto own = std::minmax_element(depths_.begin() + older, depths_.end());
    view_.lowest = *own.first;
    view_.highest = *own.second;
  }

  [[nodiscard]] kvpolicy::gpu::CallTree view() const {
    kvpolicy::gpu::CallTree view = view_;
    view.seen = seen_.data();
    view.depths = depths_.data();
    return view;
  }

 private:
  kvpolicy::gpu::CallTree view_;
  std::vector<std::uint32_t> seen_;
  std::vector<int> depths_;
};

/// `chain` of 10: nodes continue the one before, mostly; 0: whatever comes.
inline kvpolicy::TokenTree some_tree(int nodes, std::uint32_t seed, unsigned chain = 5) {
  std::mt19937 random{seed};
  kvpolicy::TokenTree tree;
  while (tree.size() < static_cast<std::size_t>(nodes)) {
    const std::size_t size = tree.size();
    std::size_t parent = random() % (size + 1);  // `size`: the text
    if (random() % 10 < chain && size > 0) parent = size - 1;
    tree.add(parent == size ? kvpolicy::TokenTree::text : parent);
  }
  return tree;
}

}  // namespace test
