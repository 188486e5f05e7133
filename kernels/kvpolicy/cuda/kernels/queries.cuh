// SPDX-License-Identifier: Apache-2.0
//
// Keeps the latest queries of a layer, which a compression observes, in a ring over text positions:
// [slots, q_heads, head_dim].
#pragma once

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

struct KeepQueriesParams {
  const LayerState* state = nullptr;
  Request request = {};  ///< says whether `state` counts the queries' rows already
  Tensor q = {};         ///< [1, queries, q_heads, head_dim]
  int q_heads = 0;
  int head_dim = 0;
  int slots = 0;
  std::uint16_t* ring = nullptr;
};

inline constexpr int keep_queries_threads = 128;

/// One block for each of the latest min(queries, slots) queries.
template <int Threads = keep_queries_threads>
KVPOLICY_KERNEL(Threads, 1)
keep_queries_kernel(const KVPOLICY_GRID_CONSTANT KeepQueriesParams p) {
  const int first = p.state->tokens - (p.request.own_rows ? 0 : p.request.queries);
  const int kept = smaller(p.request.queries, p.slots);
  const int token = p.request.queries - kept + block_x();
  const int vectors = p.head_dim / 8;
  std::uint16_t* slot = p.ring + static_cast<long long>((first + token) % p.slots) * p.q_heads * p.head_dim;
  for (int i = thread_index(); i < p.q_heads * vectors; i += thread_count()) {
    const int head = i / vectors;
    const auto* from = reinterpret_cast<const Words4*>(p.q.row(0, token, head)) + i % vectors;
    reinterpret_cast<Words4*>(slot)[i] = *from;
  }
}

}  // namespace kvpolicy::gpu
