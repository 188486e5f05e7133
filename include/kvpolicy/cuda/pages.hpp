// SPDX-License-Identifier: Apache-2.0
//
// Pages of one kind of one head, and the table by which kernels find them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/pool_pages.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// Grows at its end, many pages to an allocation (a slab), or by pages of a pool. Forks share slabs, and a
/// pool's pages one by one.
class Pages {
 public:
  /// `table_memory`: where the table lies, if the pages lie in memory that is slower to look into.
  Pages(MemoryResource* memory, std::size_t page_bytes, MemoryResource* table_memory = nullptr)
      : memory_{memory},
        table_memory_{table_memory == nullptr ? memory : table_memory},
        page_bytes_{page_bytes} {}

  /// Pages of a tier of `pool`; the table lies in `table_memory`.
  Pages(PagePool& pool, std::size_t tier, std::size_t page_bytes, MemoryResource* table_memory)
      : memory_{table_memory}, table_memory_{table_memory}, page_bytes_{page_bytes}, of_pool_{&pool, tier} {}

  [[nodiscard]] std::size_t count() const { return pages_.size(); }
  /// The ids of the pages in the pool; empty if there is no pool.
  [[nodiscard]] std::span<const PageId> ids() const { return of_pool_.ids(); }
  [[nodiscard]] std::size_t page_bytes() const { return page_bytes_; }
  /// Bytes of these pages. Without a pool: of all slabs that cannot be freed because of them.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = ids().size() * page_bytes_;
    for (const Slab& slab : slabs_) total += slab.pages * page_bytes_;
    return total;
  }
  /// The part of `bytes()` that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    std::size_t total = of_pool_.shared_pages() * page_bytes_;
    for (const Slab& slab : slabs_) total += slab.memory.is_shared() ? slab.pages * page_bytes_ : 0;
    return total;
  }
  [[nodiscard]] std::size_t table_bytes() const { return table_entries_ * sizeof(std::byte*); }
  [[nodiscard]] std::byte* const* table() const { return reinterpret_cast<std::byte* const*>(table_.get()); }
  [[nodiscard]] std::byte* page(std::size_t index) const { return pages_[index]; }
  /// Puts a copy of a page on the stream, in which rows are contiguous. @throws DeviceError
  void copy_page(std::size_t index, std::byte* to, cudaStream_t stream) const {
    if (in_engine()) return copy_page_rows(to, contiguous(), pages_[index], engine_rows(), stream);
    check(cudaMemcpyAsync(to, pages_[index], page_bytes_, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  }
  /// Puts copies of the pages [first, last) on the stream, page i to i pages after `to`.
  /// Rows are contiguous there. @throws DeviceError
  void copy(std::size_t first, std::size_t last, std::byte* to, cudaStream_t stream) const {
    if (in_engine()) {
      for (std::size_t i = first; i < last; ++i) copy_page(i, to + i * page_bytes_, stream);
      return;
    }
    while (first < last) {
      const std::size_t end = end_of_run(first, last);
      check(cudaMemcpyAsync(to + first * page_bytes_, pages_[first], (end - first) * page_bytes_,
                            cudaMemcpyDefault, stream),
            "cudaMemcpyAsync");
      first = end;
    }
  }

  /// Memory for more pages, obtained before anything changes.
  struct Growth {
    std::size_t count = 0;  ///< pages afterwards; 0: as many as now
    DeviceBuffer slab;
    PoolPages of_pool = PoolPages{};
    DeviceBuffer table;  ///< null: the old one has entries for all
    std::size_t entries = 0;
  };
  /// For at least `count` pages. @throws std::bad_alloc
  [[nodiscard]] Growth prepare(std::size_t count, cudaStream_t stream) {
    if (count <= pages_.size()) return {};
    Growth growth;
    growth.count = count;
    if (count > table_entries_) {
      growth.entries = std::max<std::size_t>({count, 2 * table_entries_, 16});
      growth.table = allocate(table_memory_, growth.entries * sizeof(std::byte*), stream);
    }
    pages_.reserve(count);
    if (of_pool_.pool() != nullptr) {
      of_pool_.reserve(count);
      growth.of_pool = of_pool_.empty();
      growth.of_pool.allocate(page_bytes_, count - pages_.size());
      return growth;
    }
    slabs_.reserve(slabs_.size() + 1);
    growth.slab = allocate(memory_, (count - pages_.size()) * page_bytes_, stream);
    return growth;
  }
  /// The old table is for the caller to keep until nothing reads it any more: it comes back in
  /// `growth`. @throws DeviceError
  void grow(Growth& growth, DeviceWrites& writes) {
    if (growth.count == 0) return;
    const std::size_t first = pages_.size();
    if (of_pool_.pool() != nullptr) {
      for (const PageId page : growth.of_pool.ids()) pages_.push_back(of_pool_.pool()->address(page));
      of_pool_.take(growth.of_pool);
    } else {
      for (std::size_t i = first; i < growth.count; ++i) {
        pages_.push_back(growth.slab.get() + (i - first) * page_bytes_);
      }
      slabs_.push_back({std::move(growth.slab), growth.count - first, growth.count - first});
    }
    if (growth.entries > 0) {
      std::swap(table_, growth.table);
      table_entries_ = growth.entries;
    }
    for (std::size_t i = growth.entries > 0 ? 0 : first; i < growth.count; ++i) write_entry(i, writes);
  }
  // ---- a sequence that waits (swapped_cache.hpp)

  /// Bytes of all pages, wherever they are.
  [[nodiscard]] std::size_t page_total() const { return pages_.size() * page_bytes_; }
  /// Puts copies of all pages on the stream, one after another from `to` on, and lets go of the pages. The table
  /// stays, and must not be read. @throws DeviceError
  void move_out(std::byte* to, cudaStream_t stream) {
    copy(0, pages_.size(), to, stream);
    for (Slab& slab : slabs_) slab.memory.give_back_on(stream);
    slabs_.clear();
    of_pool_ = of_pool_.empty();
  }
  /// Memory for as many pages. @throws std::bad_alloc
  [[nodiscard]] Growth prepare_back(cudaStream_t stream) {
    Growth growth;
    growth.count = pages_.size();
    if (growth.count == 0) return growth;
    if (of_pool_.pool() != nullptr) {
      of_pool_.reserve(growth.count);
      growth.of_pool = of_pool_.empty();
      growth.of_pool.allocate(page_bytes_, growth.count);
    } else {
      slabs_.reserve(1);
      growth.slab = allocate(memory_, page_total(), stream);
    }
    return growth;
  }
  /// The pages that `move_out` copied to `from` lie in this memory. @throws DeviceError
  void move_back(Growth& growth, const std::byte* from, DeviceWrites& writes) {
    for (std::size_t i = 0; i < growth.count; ++i) {
      pages_[i] = of_pool_.pool() != nullptr ? of_pool_.pool()->address(growth.of_pool.ids()[i])
                                             : growth.slab.get() + i * page_bytes_;
      write_entry(i, writes);
    }
    for (std::size_t first = 0; first < growth.count;) {
      const std::size_t end = end_of_run(first, growth.count);
      check(cudaMemcpyAsync(pages_[first], from + first * page_bytes_, (end - first) * page_bytes_,
                            cudaMemcpyDefault, writes.stream()),
            "cudaMemcpyAsync");
      first = end;
    }
    if (of_pool_.pool() != nullptr) {
      of_pool_.take(growth.of_pool);
    } else if (growth.count > 0) {
      slabs_.push_back({std::move(growth.slab), growth.count, growth.count});
    }
  }

  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept {
    for (Slab& slab : slabs_) slab.memory.give_back_on(use);
    table_.give_back_on(use);
  }

  /// The first `shared` pages in common with this one, copies of the next ones up to `count`.
  [[nodiscard]] Pages fork(std::size_t shared, std::size_t count, DeviceWrites& writes) const {
    return fork(shared, count, writes, [this](std::size_t i) { return pages_[i]; });
  }
  /// The same, where page i is to be copied from `source(i)`.
  template <class Source>
  [[nodiscard]] Pages fork(std::size_t shared, std::size_t count, DeviceWrites& writes, Source source) const {
    Pages other{memory_, page_bytes_, table_memory_};
    other.of_pool_ = of_pool_.empty();
    count = std::min(count, pages_.size());
    shared = std::min(shared, count);
    if (count == 0) return other;
    std::size_t first = 0;  // page that lies in a slab
    for (const Slab& slab : slabs_) {
      if (first < shared) {
        other.slabs_.push_back(
            {slab.memory.share(writes.stream()), slab.pages, std::min(slab.used, shared - first)});
      }
      first += slab.used;
    }
    other.pages_.assign(pages_.begin(), pages_.begin() + static_cast<std::ptrdiff_t>(shared));
    if (of_pool_.pool() != nullptr) {
      other.of_pool_.reserve(count);
      for (const PageId page : ids().first(shared)) other.of_pool_.share(page);
    }
    Growth growth = other.prepare(count, writes.stream());
    if (growth.count == 0) {  // all are shared
      other.table_entries_ = std::max<std::size_t>(count, 16);
      other.table_ = allocate(table_memory_, other.table_bytes(), writes.stream());
      for (std::size_t i = 0; i < count; ++i) other.write_entry(i, writes);
    }
    other.grow(growth, writes);
    for (std::size_t i = shared; i < count; ++i) {
      if (in_engine()) {
        copy_page_rows(other.pages_[i], engine_rows(), source(i), engine_rows(), writes.stream());
        continue;
      }
      check(cudaMemcpyAsync(other.pages_[i], source(i), page_bytes_, cudaMemcpyDefault, writes.stream()),
            "cudaMemcpyAsync");
    }
    return other;
  }

 private:
  struct Slab {
    DeviceBuffer memory;
    std::size_t pages;
    std::size_t used;  // the first of them; a fork may have pages of its own instead of the others
  };

  // Whether rows lie as an engine's layout says.
  [[nodiscard]] bool in_engine() const { return of_pool_.pool() != nullptr && engine_rows().page_rows > 0; }
  [[nodiscard]] const PageRows& engine_rows() const { return of_pool_.pool()->engine_rows(); }
  [[nodiscard]] PageRows contiguous() const {
    return contiguous_rows(engine_rows().page_rows, engine_rows().row_bytes);
  }
  // The pages [first, end) follow each other in memory.
  [[nodiscard]] std::size_t end_of_run(std::size_t first, std::size_t last) const {
    std::size_t end = first + 1;
    while (end < last && pages_[end] == pages_[end - 1] + page_bytes_) ++end;
    return end;
  }
  void write_entry(std::size_t index, DeviceWrites& writes) {
    auto* entries = reinterpret_cast<std::byte**>(table_.get());
    writes.write(entries + index, pages_[index]);
  }

  MemoryResource* memory_;
  MemoryResource* table_memory_;
  std::size_t page_bytes_;
  std::vector<Slab> slabs_;          // in the order of their pages
  PoolPages of_pool_ = PoolPages{};  // there are no slabs then
  std::vector<std::byte*> pages_;
  DeviceBuffer table_;
  std::size_t table_entries_ = 0;
};

}  // namespace kvpolicy::gpu
