// SPDX-License-Identifier: Apache-2.0
//
// Device memory of reads with a bound (Read::bounded): how much one takes, and the room of a cache whose calls are
// recorded in graphs, which cannot ask for any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/bound.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// What the memory of a call goes by.
struct BoundExtent {
  int kv_heads = 0;
  int columns = 0;  ///< queries times the query heads of a group
  int units = 0;    ///< of a head; 0: nothing is bounded
  int blocks = 1;   ///< that share a head

  /// For texts of `rows`.
  [[nodiscard]] static BoundExtent of(std::size_t rows, int kv_heads, int columns, int multiprocessors) {
    BoundExtent extent{.kv_heads = kv_heads,
                       .columns = columns,
                       .units = static_cast<int>(rows / static_cast<std::size_t>(tile_rows))};
    const int pairs_of_block = 2 * bound_threads / warp_lanes;
    extent.blocks = std::clamp(extent.units / pairs_of_block, 1, quotient_up(2 * multiprocessors, kv_heads));
    return extent;
  }
  /// Its arrays in a block that starts at the carver's.
  [[nodiscard]] BoundMemory carve(ArrayCarver& carver) const {
    const auto heads = static_cast<std::size_t>(kv_heads);
    const auto each = static_cast<std::size_t>(units);
    const auto queries = static_cast<std::size_t>(columns);
    return {.heads = carver.take<HeadView>(heads),
            .choices = carver.take<Selections>(heads),
            .ends = carver.take<int>(heads),
            .counts = carver.take<int>(heads),
            .chosen = carver.take<int>(heads * each),
            .most = carver.take<float>(heads * queries * each),
            .likely = carver.take<float>(heads * queries * each),
            .largest = carver.take<float>(heads * each),
            .slack = carver.take<float>(heads * static_cast<std::size_t>(blocks) * queries),
            .log_sum_exp = carver.take<float>(heads * queries),
            .again = carver.take<CallSequence>(1)};
  }
  [[nodiscard]] std::size_t bytes() const {
    ArrayCarver counting;
    static_cast<void>(carve(counting));
    return counting.bytes();
  }
};

/// The room of one cache, which all its layers use, one after another. Rooms that it has outgrown stay, because graphs
/// that were recorded before go on using them.
class BoundRoom {
 public:
  /// Makes room for calls of any size over texts of `rows`, and where it grows for twice what it had, up to `most`
  /// rows: all rooms of a text that grows take about twice the last one. @throws std::bad_alloc, DeviceError
  void reserve(std::size_t rows, std::size_t most, int kv_heads, int multiprocessors, MemoryResource* memory,
               cudaStream_t stream) {
    if (rows <= rows_) return;
    rows = std::max(rows, std::min(2 * rows_, most));
    const std::size_t bytes = BoundExtent::of(rows, kv_heads, decode_most_columns, multiprocessors).bytes();
    rooms_.reserve(rooms_.size() + 1);
    rooms_.push_back(allocate(memory, bytes, stream));
    rows_ = rows;
    bytes_ += bytes;
  }
  /// Rows of a text that there is room for.
  [[nodiscard]] std::size_t rows() const { return rows_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] std::byte* get() const { return rooms_.empty() ? nullptr : rooms_.back().get(); }
  void give_back_on(const LastUse& use) noexcept {
    for (DeviceBuffer& room : rooms_) room.give_back_on(use);
  }

 private:
  std::vector<DeviceBuffer> rooms_;
  std::size_t rows_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace kvpolicy::gpu
