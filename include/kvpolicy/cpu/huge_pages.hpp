// SPDX-License-Identifier: Apache-2.0
//
// Row memory on huge pages, for CacheOptions::memory. A decode step reads memory at distant addresses: page
// by page, head by head, and chunk by chunk of a head that selects. With pages of 4 KiB every few rows need
// a walk through the page tables; with pages of 2 MiB almost none do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvpolicy::cpu {

/// Allocates memory in slabs and asks the system to back them by huge pages. Linux does so unless
/// transparent huge pages are switched off; elsewhere it is ordinary memory. Freed memory is kept for
/// allocations of the same size until the resource is destroyed. Many caches may share one resource, which
/// must outlive them. Thread-safe.
class HugePages final : public std::pmr::memory_resource {
 public:
  static constexpr std::size_t page_bytes = std::size_t{2} << 20;

  /// @param slab_bytes size of a slab, rounded up to whole huge pages; the system backs only what is used
  explicit HugePages(std::size_t slab_bytes = std::size_t{32} << 20)
      : slab_bytes_{round_up(std::max(slab_bytes, page_bytes), page_bytes)} {}
  ~HugePages() override {
    for (const Slab& slab : slabs_) ::operator delete(slab.memory, std::align_val_t{slab.alignment});
  }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  /// Bytes of all slabs.
  [[nodiscard]] std::size_t reserved_bytes() const {
    const std::lock_guard lock{mutex_};
    std::size_t total = 0;
    for (const Slab& slab : slabs_) total += slab.bytes;
    return total;
  }

 private:
  static constexpr std::size_t line = 64;  // every allocation begins on one

  struct Slab {
    void* memory;
    std::size_t bytes;
    std::size_t alignment;
  };
  struct FreeBlock {  // stored in the free memory itself
    FreeBlock* next;
  };

  // Rounds up; if that would overflow, returns the largest multiple, which no system can allocate.
  [[nodiscard]] static std::size_t round_up(std::size_t bytes, std::size_t unit) {
    const std::size_t most = static_cast<std::size_t>(-1) / unit * unit;
    return bytes > most ? most : (bytes + unit - 1) / unit * unit;
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    const std::size_t size = round_up(std::max(bytes, line), std::max(alignment, line));
    const std::lock_guard lock{mutex_};
    // Makes the map entry for freed memory now, because deallocation must not fail.
    FreeBlock*& free = free_.try_emplace(size, nullptr).first->second;
    if (free != nullptr && is_aligned(free, alignment)) {
      void* block = free;
      free = free->next;
      return block;
    }
    next_ = round_up(next_, alignment);
    if (slabs_.empty() || alignment > slabs_.back().alignment || next_ > slabs_.back().bytes ||
        size > slabs_.back().bytes - next_) {
      add_slab(std::max(slab_bytes_, round_up(size, page_bytes)), std::max(alignment, page_bytes));
    }
    void* block = static_cast<std::byte*>(slabs_.back().memory) + next_;
    next_ += size;
    return block;
  }
  void do_deallocate(void* block, std::size_t bytes, std::size_t alignment) override {
    const std::size_t size = round_up(std::max(bytes, line), std::max(alignment, line));
    const std::lock_guard lock{mutex_};
    FreeBlock*& free = free_.find(size)->second;
    free = ::new (block) FreeBlock{free};
  }
  [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  [[nodiscard]] static bool is_aligned(const void* block, std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(block) % alignment == 0;
  }

  void add_slab(std::size_t bytes, std::size_t alignment) {
    slabs_.reserve(slabs_.size() + 1);
    void* memory = ::operator new(bytes, std::align_val_t{alignment});
#if defined(__linux__)
    ::madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint; ordinary memory if it is refused
#endif
    slabs_.push_back({memory, bytes, alignment});
    next_ = 0;
  }

  std::size_t slab_bytes_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;  // the first `next_` bytes of the last one are in use
  std::size_t next_ = 0;
  std::unordered_map<std::size_t, FreeBlock*> free_;  // by size
};

}  // namespace kvpolicy::cpu
