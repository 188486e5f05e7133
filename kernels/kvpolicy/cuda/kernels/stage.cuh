// SPDX-License-Identifier: Apache-2.0
//
// Describes the heads of a layer for one call that reads all rows of heads in slow memory
// (slow_rows.cuh): their pages have been copied to a buffer on the device, but for the latest ones,
// which are near anyway. The tables are made anew for each call: next to what the bus has moved for
// it they are nothing, and nobody has to keep them right while pages come and go.
#pragma once

#include <cstddef>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::cuda {

/// All pointers are the device's.
struct StageParams {
  const HeadView* from = nullptr;     ///< [kv_heads], as the call would read them elsewhere
  const LayerState* state = nullptr;
  int page_rows = 64;
  bool selected = false;              ///< heads that select stay as they are
  std::byte* rows = nullptr;          ///< the buffer
  std::byte** table = nullptr;        ///< of all its pages
  HeadView* to = nullptr;             ///< [kv_heads]
};

inline constexpr int stage_threads = 128;

/// Grid (any, kv_heads).
template <int Threads = stage_threads>
KVPOLICY_KERNEL(Threads, 1)
stage_kernel(const KVPOLICY_GRID_CONSTANT StageParams p) {
  const HeadView& head = p.from[block_y()];
  const SlowRows* slow = head.slow;
  const bool staged = slow != nullptr && !(p.selected && head.chunk_rows > 0);
  std::byte** table = staged ? p.table + slow->staged_pages : nullptr;
  if (block_x() == 0 && thread_index() == 0) {
    HeadView view = head;
    if (staged) (slow->packed != 0 ? view.packed_pages : view.exact_pages) = table;
    p.to[block_y()] = view;
  }
  if (!staged) return;
  const int pages = pages_come_to(head, slow->packed != 0, p.page_rows, *p.state);
  const int near = slow->state->entered - slow->latest_pages;
  for (int page = block_x() * Threads + thread_index(); page < pages; page += grid_x() * Threads) {
    table[page] =
        page >= near ? slow->table[page] : p.rows + slow->staged_bytes + page * slow->page_bytes;
  }
}

}  // namespace kvpolicy::cuda
