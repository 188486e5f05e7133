// SPDX-License-Identifier: Apache-2.0
//
// Gives idle memory of a shared pool back. Pages of a pool with slabs (PoolOptions::max_slab_bytes) do not move by
// themselves, so after many sequences have ended, slabs may be half empty: up to 70 % of the memory that the pool
// obtained (memory/page_pool.hpp). An engine calls `consolidate` for its caches where nothing else runs, such
// as between two steps after a sequence has ended.
#pragma once

#include <cstddef>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/storage/page_visitor.hpp>

namespace kvpolicy {

namespace detail {

class PageConsolidator final : public PageVisitor {
 public:
  void visit(PageTable& table, std::size_t) override { moved += table.consolidate(); }
  [[nodiscard]] bool replaces() const override { return true; }

  std::size_t moved = 0;
};

}  // namespace detail

/// Moves pages of the cache to fuller slabs, as long as its pool has more idle memory than 1/16 of what is in use.
/// Afterwards the cache reads and keeps what it did before, bit for bit. Pages stay where they are if a fork or a
/// prefix shares them, if they are in slow memory or in an inference engine's memory, and if their head's
/// policy cannot be saved. Costs a look at two counters for each page table if there is nothing to do. Returns how
/// many pages moved.
///
/// Nobody else may use the cache during the call; other threads may use the pool.
/// @throws std::bad_alloc if bookkeeping that forks share cannot be copied; pages that have moved stay valid
template <Element E, AttentionEngine Engine>
std::size_t consolidate(KvCache<E, Engine>& cache) {
  detail::PageConsolidator mover;
  for (auto& layer : CacheLayers::of(cache)) {
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      if (cache.plan().at(layer.number, head).is_savable()) layer.heads[head]->visit_pages(mover);
    }
  }
  return mover.moved;
}

}  // namespace kvpolicy
