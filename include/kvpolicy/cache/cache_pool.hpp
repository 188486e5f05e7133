// SPDX-License-Identifier: Apache-2.0
//
// The pool that a cache and its forks take pages from: the one that their options name, or one of
// their own over the memory resources that the options name.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <utility>

#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/memory/page_provider.hpp>
#include <kvpolicy/memory/slow_memory.hpp>
#include <kvpolicy/plan/cache_options.hpp>

namespace kvpolicy {

/// Shared by a cache and its forks; the pool lives as long as one of them, unless the options gave
/// it. Assigning exchanges: pages of the cache that is assigned to can still go back.
class CachePool {
 public:
  /// @throws std::bad_alloc
  explicit CachePool(const CacheOptions& options) : given_{options.pool} {
    if (given_ == nullptr) own_ = std::make_shared<Own>(options);
  }
  CachePool(const CachePool&) = default;
  CachePool(CachePool&&) noexcept = default;
  CachePool& operator=(const CachePool&) = delete;
  CachePool& operator=(CachePool&& other) noexcept {
    std::swap(given_, other.given_);
    std::swap(own_, other.own_);
    return *this;
  }
  ~CachePool() = default;

  [[nodiscard]] PagePool& pool() const { return own_ == nullptr ? *given_ : own_->pool; }
  /// Bookkeeping of a pool that belongs to the cache and its forks.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return own_ == nullptr ? 0 : sizeof(Own) - sizeof(PagePool) + own_->pool.overhead_bytes();
  }

 private:
  // Each page is asked of its resource by itself and goes back at once. Slabs would need fewer calls, but
  // a slab goes back only once all of its pages are free. What the resource has given would then depend
  // on the order in which windows, forks and moves to slow memory gave pages back, while a plan predicts
  // it from the number of rows (HeadPlan::memory, max_context), and users hold a resource to `bytes()`.
  // A page costs one call of the resource for 64 rows, and nothing else on the heap. Who wants fewer calls
  // gives a pool of their own (CacheOptions::pool), whose idle memory that pool counts.
  struct Own {
    explicit Own(const CacheOptions& options)
        : fast{options.memory}, pool{tiers_of(options), PoolOptions{.max_slab_bytes = 0}} {}

    [[nodiscard]] std::span<PageProvider* const> tiers_of(const CacheOptions& options) {
      providers.front() = &fast;
      if (options.slow_memory == nullptr) return std::span{providers}.first(1);
      providers.back() = slow.emplace(options.slow_memory).get();
      return providers;
    }

    ResourceProvider fast;
    std::optional<TierProvider> slow;
    std::array<PageProvider*, 2> providers{};
    PagePool pool;
  };

  PagePool* given_ = nullptr;
  std::shared_ptr<Own> own_;
};

}  // namespace kvpolicy
