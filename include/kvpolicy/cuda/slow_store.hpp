// SPDX-License-Identifier: Apache-2.0
//
// What of a head whose rows are in slow memory lies on the device: the latest pages, the rows of the
// chosen chunks, and the table by which kernels find a page, near or far (kernels/slow_rows.cuh).
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <kvpolicy/cuda/kernels/slow_rows.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/pages.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::cuda {

/// How large it all is.
struct SlowGeometry {
  bool packed = false;  ///< the packed pages are the slow ones, not the exact ones
  std::size_t page_bytes = 0;
  std::size_t latest_pages = 1;
  std::size_t chosen_pages = 0;  ///< for the rows of a choice
  std::size_t shift_pages = 0;   ///< by which a selected read numbers its rows higher; at least so many
  std::size_t page_rows = 64;
  std::size_t budget_chunks = 0;  ///< 0: the head does not select

  [[nodiscard]] std::size_t bytes() const { return (latest_pages + chosen_pages) * page_bytes; }
};

/// Where a head's pages lie among those that a layer has staged.
struct StagePlace {
  std::size_t bytes = 0;  ///< of the heads before
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
  [[nodiscard]] std::size_t overhead_bytes() const { return notes_bytes() + table_bytes(places_); }
  [[nodiscard]] SlowRows* device() const { return reinterpret_cast<SlowRows*>(notes_.get()); }
  /// Of the slow pages, as the HeadView has it; with the chosen rows in front, the second one's.
  [[nodiscard]] std::byte** table() const {
    auto* entries = reinterpret_cast<std::byte**>(table_.get());
    return entries == nullptr ? nullptr : entries + geometry_.shift_pages;
  }
  [[nodiscard]] std::byte** shifted_table() const { return reinterpret_cast<std::byte**>(table_.get()); }
  [[nodiscard]] Selections* chosen() const {
    return geometry_.budget_chunks == 0 ? nullptr : reinterpret_cast<Selections*>(state() + 1);
  }
  /// Of `entered` pages, those that will never be written again and must be staged to be near.
  [[nodiscard]] std::size_t far_pages(std::size_t entered) const {
    return entered - std::min(entered, geometry_.latest_pages);
  }
  void set_stage_place(const StagePlace& place) { stage_ = place; }
  [[nodiscard]] const StagePlace& stage_place() const { return stage_; }

  /// What a new store says before its first kernel: nothing is gathered.
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
  /// Tells the kernels where everything is. `home`: the pages in slow memory.
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
    DeviceBuffer table;  ///< null: the old one has places for all
    std::size_t places = 0;
  };
  /// For at least `count` pages. @throws std::bad_alloc
  [[nodiscard]] Growth prepare(std::size_t count, cudaStream_t stream) const {
    Growth growth;
    if (count <= places_) return growth;
    growth.places = std::max<std::size_t>({count, 2 * places_, 16});
    growth.table = allocate(memory_, table_bytes(growth.places), stream);
    return growth;
  }
  /// `home` has grown from `before` pages; the text has come to `entered`. The old table comes back in
  /// `growth`.
  void grow(Growth& growth, const Pages& home, std::size_t before, std::size_t entered,
            DeviceWrites& writes) {
    std::size_t first = before;
    if (growth.places > 0) {
      std::swap(table_, growth.table);
      places_ = growth.places;
      first = 0;
      for (std::size_t i = 0; i < geometry_.chosen_pages; ++i) {
        std::byte* page = rows_.get() + (geometry_.latest_pages + i) * geometry_.page_bytes;
        writes.write(shifted_table() + i, page);
      }
    }
    for (std::size_t i = first; i < home.count(); ++i) {
      const bool near = i < entered && i + geometry_.latest_pages >= entered;
      writes.write(table() + i, near ? near_page(i) : home.page(i));
    }
    describe(home, writes);
  }
  /// Where a page lies that is among the latest.
  [[nodiscard]] std::byte* near_page(std::size_t page) const {
    return rows_.get() + page % geometry_.latest_pages * geometry_.page_bytes;
  }
  /// Takes the latest pages of another store. What was chosen there is gathered again.
  /// @throws DeviceError
  void copy_latest(const SlowStore& from, std::size_t entered, cudaStream_t stream) const {
    const std::size_t pages = std::min(entered, geometry_.latest_pages);
    if (pages == 0) return;
    check(cudaMemcpyAsync(rows_.get(), from.rows_.get(), pages * geometry_.page_bytes,
                          cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  }
  /// Where the memory goes back.
  void give_back_on(cudaStream_t stream) noexcept {
    for (const DeviceBuffer* block : {&rows_, &notes_, &table_}) cuda::give_back_on(*block, stream);
  }

 private:
  static_assert(sizeof(SlowRows) % 8 == 0 && sizeof(SlowState) % 8 == 0);

  [[nodiscard]] SlowState* state() const { return reinterpret_cast<SlowState*>(device() + 1); }
  [[nodiscard]] std::size_t notes_bytes() const {
    const std::size_t chosen =
        geometry_.budget_chunks == 0 ? 0 : sizeof(Selections) + (3 + geometry_.budget_chunks) * sizeof(int);
    return sizeof(SlowRows) + sizeof(SlowState) + chosen;
  }
  [[nodiscard]] std::size_t table_bytes(std::size_t places) const {
    return places == 0 ? 0 : (geometry_.shift_pages + places) * sizeof(std::byte*);
  }

  SlowGeometry geometry_;
  MemoryResource* memory_;
  DeviceBuffer rows_;   // the latest pages, then the chosen rows
  DeviceBuffer notes_;  // SlowRows, SlowState, what is chosen
  DeviceBuffer table_;
  std::size_t places_ = 0;  // of the table, after the chosen rows
  StagePlace stage_;
};

}  // namespace kvpolicy::cuda
