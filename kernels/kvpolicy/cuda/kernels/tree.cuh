// SPDX-License-Identifier: Apache-2.0
//
// A tree of draft tokens after the text, as kernels receive it (core/token_tree.hpp is the host's
// side): the depth of each node, and which nodes each query sees. Otherwise a call with a tree is
// like any other: nodes are rows, in the order in which they were added.
#pragma once

#include <cstdint>

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// The call's queries are the last of `nodes` nodes; earlier nodes are in the cache, after the
/// text. Node i has the position of the text's end + depths[i].
struct CallTree {
  int nodes = 0;                ///< the call's included; 0: no tree, each token continues the previous one
  int lowest = 0;               ///< least depth of the call's queries
  int highest = 0;              ///< greatest depth of the call's queries
  int words = 0;                ///< words of each query in `seen`
  const int* depths = nullptr;  ///< [nodes]
  const std::uint32_t* seen = nullptr;  ///< [queries, words]: a bit for each node that a query sees

  /// The word at which the bits of the nodes from `node` on begin; `node` is 0 or the call's first.
  /// The call's own nodes begin a new word, so that the bits of a tile of keys are contiguous.
  KVPOLICY_HOST_DEVICE static constexpr int word_of(int node) { return (node + 63) / 64 * 2; }
  /// Number of words for each query.
  KVPOLICY_HOST_DEVICE static constexpr int words_of(int nodes, int queries) {
    return word_of(nodes - queries) + word_of(queries);
  }
};

}  // namespace kvpolicy::gpu
