// SPDX-License-Identifier: Apache-2.0
//
// The device memory of a head whose rows are in slow memory: copies of the latest pages, copies of the chosen
// rows, and the page table, which says for each page whether kernels read the copy or slow memory
// (kernels/slow_rows.cuh).
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <kvpolicy/cuda/kernels/slow_rows.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/pages.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// The sizes of a SlowStore.
struct SlowGeometry {
  bool packed = false;  ///< the packed pages are the slow ones, not the exact ones
  std::size_t page_bytes = 0;
  std::size_t latest_pages = 1;
  std::size_t chosen_pages = 0;  ///< pages that the chosen rows of one selection take
  /// A selected read sees the copies of the chosen rows as the head's first rows, and all other rows under numbers
  /// that are higher by this many pages: `chosen_pages`, rounded up so that rings keep their slots.
  std::size_t shift_pages = 0;
  std::size_t page_rows = 64;
  std::size_t budget_chunks = 0;  ///< 0: the head does not select

  [[nodiscard]] std::size_t bytes() const { return (latest_pages + chosen_pages) * page_bytes; }
};

/// Where a head's pages are in its layer's staging buffer: after so many bytes and pages of the heads before it.
struct StageOffset {
  std::size_t bytes = 0;
  std::size_t pages = 0;
};

/// Not synchronised; work goes on the stream of `writes`.
class SlowStore {
 public:
  /// @throws std::bad_alloc, DeviceError
  SlowStore(const SlowGeometry& geometry, MemoryResource* memory, cudaStream_t stream)
      : geometry_{geometry},
        memory_{memory},
        rows_{allocate(memory, geometry.bytes(), stream)},
        notes_{allocate(memory, notes_bytes(), stream)} {}

  [[nodiscard]] const SlowGeometry& geometry() const { return geometry_; }
  [[nodiscard]] std::size_t bytes() const { return geometry_.bytes(); }
  [[nodiscard]] std::size_t overhead_bytes() const { return notes_bytes() + table_bytes(entries_); }
  [[nodiscard]] SlowRows* device() const { return reinterpret_cast<SlowRows*>(notes_.get()); }
  /// The page table that the HeadView has: one entry for each page of the head. Entries for the copies of chosen rows
  /// stand in front of it, at `shifted_table()`, which is the page table of a selected read.
  [[nodiscard]] std::byte** table() const {
    auto* entries = reinterpret_cast<std::byte**>(table_.get());
    return entries == nullptr ? nullptr : entries + geometry_.shift_pages;
  }
  [[nodiscard]] std::byte** shifted_table() const { return reinterpret_cast<std::byte**>(table_.get()); }
  [[nodiscard]] Selections* chosen() const {
    return geometry_.budget_chunks == 0 ? nullptr : reinterpret_cast<Selections*>(state() + 1);
  }
  /// How many of the first `entered` pages are in slow memory only: they are never written again, and must be staged
  /// to be read from device memory.
  [[nodiscard]] std::size_t slow_only_pages(std::size_t entered) const {
    return entered - std::min(entered, geometry_.latest_pages);
  }
  void set_stage_offset(const StageOffset& offset) { stage_ = offset; }
  [[nodiscard]] const StageOffset& stage_offset() const { return stage_; }

  /// Writes the state of a new store, in which no chosen rows are copied. To be called before its first kernel.
  void begin(std::size_t entered, DeviceWrites& writes) const {
    writes.write(state(), SlowState{.entered = static_cast<int>(entered)});
    if (chosen() == nullptr) return;
    auto* numbers = reinterpret_cast<int*>(chosen() + 1);
    writes.write(chosen(), Selections{.latest = 0,
                                      .valid = 0,
                                      .slots = 1,
                                      .tokens = numbers,
                                      .ends = numbers + 1,
                                      .counts = numbers + 2,
                                      .chunks = numbers + 3});
  }
  /// Writes the description that kernels read. `home`: the pages in slow memory.
  void describe(const Pages& home, DeviceWrites& writes) const {
    writes.write(device(), SlowRows{.state = state(),
                                    .pages = home.table(),
                                    .table = table(),
                                    .latest = rows_.get(),
                                    .page_bytes = static_cast<long long>(geometry_.page_bytes),
                                    .latest_pages = static_cast<int>(geometry_.latest_pages),
                                    .packed = geometry_.packed ? 1 : 0,
                                    .staged_bytes = static_cast<long long>(stage_.bytes),
                                    .staged_pages = static_cast<long long>(stage_.pages),
                                    .chosen = chosen(),
                                    .shift = shift_rows()});
  }
  [[nodiscard]] long long shift_rows() const {
    return static_cast<long long>(geometry_.shift_pages * geometry_.page_rows);
  }

  /// A table for more pages, obtained before anything changes.
  struct Growth {
    DeviceBuffer table;  ///< null: the old table has entries for all
    std::size_t entries = 0;
  };
  /// For at least `count` pages. @throws std::bad_alloc
  [[nodiscard]] Growth prepare(std::size_t count, cudaStream_t stream) const {
    Growth growth;
    if (count <= entries_) return growth;
    growth.entries = std::max<std::size_t>({count, 2 * entries_, 16});
    growth.table = allocate(memory_, table_bytes(growth.entries), stream);
    return growth;
  }
  /// Adds the pages of `home` from number `before` on to the table. The text has reached `entered` pages. The old
  /// table is returned in `growth`.
  void grow(Growth& growth, const Pages& home, std::size_t before, std::size_t entered,
            DeviceWrites& writes) {
    std::size_t first = before;
    if (growth.entries > 0) {
      std::swap(table_, growth.table);
      entries_ = growth.entries;
      first = 0;
      for (std::size_t i = 0; i < geometry_.chosen_pages; ++i) {
        std::byte* page = rows_.get() + (geometry_.latest_pages + i) * geometry_.page_bytes;
        writes.write(shifted_table() + i, page);
      }
    }
    for (std::size_t i = first; i < home.count(); ++i) {
      const bool is_latest = i < entered && i + geometry_.latest_pages >= entered;
      writes.write(table() + i, is_latest ? latest_page(i) : home.page(i));
    }
    describe(home, writes);
  }
  /// The address of the device's copy of a page that is among the latest.
  [[nodiscard]] std::byte* latest_page(std::size_t page) const {
    return rows_.get() + page % geometry_.latest_pages * geometry_.page_bytes;
  }
  /// Copies the latest pages of another store. Chosen rows are not copied, but gathered again.
  /// @throws DeviceError
  void copy_latest(const SlowStore& from, std::size_t entered, cudaStream_t stream) const {
    const std::size_t pages = std::min(entered, geometry_.latest_pages);
    if (pages == 0) return;
    check(cudaMemcpyAsync(rows_.get(), from.rows_.get(), pages * geometry_.page_bytes,
                          cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  }
  /// Frees the memory on this stream.
  void give_back_on(const LastUse& use) noexcept {
    for (DeviceBuffer* block : {&rows_, &notes_, &table_}) block->give_back_on(use);
  }

 private:
  static_assert(sizeof(SlowRows) % 8 == 0 && sizeof(SlowState) % 8 == 0);

  [[nodiscard]] SlowState* state() const { return reinterpret_cast<SlowState*>(device() + 1); }
  [[nodiscard]] std::size_t notes_bytes() const {
    const std::size_t chosen =
        geometry_.budget_chunks == 0 ? 0 : sizeof(Selections) + (3 + geometry_.budget_chunks) * sizeof(int);
    return sizeof(SlowRows) + sizeof(SlowState) + chosen;
  }
  [[nodiscard]] std::size_t table_bytes(std::size_t entries) const {
    return entries == 0 ? 0 : (geometry_.shift_pages + entries) * sizeof(std::byte*);
  }

  SlowGeometry geometry_;
  MemoryResource* memory_;
  DeviceBuffer rows_;   // the latest pages, then the chosen rows
  DeviceBuffer notes_;  // SlowRows, SlowState, what is chosen
  DeviceBuffer table_;
  std::size_t entries_ = 0;  // of the table, besides those for the chosen rows
  StageOffset stage_;
};

}  // namespace kvpolicy::gpu
