// SPDX-License-Identifier: Apache-2.0
//
// The bookkeeping of a pool (memory/page_pool.hpp): which slabs there are, which of their pages are
// free, and which slab the next page of a size comes from. It asks for no page memory.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/memory/stable_array.hpp>

namespace kvpolicy::detail {

/// Neighbouring pages of one size in one tier. Callers look at `start`, `page_stride`,
/// `size_class` and `owners` without a lock; these change only while no page of the slab is in use
/// (`owners` is atomic).
struct Slab {
  static constexpr std::size_t max_pages = 16;
  static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

  std::byte* start = nullptr;
  std::size_t page_stride = 0;
  std::uint32_t size_class = 0;
  // Neighbours in a list: of the slabs of this size with as many free pages, or of unused slabs.
  std::uint32_t next = none;
  std::uint32_t previous = none;
  std::uint16_t free_slots = 0;  // bit i: page i is free
  std::uint16_t pages = 0;       // 0: the slab is unused
  std::array<std::atomic<std::uint32_t>, max_pages> owners{};

  [[nodiscard]] std::size_t free_pages() const noexcept {
    return static_cast<std::size_t>(std::popcount(free_slots));
  }
  [[nodiscard]] std::size_t first_free_slot() const noexcept {
    return static_cast<std::size_t>(std::countr_zero(free_slots));
  }
};

/// All slabs of one page size in one tier. Once the last one is gone it may serve another size.
struct SizeClass {
  std::size_t page_bytes = 0;
  std::size_t tier = 0;
  std::uint32_t slabs = 0;
  std::uint32_t has_room = 0;                                  // bit f: some slab has f free pages
  std::array<std::uint32_t, Slab::max_pages + 1> with_free{};  // [f]: the first of them
};

/// Slabs and size classes by index. `slab` and `size` may be called from any thread for what a page
/// in use belongs to; all else by one thread at a time.
class SlabTable {
 public:
  /// With more slabs, a PageId could not number 16 pages in each.
  static constexpr std::size_t max_slabs = std::size_t{1} << 27;

  [[nodiscard]] Slab& slab(std::uint32_t index) noexcept { return slabs_[index]; }
  [[nodiscard]] const Slab& slab(std::uint32_t index) const noexcept { return slabs_[index]; }
  [[nodiscard]] const SizeClass& size(std::uint32_t index) const noexcept { return sizes_[index]; }
  [[nodiscard]] const SizeClass& size_of(const Slab& slab) const noexcept { return sizes_[slab.size_class]; }
  /// How many slabs there are, unused ones included.
  [[nodiscard]] std::uint32_t slabs() const noexcept { return static_cast<std::uint32_t>(slabs_.size()); }
  [[nodiscard]] std::size_t bytes() const noexcept { return slabs_.bytes() + sizes_.bytes(); }

  /// The class of a size, new or not. A pool has few sizes at a time: a head's formats, its
  /// summaries.
  /// @throws std::bad_alloc
  [[nodiscard]] std::uint32_t find_size(std::size_t page_bytes, std::size_t tier) {
    std::size_t found = sizes_.size();
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i].page_bytes == page_bytes && sizes_[i].tier == tier) return static_cast<std::uint32_t>(i);
      if (sizes_[i].slabs == 0) found = i;
    }
    if (found == sizes_.size()) {
      sizes_.reserve_one();
      sizes_.grow();
    }
    sizes_[found] = {.page_bytes = page_bytes, .tier = tier};
    sizes_[found].with_free.fill(Slab::none);
    return static_cast<std::uint32_t>(found);
  }

  /// The index that `add` will give to the next slab; nothing can fail then.
  /// @throws std::bad_alloc; OutOfMemory if there are no more ids
  [[nodiscard]] std::uint32_t next_index() {
    if (unused_ != Slab::none) return unused_;
    require<OutOfMemory>(slabs_.size() < max_slabs, "PagePool: all ", max_slabs,
                         " slabs are in use (use larger pages, or several pools)");
    slabs_.reserve_one();
    return slabs();
  }
  /// Adds a slab of free pages. The caller has called `next_index`.
  void add(std::uint32_t size_class, std::byte* start, std::size_t page_stride, std::size_t pages) noexcept {
    const std::uint32_t index = unused_ != Slab::none ? unused_ : slabs();
    if (index == unused_) {
      unused_ = slabs_[index].next;
    } else {
      slabs_.grow();
    }
    Slab& slab = slabs_[index];
    slab.start = start;
    slab.page_stride = page_stride;
    slab.size_class = size_class;
    slab.pages = static_cast<std::uint16_t>(pages);
    slab.free_slots = static_cast<std::uint16_t>((1U << pages) - 1);
    ++sizes_[size_class].slabs;
    link(index);
  }
  /// The slab at `index`, whose pages are all free, becomes unused.
  void remove(std::uint32_t index) noexcept {
    Slab& slab = slabs_[index];
    unlink(index);
    --sizes_[slab.size_class].slabs;
    slab.free_slots = slab.pages = 0;
    slab.next = unused_;
    unused_ = index;
  }

  /// The slab of a size with the fewest free pages, but with one; `none` if all are full.
  [[nodiscard]] std::uint32_t fullest(std::uint32_t size_class) const noexcept {
    const SizeClass& size = sizes_[size_class];
    if (size.has_room == 0) return Slab::none;
    return size.with_free[static_cast<std::size_t>(std::countr_zero(size.has_room))];
  }
  /// The fullest slab besides this one that has room, if it is at least as full as this one.
  [[nodiscard]] std::uint32_t fuller_than(std::uint32_t index) const noexcept {
    const Slab& slab = slabs_[index];
    if (slab.free_slots == 0) return Slab::none;
    const std::uint32_t best = fullest(slab.size_class);
    return best == index ? slab.next : best;
  }

  void take(std::uint32_t index, std::size_t slot) noexcept {
    unlink(index);
    slabs_[index].free_slots = static_cast<std::uint16_t>(slabs_[index].free_slots & ~(1U << slot));
    link(index);
  }
  void free(std::uint32_t index, std::size_t slot) noexcept {
    unlink(index);
    slabs_[index].free_slots = static_cast<std::uint16_t>(slabs_[index].free_slots | 1U << slot);
    link(index);
  }

 private:
  // Full slabs are in no list.
  void link(std::uint32_t index) noexcept {
    Slab& slab = slabs_[index];
    if (slab.free_slots == 0) return;
    SizeClass& size = sizes_[slab.size_class];
    const std::size_t free = slab.free_pages();
    slab.previous = Slab::none;
    slab.next = size.with_free[free];
    if (slab.next != Slab::none) slabs_[slab.next].previous = index;
    size.with_free[free] = index;
    size.has_room |= 1U << free;
  }
  void unlink(std::uint32_t index) noexcept {
    const Slab& slab = slabs_[index];
    if (slab.free_slots == 0) return;
    SizeClass& size = sizes_[slab.size_class];
    const std::size_t free = slab.free_pages();
    if (slab.next != Slab::none) slabs_[slab.next].previous = slab.previous;
    if (slab.previous != Slab::none) {
      slabs_[slab.previous].next = slab.next;
    } else {
      size.with_free[free] = slab.next;
      if (slab.next == Slab::none) size.has_room &= ~(1U << free);
    }
  }

  StableArray<Slab> slabs_;
  StableArray<SizeClass> sizes_;
  std::uint32_t unused_ = Slab::none;  // the first of a list
};

}  // namespace kvpolicy::detail
