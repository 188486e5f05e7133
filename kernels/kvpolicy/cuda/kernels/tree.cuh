// SPDX-License-Identifier: Apache-2.0
//
// A tree of guesses behind the text, as a call's kernels know it (core/token_tree.hpp is the host's
// side): how deep each node stands, and which nodes each query sees. Everything else of a call stays
// as it is without a tree: nodes are rows like others, in the order in which they came.
#pragma once

#include <cstdint>

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

/// The call's queries are the last of `nodes` nodes; those before lie in the cache, behind the text.
/// Node i stands at the text's end + depths[i].
struct CallTree {
  int nodes = 0;    ///< the call's own included; 0: no tree, each token continues the one before
  int lowest = 0;   ///< least depth of the call's queries
  int highest = 0;  ///< greatest
  int words = 0;    ///< of each query in `seen`
  const int* depths = nullptr;          ///< [nodes]
  const std::uint32_t* seen = nullptr;  ///< [queries, words]: a bit for each node that a query sees

  /// The word where the bits begin of the nodes from `node` on: 0 or the call's first. The call's own
  /// nodes begin a new word, so that tiles of keys find their bits side by side.
  KVPOLICY_HOST_DEVICE static constexpr int word_of(int node) { return (node + 63) / 64 * 2; }
  /// Words of a query.
  KVPOLICY_HOST_DEVICE static constexpr int words_of(int nodes, int queries) {
    return word_of(nodes - queries) + word_of(queries);
  }
};

}  // namespace kvpolicy::cuda
