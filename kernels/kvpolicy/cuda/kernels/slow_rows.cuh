// SPDX-License-Identifier: Apache-2.0
//
// Heads that keep every row may have their rows in slow memory: memory of the host that kernels can
// address, but through a bus. Its pages are written through: each row goes to its page there, which
// is its place for good, and to one of a ring of pages on the device as long as it is among the
// latest. So what is read in every step (rows since a choice of chunks, rows that may be taken back,
// the page that is still open) is near, and all of it can be brought anywhere from one place.
//
// Which of the two a kernel finds follows from the page table alone. Kernels that read know nothing
// of slow memory; those that write (append.cuh, quantize.cuh) ask `places_of_page` and move the table
// on with `enter_pages`, on the device, so that a captured step can be replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

/// What changes from step to step.
struct SlowState {
  int entered = 0;    ///< pages that rows ever came to; the last latest_pages of them are near
  int gathered = -1;  ///< chunks of the latest choice whose rows are near (gather.cuh); -1: not even known
  std::uint32_t tickets = 0;  ///< of gather_kernel; 0 before and after a call
  int unused = 0;
};

/// Of a head whose pages (`packed`: its packed ones, else its exact ones, which lie in a line) are in
/// slow memory. It has no sinks and never loses a row.
struct SlowRows {
  SlowState* state = nullptr;
  std::byte* const* pages = nullptr;  ///< where each page lies for good
  /// Where it is read; the page table of the HeadView. In front of entry 0 stand those of the rows
  /// that are gathered: `shift` rows' worth.
  std::byte** table = nullptr;
  std::byte* latest = nullptr;        ///< [latest_pages, page_bytes]: page p at p % latest_pages
  long long page_bytes = 0;
  int latest_pages = 1;
  int packed = 0;
  // Where rows lie when they have been brought to the device for one call (stage.cuh).
  long long staged_bytes = 0;  ///< of the heads before this one
  long long staged_pages = 0;
  // A head that selects also has a second HeadView, in which the gathered rows come before row 0:
  // all row numbers are larger by `shift`, and `chosen` lists chunks by these numbers.
  Selections* chosen = nullptr;
  long long shift = 0;

  KVPOLICY_DEVICE std::byte* near_page(int page) const {
    return latest + page % latest_pages * page_bytes;
  }
};

/// Pages that a text of this length has come to.
KVPOLICY_HOST_DEVICE int pages_come_to(const HeadView& head, bool packed, int page_rows,
                                       const LayerState& state) {
  const int rows = packed ? head.packed_end(state.committed) - head.sinks : state.tokens - head.evicted;
  return quotient_up(rows, page_rows);
}

/// Where a page must be written.
struct PagePlaces {
  std::byte* place;
  std::byte* second;  ///< or null
};
/// `entered`: pages that the text has come to once the call is done (of a head in slow memory).
KVPOLICY_DEVICE PagePlaces places_of_page(const HeadView& head, bool packed, int page, int entered) {
  const SlowRows* slow = head.slow;
  if (slow == nullptr || (slow->packed != 0) != packed) {
    return {(packed ? head.packed_pages : head.exact_pages)[page], nullptr};
  }
  return {slow->pages[page], page >= entered - slow->latest_pages ? slow->near_page(page) : nullptr};
}

/// Lets kernels find the latest pages near and those before them in slow memory, from `before` pages
/// that the text had come to until now. For all threads of a block, when none reads the table any
/// more. Nothing to do where `after` is not larger.
KVPOLICY_DEVICE void enter_pages(const SlowRows& slow, int before, int after) {
  if (after <= before) return;
  const int near = after - slow.latest_pages;
  for (int page = larger(before - slow.latest_pages, 0) + thread_index(); page < after;
       page += thread_count()) {
    if (page >= near) {
      if (page >= before) slow.table[page] = slow.near_page(page);
    } else if (page < before) {
      slow.table[page] = slow.pages[page];
    }
  }
  if (thread_index() == 0) slow.state->entered = after;
}

/// Behind a long call (write_kernel), whose blocks share a head.
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
  const int after =
      pages_come_to(head, slow.packed != 0, p.page_rows, p.states[block_x() / p.kv_heads]);
  sync_block();  // every thread has read what the first one changes
  enter_pages(slow, before, after);
}

}  // namespace kvpolicy::cuda
