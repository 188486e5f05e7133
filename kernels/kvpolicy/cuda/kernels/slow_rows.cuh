// SPDX-License-Identifier: Apache-2.0
//
// Heads that keep every row may have their rows in slow memory: host memory that kernels address
// through a bus. Of a head that quantises its rows those are the packed ones; its sinks and its
// latest rows are exact, and in device memory. Slow pages are written through: each row is written
// to its final page there, and also to one of a ring of pages in device memory, which has the latest
// rows. So the rows that every step reads (those after a selection, those that may be taken back,
// the page that is not full) are in device memory, and slow memory has all rows.
//
// The page table decides which of the two a kernel reads. Reading kernels do not know about slow
// memory. Writing kernels (append.cuh, quantize.cuh) call `addresses_of_page` and update the table
// with `enter_pages`, on the device, so that a captured step can be replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// What changes from step to step.
struct SlowState {
  int entered = 0;            ///< pages in use so far; the last latest_pages of them are in device memory
  int gathered = -1;          ///< chunks of the latest selection that were copied (gather.cuh); -1: unknown
  std::uint32_t tickets = 0;  ///< tickets of gather_kernel; 0 before and after a call
  int unused = 0;
};

/// Describes a head whose pages are in slow memory: its packed pages if `packed`, otherwise its
/// exact pages, which are not a ring and begin with row 0. It never drops a row. Sinks are never packed,
/// and an exact head has none.
struct SlowRows {
  SlowState* state = nullptr;
  std::byte* const* pages = nullptr;  ///< final address of each page
  /// Address from which each page is read; the page table of the HeadView. Before entry 0 are the
  /// entries of the copied (gathered) rows, for `shift` rows.
  std::byte** table = nullptr;
  std::byte* latest = nullptr;  ///< [latest_pages, page_bytes]: page p at p % latest_pages
  long long page_bytes = 0;
  int latest_pages = 1;
  int packed = 0;
  // Where rows are that were copied to the device for one call (stage.cuh).
  long long staged_bytes = 0;  ///< bytes of the heads before this one
  long long staged_pages = 0;
  // A selecting head also has a second HeadView, in which the copied rows come before row 0: all
  // row numbers are larger by `shift`, and `chosen` lists chunks by these numbers.
  Selections* chosen = nullptr;
  long long shift = 0;

  KVPOLICY_DEVICE std::byte* latest_page(int page) const { return latest + page % latest_pages * page_bytes; }
};

/// Number of pages that a text of this length uses.
KVPOLICY_HOST_DEVICE int pages_come_to(const HeadView& head, bool packed, int page_rows,
                                       const LayerState& state) {
  const int rows = packed
                       ? larger(head.keys_end(state.committed), head.values_end(state.committed)) - head.sinks
                       : state.tokens - head.evicted;
  return quotient_up(rows, page_rows);
}

/// The addresses to which a page must be written.
struct PageAddresses {
  std::byte* first;
  std::byte* second;  ///< or null
};
/// `entered` is the number of pages that the text uses after the call (for a head in slow memory).
KVPOLICY_DEVICE PageAddresses addresses_of_page(const HeadView& head, bool packed, int page, int entered) {
  const SlowRows* slow = head.slow;
  if (slow == nullptr || (slow->packed != 0) != packed) {
    return {(packed ? head.packed_pages : head.exact_pages)[page], nullptr};
  }
  return {slow->pages[page], page >= entered - slow->latest_pages ? slow->latest_page(page) : nullptr};
}

/// Updates the page table when a text grows from `before` to `after` pages: kernels then find the
/// latest pages in device memory and older ones in slow memory. Called by all threads of a block,
/// after the last read of the table. Does nothing if `after` is not larger.
KVPOLICY_DEVICE void enter_pages(const SlowRows& slow, int before, int after) {
  if (after <= before) return;
  const int near = after - slow.latest_pages;
  for (int page = larger(before - slow.latest_pages, 0) + thread_index(); page < after;
       page += thread_count()) {
    if (page >= near) {
      if (page >= before) slow.table[page] = slow.latest_page(page);
    } else if (page < before) {
      slow.table[page] = slow.pages[page];
    }
  }
  if (thread_index() == 0) slow.state->entered = after;
}

/// Parameters of the update after a long call (write_kernel), whose blocks share a head.
struct EnterParams {
  const HeadView* heads = nullptr;     ///< [sequences, kv_heads]
  const LayerState* states = nullptr;  ///< [sequences]
  int kv_heads = 0;
  int page_rows = 64;
};

inline constexpr int enter_threads = 128;

/// Grid (sequences * kv_heads).
template <int Threads = enter_threads>
KVPOLICY_KERNEL(Threads, 1)
enter_kernel(const KVPOLICY_GRID_CONSTANT EnterParams p) {
  const HeadView& head = p.heads[block_x()];
  if (head.slow == nullptr) return;
  const SlowRows& slow = *head.slow;
  const int before = slow.state->entered;
  const int after = pages_come_to(head, slow.packed != 0, p.page_rows, p.states[block_x() / p.kv_heads]);
  sync_block();  // every thread has read what thread 0 changes
  enter_pages(slow, before, after);
}

}  // namespace kvpolicy::gpu
