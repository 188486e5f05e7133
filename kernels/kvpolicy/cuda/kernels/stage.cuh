// SPDX-License-Identifier: Apache-2.0
//
// Describes the heads of a layer for one call that reads all rows of heads in slow memory
// (slow_rows.cuh). Their pages were copied to a buffer on the device, except the latest pages,
// which are in device memory anyway. The tables are rebuilt for each call: they are small compared
// with the copied rows, and need not be maintained while pages change.
#pragma once

#include <cstddef>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>

namespace kvpolicy::gpu {

/// All pointers are device pointers.
struct StageParams {
  const HeadView* from = nullptr;  ///< [kv_heads], without staged pages
  const LayerState* state = nullptr;
  int page_rows = 64;
  bool selected = false;        ///< selecting heads are not changed
  std::byte* rows = nullptr;    ///< the buffer
  std::byte** table = nullptr;  ///< page table of the buffer
  HeadView* to = nullptr;       ///< [kv_heads]
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
    table[page] = page >= near ? slow->table[page] : p.rows + slow->staged_bytes + page * slow->page_bytes;
  }
}

}  // namespace kvpolicy::gpu
