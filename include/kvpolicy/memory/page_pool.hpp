// SPDX-License-Identifier: Apache-2.0
//
// A pool of pages for the rows of many heads, sequences and forks. A page has an integer id, so
// that page tables are lists of int32; the pool knows where the page lies, in which tier of memory,
// and how many owners it has.
//
// Pages of one size lie together in slabs of at most 16 pages. A page never moves by itself, so a
// slab returns to its provider only when all of its pages are free, and memory that is obtained but
// not in use ("idle") can grow. Three rules keep idle memory small:
//   - a slab is as small as a single page, unless idle memory is under 1/16 of what is live;
//   - a slab has at most `max_slab_bytes`: large pages, which most bytes lie in, get small slabs;
//   - a new page goes to the fullest slab of its size that has room, so that sparse slabs run
//   empty.
// While the number of pages is steady this leaves less than 10 % idle from about 3,000 pages of six
// sizes on (300 pages: less than 30 %). No pool whose pages stay where they are can promise more:
// if half of all pages is then released in random order, 70 % are idle (16 pages in every slab: 100
// %). So an owner can let its pages move: `consolidate` brings idle memory back to 1/16. No cache does so by
// itself, because nobody may read a page that moves: the owner of many caches on one pool calls
// `consolidate(cache)` (cache/consolidate.hpp) when none of them runs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory_resource>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/engine_pages.hpp>
#include <kvpolicy/memory/page_provider.hpp>
#include <kvpolicy/memory/slab_table.hpp>
#include <kvpolicy/memory/slow_memory.hpp>

namespace kvpolicy {

/// The number of a page in its pool.
using PageId = std::int32_t;
/// Instead of a page.
inline constexpr PageId no_page = -1;

/// Settings of a PagePool.
struct PoolOptions {
  /// The most bytes that are asked of a provider at a time, unless one page is larger. With 0 each
  /// page is asked for by itself, and nothing is ever idle.
  std::size_t max_slab_bytes = std::size_t{64} << 10;
};

/// Reference-counted pages of several sizes in one or more tiers of memory; tier 0 is the fastest.
/// All functions may be called from several threads at once. `address`, `bytes`, `tier`, `retain`,
/// `is_shared`, the statistics, and `release` of a shared page take no lock. An id that is given to
/// a function must be that of a page in use.
///
/// Lookups need no lock because an id reaches another thread by something that synchronises (a
/// mutex, a started or joined thread), as it must for the page's own bytes: where the slab lies was
/// written before that, and stays as it is while one of its pages is in use. What other threads
/// write meanwhile is read under the lock only (free pages, lists), or atomic (owners, statistics),
/// or in chunks of the table that the reader does not look at. An id is given out again only after
/// its last owner has released it.
class PagePool {
 public:
  /// One tier over memory that must outlive the pool.
  /// @throws ConfigError if `memory` is null
  explicit PagePool(TierMemory memory = std::pmr::get_default_resource(), PoolOptions options = {})
      : options_{options}, own_provider_{std::in_place, memory}, tiers_(1) {
    tiers_.front().provider = own_provider_->get();
  }

  /// One tier for each provider. They must outlive the pool.
  /// @throws ConfigError if there is none, or one is null
  explicit PagePool(std::span<PageProvider* const> providers, PoolOptions options = {})
      : options_{options}, tiers_(providers.size()) {
    require(!providers.empty(), "PagePool: there is no provider, must be at least one");
    set_providers(providers, 0);
  }

  /// Tier 0 is memory of an engine, of which the pool uses no byte but those of the pages that it
  /// gives out; its pages have one size and their number is fixed. `slower` are tiers 1, 2, ...
  /// @throws ConfigError if the description does not fit its arenas, or a provider is null
  explicit PagePool(const EnginePages& engine, std::span<PageProvider* const> slower = {},
                    PoolOptions options = {})
      : options_{options}, tiers_(1 + slower.size()) {
    engine.validate();
    set_providers(slower, 1);
    add_engine_pages(engine);
  }

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;
  /// Gives all memory back; no page may be used any more.
  ~PagePool() {
    for (std::uint32_t i = 0; i < table_.slabs(); ++i) {
      const Slab& slab = table_.slab(i);
      if (slab.pages == 0) continue;
      const detail::SizeClass& size = table_.size_of(slab);
      if (PageProvider* provider = tiers_[size.tier].provider) {
        provider->give_back(slab.start, slab_bytes(size.page_bytes, slab.pages));
      }
    }
  }

  // ---- owners

  /// A page of `bytes` bytes with one owner, aligned to PageProvider::page_alignment (in an engine's
  /// memory: as the engine has it). Its contents are unspecified.
  /// @throws OutOfMemory if the engine's pages are all in use; ConfigError for a size that the
  /// tier does not have; std::bad_alloc, or what the tier's provider throws. Nothing changed then.
  [[nodiscard]] PageId allocate(std::size_t bytes, std::size_t tier = 0) {
    PageId page = no_page;
    allocate(bytes, {&page, 1}, tier);
    return page;
  }

  /// As many pages as `pages` has places: all of them, or none, and `pages` is full of `no_page`.
  void allocate(std::size_t bytes, std::span<PageId> pages, std::size_t tier = 0) {
    std::ranges::fill(pages, no_page);
    require(tier < tiers_.size(), "PagePool: there is no tier ", tier, ", must be below ", tiers_.size());
    require(bytes > 0, "PagePool: a page of 0 bytes was asked for, must be at least 1");
    if (bytes > max_page_bytes) throw_error(std::bad_alloc{});
    if (pages.empty()) return;
    const std::lock_guard lock{mutex_};
    const std::uint32_t size_class = find_size(bytes, tier);
    KVPOLICY_TRY {
      for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = take_page(size_class, pages.size() - i);
    }
    KVPOLICY_CATCH_ALL {
      for (PageId& page : pages) {
        if (page != no_page) free_page(std::exchange(page, no_page));
      }
      KVPOLICY_RETHROW;
    }
  }

  /// Adds an owner. The caller is one.
  void retain(PageId page) noexcept { owners_of(page).fetch_add(1, std::memory_order_relaxed); }

  /// Takes an owner away; the page is free after its last one. All reads and writes of the page by
  /// former owners happen before those of the next one.
  void release(PageId page) noexcept {
    if (owners_of(page).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const std::lock_guard lock{mutex_};
    free_page(page);
  }

  /// Whether the page has another owner besides the caller, in this thread or another. `false`
  /// stays true until the caller itself retains the page, and the caller may then write to the
  /// page: the reads of all former owners happened before, because a count falls by release and is
  /// read by acquire here.
  [[nodiscard]] bool is_shared(PageId page) const noexcept {
    return slab_of(page).owners[slot_of(page)].load(std::memory_order_acquire) > 1;
  }

  /// How many owners the page has now; others may come and go.
  [[nodiscard]] std::size_t owners(PageId page) const noexcept {
    return slab_of(page).owners[slot_of(page)].load(std::memory_order_relaxed);
  }

  // ---- where a page lies

  /// The first byte of the page; in an engine's memory its first key row.
  [[nodiscard]] std::byte* address(PageId page) const noexcept {
    const Slab& slab = slab_of(page);
    return slab.start + slot_of(page) * slab.page_stride;
  }
  [[nodiscard]] std::size_t bytes(PageId page) const noexcept {
    return table_.size_of(slab_of(page)).page_bytes;
  }
  [[nodiscard]] std::size_t tier(PageId page) const noexcept { return table_.size_of(slab_of(page)).tier; }
  /// Who fetches and writes pages of a tier; null for the memory of an engine.
  [[nodiscard]] PageProvider* provider(std::size_t tier) const noexcept { return tiers_[tier].provider; }

  // ---- an engine's pages

  /// How the rows of an engine's pages lie, in bytes except for `page_rows`, which is 0 if tier 0 is not an
  /// engine's memory. Every row is at a multiple of `alignment`.
  struct EngineRows {
    std::size_t page_rows = 0, row_stride = 0, row_bytes = 0, values_offset = 0, alignment = 0;
  };
  [[nodiscard]] const EngineRows& engine_rows() const noexcept { return engine_rows_; }
  /// The page of head `head` in block `block` of an arena. Pages of one head of an arena have
  /// consecutive ids: id = engine_page(arena, head, 0) + block.
  /// @throws ShapeError if there is no such page
  [[nodiscard]] PageId engine_page(std::size_t arena, std::size_t head, std::size_t block) const {
    require<ShapeError>(arena < engine_arenas_ && head < engine_heads_ && block < engine_blocks_,
                        "PagePool: there is no page for arena ", arena, ", head ", head, ", block ", block,
                        ", must be below ", engine_arenas_, ", ", engine_heads_, ", ", engine_blocks_);
    const std::size_t first_slab = (arena * engine_heads_ + head) * slabs_for(engine_blocks_);
    return static_cast<PageId>(first_slab * Slab::max_pages + block);
  }
  /// Becomes the owner of a page that the engine has filled. False if the page has an owner
  /// already.
  /// @throws ShapeError if the page is none of the engine's
  [[nodiscard]] bool claim(PageId page) {
    require<ShapeError>(
        page >= 0 && static_cast<std::size_t>(page) < engine_ids() && slot_of(page) < slab_of(page).pages,
        "PagePool: page ", page, " is none of an engine's, must be an engine_page()");
    const std::lock_guard lock{mutex_};
    if ((slab_of(page).free_slots >> slot_of(page) & 1U) == 0) return false;
    take(page);
    return true;
  }

  // ---- idle memory

  /// Moves pages to fuller slabs, as long as tier 0 has more idle memory than 1/16 of what is live.
  /// If all pages are given, what stays idle beyond that is less than one slab of each size. Only
  /// pages with one owner move, and their ids are replaced in `pages`: the caller must be that
  /// owner, and nobody may read or write the pages meanwhile. Costs a look at two counters if there
  /// is nothing to do. Returns how many pages moved.
  std::size_t consolidate(std::span<PageId> pages) noexcept {
    std::size_t moved = 0;
    for (PageId& page : pages) {
      if (!is_over_budget()) break;
      if (is_shared(page) || tier(page) != 0) continue;
      PageId to = no_page;
      {
        const std::lock_guard lock{mutex_};
        const std::uint32_t fuller = table_.fuller_than(index_of(page));
        if (fuller == Slab::none) continue;
        to = take_page_of(fuller);
      }
      std::memcpy(address(to), address(page), bytes(page));
      release(page);
      page = to;
      ++moved;
    }
    return moved;
  }

  // ---- statistics: each was true at some time, two of them perhaps at different times

  [[nodiscard]] std::size_t tiers() const noexcept { return tiers_.size(); }
  /// Bytes of all pages that have an owner; shared pages count once.
  [[nodiscard]] std::size_t live_bytes(std::size_t tier = 0) const noexcept {
    return tiers_[tier].live.load(std::memory_order_relaxed);
  }
  /// Bytes that the provider gave and that were not given back; for an engine's memory, all its
  /// pages.
  [[nodiscard]] std::size_t obtained_bytes(std::size_t tier = 0) const noexcept {
    return tiers_[tier].obtained.load(std::memory_order_relaxed);
  }
  /// Bytes of the pool's own bookkeeping. They follow the largest number of slabs there ever was.
  [[nodiscard]] std::size_t overhead_bytes() const noexcept {
    return sizeof(PagePool) + tiers_.size() * sizeof(Tier) + overhead_.load(std::memory_order_relaxed);
  }

 private:
  using Slab = detail::Slab;
  static constexpr std::size_t idle_share = 16;  // idle memory is to stay below 1/16 of live memory
  static constexpr std::size_t max_page_bytes = std::numeric_limits<std::ptrdiff_t>::max() / 2;

  struct Tier {
    PageProvider* provider = nullptr;  // null: memory of an engine
    std::atomic<std::size_t> live{0};
    std::atomic<std::size_t> obtained{0};
  };

  // An id is the slab's index and the page's slot in it.
  [[nodiscard]] static std::uint32_t index_of(PageId page) noexcept {
    KVPOLICY_ASSERT(page >= 0);
    return static_cast<std::uint32_t>(page) / Slab::max_pages;
  }
  [[nodiscard]] static std::size_t slot_of(PageId page) noexcept {
    return static_cast<std::uint32_t>(page) % Slab::max_pages;
  }
  [[nodiscard]] const Slab& slab_of(PageId page) const noexcept { return table_.slab(index_of(page)); }
  [[nodiscard]] std::atomic<std::uint32_t>& owners_of(PageId page) noexcept {
    return table_.slab(index_of(page)).owners[slot_of(page)];
  }

  [[nodiscard]] static std::size_t stride_of(std::size_t page_bytes) noexcept {
    return (page_bytes + PageProvider::page_alignment - 1) / PageProvider::page_alignment *
           PageProvider::page_alignment;
  }
  [[nodiscard]] static std::size_t slab_bytes(std::size_t page_bytes, std::size_t pages) noexcept {
    return (pages - 1) * stride_of(page_bytes) + page_bytes;
  }
  [[nodiscard]] static std::size_t slabs_for(std::size_t pages) noexcept {
    return (pages + Slab::max_pages - 1) / Slab::max_pages;
  }
  [[nodiscard]] std::size_t engine_ids() const noexcept {
    return engine_arenas_ * engine_heads_ * slabs_for(engine_blocks_) * Slab::max_pages;
  }
  [[nodiscard]] bool is_over_budget() const noexcept {
    const std::size_t live = live_bytes();
    return tiers_.front().provider != nullptr && obtained_bytes() > live + live / idle_share;
  }

  void set_providers(std::span<PageProvider* const> providers, std::size_t first_tier) {
    for (std::size_t i = 0; i < providers.size(); ++i) {
      require(providers[i] != nullptr, "PagePool: the provider of tier ", first_tier + i,
              " is null, must be a provider");
      tiers_[first_tier + i].provider = providers[i];
    }
  }

  void add_engine_pages(const EnginePages& engine) {
    constexpr std::size_t most = detail::SlabTable::max_slabs;
    const std::size_t slabs = slabs_for(engine.blocks);
    require(
        slabs <= most && engine.heads <= most / slabs && engine.arenas.size() <= most / slabs / engine.heads,
        "PagePool: ", engine.arenas.size(), " arenas of ", engine.blocks, " blocks of ", engine.heads,
        " heads are more pages than ids (make a pool for each arena)");
    const std::uint32_t size_class = table_.find_size(engine.page_bytes(), 0);
    for (const std::span<std::byte> arena : engine.arenas) {
      for (std::size_t head = 0; head < engine.heads; ++head) {
        for (std::size_t block = 0; block < engine.blocks; block += Slab::max_pages) {
          std::byte* start = arena.data() + block * engine.block_stride;
          if (engine.heads > 1) start += head * engine.head_stride;
          const std::size_t pages = std::min(engine.blocks - block, Slab::max_pages);
          static_cast<void>(table_.next_index());
          table_.add(size_class, start, engine.block_stride, pages);
          count(tiers_.front().obtained, pages * engine.page_bytes());
        }
      }
    }
    engine_arenas_ = engine.arenas.size();
    engine_heads_ = engine.heads;
    engine_blocks_ = engine.blocks;
    engine_rows_ = {engine.page_rows, engine.row_stride, engine.row_bytes, engine.values_offset,
                    engine.alignment()};
    note_overhead();
  }

  // ---- with the lock held

  static void count(std::atomic<std::size_t>& counter, std::size_t added) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + added, std::memory_order_relaxed);
  }
  void note_overhead() noexcept { overhead_.store(table_.bytes(), std::memory_order_relaxed); }

  [[nodiscard]] std::uint32_t find_size(std::size_t bytes, std::size_t tier) {
    if (tiers_[tier].provider == nullptr && bytes != table_.size(0).page_bytes) {
      fail<ConfigError>("PagePool: a page of ", bytes, " bytes was asked for, must be ",
                        table_.size(0).page_bytes, " as the engine's pages are");
    }
    const std::uint32_t size_class = table_.find_size(bytes, tier);
    note_overhead();
    return size_class;
  }

  [[nodiscard]] PageId take_page(std::uint32_t size_class, std::size_t wanted) {
    if (table_.fullest(size_class) == Slab::none) obtain_slab(size_class, wanted);
    return take_page_of(table_.fullest(size_class));
  }
  PageId take_page_of(std::uint32_t index) noexcept {
    const std::size_t slot = table_.slab(index).first_free_slot();
    const auto page = static_cast<PageId>(index * Slab::max_pages + slot);
    take(page);
    return page;
  }
  void take(PageId page) noexcept {
    table_.take(index_of(page), slot_of(page));
    owners_of(page).store(1, std::memory_order_relaxed);
    const detail::SizeClass& size = table_.size_of(slab_of(page));
    count(tiers_[size.tier].live, size.page_bytes);
  }

  void free_page(PageId page) noexcept {
    const Slab& slab = slab_of(page);
    const detail::SizeClass& size = table_.size_of(slab);
    Tier& tier = tiers_[size.tier];
    table_.free(index_of(page), slot_of(page));
    count(tier.live, std::size_t{0} - size.page_bytes);
    if (tier.provider == nullptr || slab.free_pages() < slab.pages) return;
    const std::size_t bytes = slab_bytes(size.page_bytes, slab.pages);
    tier.provider->give_back(slab.start, bytes);
    count(tier.obtained, std::size_t{0} - bytes);
    table_.remove(index_of(page));
  }

  // A slab for `wanted` pages that are needed now, and for as many more as may be idle.
  void obtain_slab(std::uint32_t size_class, std::size_t wanted) {
    const detail::SizeClass& size = table_.size(size_class);
    Tier& tier = tiers_[size.tier];
    if (tier.provider == nullptr) {
      fail<OutOfMemory>("PagePool: all ", live_bytes(size.tier) / size.page_bytes,
                        " pages of the engine's memory are in use (release pages, or give more blocks)");
    }
    const std::size_t stride = stride_of(size.page_bytes);
    const std::size_t live = live_bytes(size.tier);
    const std::size_t idle = obtained_bytes(size.tier) - live;
    const std::size_t room = std::max(live / idle_share, idle) - idle;
    const std::size_t most = std::clamp(options_.max_slab_bytes / stride, std::size_t{1}, Slab::max_pages);
    const std::size_t pages = std::min(most, wanted + room / stride);
    const std::size_t bytes = slab_bytes(size.page_bytes, pages);
    static_cast<void>(table_.next_index());
    note_overhead();
    std::byte* start = tier.provider->obtain(bytes);
    count(tier.obtained, bytes);
    table_.add(size_class, start, stride, pages);
  }

  PoolOptions options_;
  std::optional<TierProvider> own_provider_;
  std::vector<Tier> tiers_;  // their number is fixed
  std::size_t engine_arenas_ = 0;
  std::size_t engine_heads_ = 0;
  std::size_t engine_blocks_ = 0;
  EngineRows engine_rows_;
  std::mutex mutex_;  // guards the table, except what lookups read, and writes of the counters
  detail::SlabTable table_;
  std::atomic<std::size_t> overhead_{0};  // bytes of the table
};

}  // namespace kvpolicy
