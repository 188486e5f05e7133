// SPDX-License-Identifier: Apache-2.0
//
// Random trees of draft tokens, and paths through them.
#pragma once

#include <cstddef>
#include <vector>

#include <kvpolicy/core/token_tree.hpp>

#include "support/tensors.hpp"

namespace test {

/// `tree` with `more` more nodes, in one of several shapes: chains, levels, random.
inline kvpolicy::TokenTree grown(Random& random, kvpolicy::TokenTree tree, std::size_t more) {
  const std::size_t nodes = tree.size() + more;
  const std::size_t shape = below(random, 4);
  while (tree.size() < nodes) {
    const std::size_t size = tree.size();
    std::size_t parent = below(random, size + 1);  // `size` stands for the text
    if (shape == 0) parent = size == 0 ? size : size - 1;
    if (shape == 1) parent = size < 3 ? size : (size - 3) / 2;
    if (shape == 2) parent = size < 2 || below(random, 8) == 0 ? size : size - 1 - below(random, 2);
    tree.add(parent == size ? kvpolicy::TokenTree::text : parent);
  }
  return tree;
}

inline kvpolicy::TokenTree random_tree(Random& random, std::size_t nodes) { return grown(random, {}, nodes); }

/// The path from the text to a node that is drawn; empty if the draw gives no node.
inline std::vector<std::size_t> random_path(Random& random, const kvpolicy::TokenTree& tree) {
  std::vector<std::size_t> path;
  const std::size_t node = below(random, tree.size() + 1);
  for (std::size_t at = node == tree.size() ? tree.text : node; at != tree.text; at = tree.parent(at)) {
    path.insert(path.begin(), at);
  }
  return path;
}

}  // namespace test
