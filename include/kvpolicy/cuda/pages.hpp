// SPDX-License-Identifier: Apache-2.0
//
// Pages of one kind of one head, and the table by which kernels find them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::cuda {

/// Grows at its end, many pages to an allocation (a slab). Forks share slabs.
class Pages {
 public:
  Pages(MemoryResource* memory, std::size_t page_bytes) : memory_{memory}, page_bytes_{page_bytes} {}

  [[nodiscard]] std::size_t count() const { return pages_.size(); }
  /// Of all slabs that live because of these pages.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = 0;
    for (const Slab& slab : slabs_) total += slab.pages * page_bytes_;
    return total;
  }
  /// Of them, bytes that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    std::size_t total = 0;
    for (const Slab& slab : slabs_) total += slab.memory.use_count() > 1 ? slab.pages * page_bytes_ : 0;
    return total;
  }
  [[nodiscard]] std::size_t table_bytes() const { return table_places_ * sizeof(std::byte*); }
  [[nodiscard]] std::byte* const* table() const {
    return reinterpret_cast<std::byte* const*>(table_.get());
  }
  [[nodiscard]] const std::byte* page(std::size_t index) const { return pages_[index]; }

  /// At least `count` pages from now on. @throws std::bad_alloc, with the pages as they were
  void grow(std::size_t count, DeviceWrites& writes) {
    if (count <= pages_.size()) return;
    reserve_table(count, writes);
    pages_.reserve(count);
    slabs_.reserve(slabs_.size() + 1);
    const std::size_t first = pages_.size();
    slabs_.push_back({allocate(memory_, (count - first) * page_bytes_, writes.stream()), count - first});
    for (std::size_t i = first; i < count; ++i) {
      pages_.push_back(slabs_.back().memory.get() + (i - first) * page_bytes_);
      write_entry(i, writes);
    }
  }

  /// The first `shared` pages in common with this one, copies of the next ones up to `count`.
  [[nodiscard]] Pages fork(std::size_t shared, std::size_t count, DeviceWrites& writes) const {
    Pages other{memory_, page_bytes_};
    count = std::min(count, pages_.size());
    shared = std::min(shared, count);
    if (count == 0) return other;
    other.reserve_table(count, writes);
    std::size_t first = 0;  // page of a slab
    for (const Slab& slab : slabs_) {
      if (first < shared) other.slabs_.push_back(slab);
      first += slab.pages;
    }
    other.pages_.assign(pages_.begin(), pages_.begin() + static_cast<std::ptrdiff_t>(shared));
    for (std::size_t i = 0; i < shared; ++i) other.write_entry(i, writes);
    other.grow(count, writes);
    for (std::size_t i = shared; i < count; ++i) {
      check(cudaMemcpyAsync(other.pages_[i], pages_[i], page_bytes_, cudaMemcpyDeviceToDevice,
                            writes.stream()),
            "cudaMemcpyAsync");
    }
    return other;
  }

 private:
  struct Slab {
    Block memory;
    std::size_t pages;
  };

  // A table that grew lies elsewhere; the old one is freed behind the work that reads it.
  void reserve_table(std::size_t count, DeviceWrites& writes) {
    if (count <= table_places_) return;
    const std::size_t places = std::max<std::size_t>({count, 2 * table_places_, 16});
    Block table = allocate(memory_, places * sizeof(std::byte*), writes.stream());
    writes.flush();  // nothing may still be on its way to the old one
    table_ = std::move(table);
    table_places_ = places;
    for (std::size_t i = 0; i < pages_.size(); ++i) write_entry(i, writes);
  }
  void write_entry(std::size_t index, DeviceWrites& writes) {
    auto* entries = reinterpret_cast<std::byte**>(table_.get());
    writes.write(entries + index, pages_[index]);
  }

  MemoryResource* memory_;
  std::size_t page_bytes_;
  std::vector<Slab> slabs_;         // in the order of their pages
  std::vector<std::byte*> pages_;
  Block table_;
  std::size_t table_places_ = 0;
};

}  // namespace kvpolicy::cuda
