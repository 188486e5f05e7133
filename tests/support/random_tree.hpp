// SPDX-License-Identifier: Apache-2.0
//
// Trees of guesses at random, and paths through them.
#pragma once

#include <cstddef>
#include <vector>

#include <kvpolicy/core/token_tree.hpp>

#include "support/tensors.hpp"

namespace test {

/// `tree` with `more` nodes more, in one of several shapes: chains, levels, whatever comes.
inline kvpolicy::TokenTree grown(Random& random, kvpolicy::TokenTree tree, std::size_t more) {
  const std::size_t nodes = tree.size() + more;
  const std::size_t shape = below(random, 4);
  while (tree.size() < nodes) {
    const std::size_t size = tree.size();
    std::size_t parent = below(random, size + 1);  // `size`: the text
    if (shape == 0) parent = size == 0 ? size : size - 1;
    if (shape == 1) parent = size < 3 ? size : (size - 3) / 2;
    if (shape == 2) parent = size < 2 || below(random, 8) == 0 ? size : size - 1 - below(random, 2);
    tree.add(parent == size ? kvpolicy::TokenTree::text : parent);
  }
  return tree;
}

inline kvpolicy::TokenTree random_tree(Random& random, std::size_t nodes) {
  return grown(random, {}, nodes);
}

/// From the text down to a node, which is drawn; nothing for a draw that misses.
inline std::vector<std::size_t> random_path(Random& random, const kvpolicy::TokenTree& tree) {
  std::vector<std::size_t> path;
  const std::size_t node = below(random, tree.size() + 1);
  for (std::size_t at = node == tree.size() ? tree.text : node; at != tree.text; at = tree.parent(at)) {
    path.insert(path.begin(), at);
  }
  return path;
}

}  // namespace test
