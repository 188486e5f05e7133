// SPDX-License-Identifier: Apache-2.0
//
// Keeps one path of a tree: moves the path's rows to the slots right after the text, in every head
// of every layer, and the kept queries of the layer as well. set_state_kernel then drops the rows
// after them by setting the counters.
//
// Nodes of a path are in ascending order, and a path's k-th node is node k or a later one. So rows
// only move to lower slots, and a slot may be overwritten once all rows below it have moved.
#pragma once

#include <cstdint>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::gpu {

/// Part of a path, passed in the kernel's parameters. Parts are launched on a stream in order.
struct PathPart {
  static constexpr int most = 1024;
  int root = 0;   ///< text position of node 0's row
  int first = 0;  ///< index on the path of `node[0]`
  int count = 0;
  std::uint16_t node[most];
};

struct AcceptRowsParams {
  const HeadView* heads = nullptr;
  int head_dim = 0;
  int page_rows = 64;
  PathPart path;
};

inline constexpr int accept_threads = 256;

/// One block for each head. No row of the path is packed, because a tentative row is exact.
template <int Threads = accept_threads>
KVPOLICY_KERNEL(Threads, 1)
accept_rows_kernel(const KVPOLICY_GRID_CONSTANT AcceptRowsParams p) {
  const HeadView& head = p.heads[block_x()];
  const int root = p.path.root - head.evicted;
  const int side_vectors = p.head_dim / 8;
  const int vectors = 2 * side_vectors;  // vectors of 16 bytes: those of the key, then of the value
  const int rows = Threads / vectors;
  const int mine = thread_index() / vectors;
  const int vector = thread_index() % vectors;
  const auto place = [&](std::byte* const* pages, int row) {
    const int slot = head.exact_slot(row);
    std::byte* const side =
        head.exact_row(pages[slot / p.page_rows], slot % p.page_rows, vector < side_vectors);
    return reinterpret_cast<Words4*>(side) + vector % side_vectors;
  };
  for (int first = 0; first < p.path.count; first += rows) {
    const int i = first + mine;
    const bool moves = mine < rows && i < p.path.count;
    Words4 words{};
    if (moves) words = *place(head.exact_pages, root + p.path.node[i]);
    sync_block();  // all rows of this iteration are read before any of them is overwritten
    if (!moves) continue;
    const int row = root + p.path.first + i;
    *place(head.exact_pages, row) = words;
    // Rows in slow memory are written through: this page is in device memory, and the row has a
    // second copy in its final page.
    if (head.slow != nullptr && head.slow->packed == 0) *place(head.slow->pages, row) = words;
  }
}

struct AcceptQueriesParams {
  std::uint16_t* ring = nullptr;  ///< [slots, q_heads, head_dim]: queries.cuh
  int slots = 0;
  int numbers = 0;  ///< q_heads * head_dim
  PathPart path;
};

/// One thread for each 16 bytes of a token's queries.
template <int Threads = accept_threads>
KVPOLICY_KERNEL(Threads, 1)
accept_queries_kernel(const KVPOLICY_GRID_CONSTANT AcceptQueriesParams p) {
  const int vector = block_x() * Threads + thread_index();
  if (vector >= p.numbers / 8) return;
  const auto place = [&](int token) {
    const auto slot = static_cast<long long>(token % p.slots);
    return reinterpret_cast<Words4*>(p.ring + slot * p.numbers) + vector;
  };
  for (int i = 0; i < p.path.count; ++i) {
    *place(p.path.root + p.path.first + i) = *place(p.path.root + p.path.node[i]);
  }
}

}  // namespace kvpolicy::gpu
