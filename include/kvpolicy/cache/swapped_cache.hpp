// SPDX-License-Identifier: Apache-2.0
//
// Swapping a sequence out: an engine whose sequences need more than fast memory moves the rows of a waiting sequence
// to another pool, and back when there is room. Nothing is recomputed, and the sequence continues bit for bit.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/buffer.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/memory/page_provider.hpp>
#include <kvpolicy/storage/page_visitor.hpp>

namespace kvpolicy {

namespace detail {

/// Pages of one pool, of any sizes. Move-only.
class OwnedPages {
 public:
  /// A page of each of these sizes.
  /// @throws std::bad_alloc, or what the pool throws
  OwnedPages(PagePool& pool, std::span<const std::size_t> sizes) : pool_{&pool} {
    pages_.assign(sizes.size(), no_page);
    // The pool hands out pages of one size together.
    std::map<std::size_t, std::vector<std::size_t>> indices_of_size;
    for (std::size_t i = 0; i < sizes.size(); ++i) indices_of_size[sizes[i]].push_back(i);
    std::vector<PageId> some;
    KVPOLICY_TRY {
      for (const auto& [bytes, indices] : indices_of_size) {
        some.resize(indices.size());
        pool.allocate(bytes, some);
        for (std::size_t i = 0; i < indices.size(); ++i) pages_[indices[i]] = some[i];
      }
    }
    KVPOLICY_CATCH_ALL {
      release();
      KVPOLICY_RETHROW;
    }
  }
  OwnedPages(OwnedPages&& other) noexcept : pool_{other.pool_}, pages_{std::exchange(other.pages_, {})} {}
  OwnedPages& operator=(OwnedPages&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(pages_, other.pages_);
    return *this;
  }
  OwnedPages(const OwnedPages&) = delete;
  OwnedPages& operator=(const OwnedPages&) = delete;
  ~OwnedPages() { release(); }

  [[nodiscard]] PagePool& pool() const { return *pool_; }
  [[nodiscard]] std::size_t size() const { return pages_.size(); }
  [[nodiscard]] std::byte* address(std::size_t index) const { return pool_->address(pages_[index]); }
  /// Releases all pages.
  void release() noexcept {
    for (const PageId page : pages_) {
      if (page != no_page) pool_->release(page);
    }
    pages_.clear();
  }
  /// The caller becomes the owner of a page.
  [[nodiscard]] PageId take(std::size_t index) noexcept { return std::exchange(pages_[index], no_page); }

 private:
  PagePool* pool_;
  std::vector<PageId> pages_;
};

}  // namespace detail

/// One sequence whose rows are in another pool, for example over pinned memory or over a file
/// (offload/file_resource.hpp). Fast memory holds only its page tables and the rest of `overhead_bytes` (positions,
/// sums, choices), and nothing of `KvCache::bytes`. Rows that were in slow memory stay there. Pages that forks share
/// are copied, so a swapped sequence keeps no page of a prefix alive, and shares no page after `swap_in`. A file
/// holds the rows only as long as this object lives; `save` writes files that last.
///
/// Not synchronised. Move-only. The pool must outlive it.
template <Element E, AttentionEngine Engine = ScalarEngine>
class SwappedCache {
 public:
  using Cache = KvCache<E, Engine>;

  /// Moves all rows of `cache` to tier 0 of `to`. If it throws, the cache is as it was.
  /// @throws std::bad_alloc, StorageError if `to` has no room or cannot be written; ConfigError if the rows lie in an
  /// inference engine's memory, a policy cannot be saved, or the cache was moved from
  SwappedCache(Cache&& cache, PagePool& to)
      : parts_{parts_of(cache, to)}, pages_{copy_to(to, parts_)}, cache_{std::move(cache)} {
    for (const Part& part : parts_) {
      if (part.table != nullptr) {
        part.table->vacate(part.index);
      } else {
        part.buffer->release();
      }
    }
  }
  SwappedCache(SwappedCache&&) noexcept = default;
  SwappedCache& operator=(SwappedCache&&) noexcept = default;
  SwappedCache(const SwappedCache&) = delete;
  SwappedCache& operator=(const SwappedCache&) = delete;
  ~SwappedCache() = default;

  /// Returns the cache with all rows in fast memory again. This object is empty then and can be assigned to or
  /// destroyed. If it throws, the object is as it was.
  /// @throws std::bad_alloc, StorageError if there is no room, or rows cannot be read; ConfigError if this object is empty
  [[nodiscard]] Cache swap_in() {
    detail::OwnedPages fast = copy_back();
    for (std::size_t i = 0, page = 0; i < parts_.size(); ++i) {
      if (parts_[i].table != nullptr) parts_[i].table->replace(parts_[i].index, fast.take(page++));
    }
    parts_.clear();
    pages_.release();
    return std::move(cache_);
  }

  /// Bytes in the other pool.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = 0;
    for (const Part& part : parts_) total += part.stored_bytes();
    return total;
  }
  /// Bytes of fast memory that `swap_in` takes.
  [[nodiscard]] std::size_t fast_bytes() const {
    std::size_t total = 0;
    for (const Part& part : parts_) total += part.bytes;
    return total;
  }
  [[nodiscard]] std::size_t tokens() const { return cache_.tokens(); }

 private:
  // A page of a table, or the working memory of a layer.
  struct Part {
    PageTable* table = nullptr;  // stays where it is, on the heap, when the cache is moved
    std::size_t index = 0;
    Buffer* buffer = nullptr;
    std::size_t bytes = 0;
    bool is_needed = true;  // the contents of an empty tail are not

    [[nodiscard]] std::size_t stored_bytes() const { return is_needed ? bytes : 0; }
    [[nodiscard]] std::byte* address() const {
      return table != nullptr ? table->address(index) : buffer->get();
    }
  };

  class Lister final : public PageVisitor {
   public:
    explicit Lister(std::vector<Part>& parts) : parts_{parts} {}
    void visit(PageTable& table, std::size_t page_bytes) override {
      const PagePool& pool = table.pool();
      require(table.size() == 0 || pool.engine_rows().page_rows == 0,
              "SwappedCache: rows lie in an inference engine's memory, which the engine itself must move");
      for (std::size_t i = 0; i < table.size(); ++i) {
        if (pool.tier(table.pages()[i]) == 0) parts_.push_back({&table, i, nullptr, page_bytes});
      }
    }
    [[nodiscard]] bool replaces() const override { return true; }

   private:
    std::vector<Part>& parts_;
  };

  [[nodiscard]] static std::vector<Part> parts_of(Cache& cache, PagePool& to) {
    require(to.provider(0) != nullptr,
            "SwappedCache: the other pool is an inference engine's memory, must be another one");
    require(&to != &CacheLayers::pool_of(cache), "SwappedCache: the rows are in that pool already");
    std::vector<Part> parts;
    Lister lister{parts};
    for (auto& layer : CacheLayers::of(cache)) {
      for (const HeadPtr& head : layer.heads) head->visit_pages(lister);
      const bool has_tail = layer.tokens > layer.committed;
      if (layer.tail.bytes() > 0)
        parts.push_back({nullptr, 0, &layer.tail.buffer(), layer.tail.bytes(), has_tail});
      if (layer.queries.bytes() > 0)
        parts.push_back({nullptr, 0, &layer.queries.buffer(), layer.queries.bytes()});
    }
    return parts;
  }

  [[nodiscard]] static detail::OwnedPages copy_to(PagePool& to, std::span<const Part> parts) {
    std::vector<std::size_t> sizes;
    for (const Part& part : parts) {
      if (part.is_needed) sizes.push_back(part.bytes);
    }
    detail::OwnedPages pages{to, sizes};
    std::vector<PageProvider::Copy> copies;
    copies.reserve(sizes.size());
    for (const Part& part : parts) {
      if (part.is_needed) copies.push_back({pages.address(copies.size()), part.address(), part.bytes});
    }
    to.provider(0)->write(copies);
    return pages;
  }

  // Pages in fast memory that hold all rows; working memory of the layers is filled as well.
  [[nodiscard]] detail::OwnedPages copy_back() {
    std::vector<std::size_t> sizes;
    for (const Part& part : parts_) {
      if (part.table != nullptr) sizes.push_back(part.bytes);
    }
    detail::OwnedPages fast{CacheLayers::pool_of(cache_), sizes};
    std::vector<PageProvider::Copy> copies;
    copies.reserve(parts_.size());
    KVPOLICY_TRY {
      std::vector<PageProvider::Range> ranges;
      std::size_t stored = 0;
      std::size_t page = 0;
      for (Part& part : parts_) {
        if (part.buffer != nullptr) part.buffer->obtain();
        std::byte* target = part.buffer != nullptr ? part.buffer->get() : fast.address(page++);
        if (!part.is_needed) continue;
        copies.push_back({target, pages_.address(stored++), part.bytes});
        ranges.push_back({copies.back().from, part.bytes});
      }
      pages_.pool().provider(0)->fetch(ranges);
    }
    KVPOLICY_CATCH_ALL {
      for (Part& part : parts_) {
        if (part.buffer != nullptr) part.buffer->release();
      }
      KVPOLICY_RETHROW;
    }
    for (const PageProvider::Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    return fast;
  }

  std::vector<Part> parts_;
  detail::OwnedPages pages_;  // of the parts that are needed, in order
  Cache cache_;               // without its rows
};

template <Element E, AttentionEngine Engine>
SwappedCache(KvCache<E, Engine>&&, PagePool&) -> SwappedCache<E, Engine>;

}  // namespace kvpolicy
