// SPDX-License-Identifier: Apache-2.0
//
// What, besides the plan, decides how much device memory a cache takes and what it allows.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/device_provider.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/value_outputs.hpp>
#include <kvpolicy/memory/page_pool.hpp>

namespace kvpolicy::gpu {

/// How a layer's heads are launched.
enum class Launches : std::uint8_t {
  joint,    ///< All heads in one launch.
  separate  ///< One for each run of neighbouring heads of one kind: for tests and comparisons.
};

/// Options of gpu::KvCache, as kvpolicy::CacheOptions has them, and what a device needs besides.
struct CacheOptions {
  /// Latest rows that `truncate` can take back.
  std::size_t max_rollback = 0;
  /// Most rows of one `append`; `step` takes any number.
  std::size_t max_append = 1;
  /// Most tokens the cache will take; 0: as many as memory holds.
  std::size_t max_tokens = 0;
  /// Latest queries that every layer keeps, though the plan's heads want fewer: for `observe`.
  std::size_t kept_queries = 0;
  /// Rows of a page. A power of two, 64 to 4096, or from 16 on with a `pool`.
  std::size_t page_rows = 64;
  Launches launches = Launches::joint;
  /// Every byte on the device is asked of this resource; it must outlive the cache and its forks.
  MemoryResource* memory = default_memory();
  /// Pages come from this pool, which many caches may share, also in several threads; it must outlive the
  /// caches and their forks. Its tiers are DeviceProviders (cuda/device_provider.hpp), and tier 1, if there is
  /// one, is the slow memory; `slow_memory` must then be null. What is no page is asked of `memory`.
  /// Or the pool is one of an inference engine's pages in device memory (memory/engine_pages.hpp), where kernels
  /// write and read the rows of heads over EnginePageStorage in place; other heads ask `memory` for theirs. A
  /// page of fewer than 64 rows serves heads that keep all rows, or sinks and a window.
  /// A page goes back to the pool when the host lets go of it. So all caches that share the pool work on one
  /// stream, or the caller lets a stream wait before it takes pages that another one used.
  /// Null: a cache asks `memory` and `slow_memory` for all that it lacks at once.
  PagePool* pool = nullptr;
  /// For rows of heads that keep every row (full, quantised residual, chunk retrieval): memory that
  /// kernels can address but that is not the device's (PinnedMemory), for a text that is longer than
  /// the device has room for; it must outlive the cache and its forks. Windows, budgets, summaries,
  /// chosen rows and the latest rows stay on the device. A selected read then crosses the bus only
  /// after a new choice; a read of all rows brings them layer by layer, a layer ahead, to two buffers
  /// that belong to the engine, and cannot be part of a graph. Null: everything is on the device.
  MemoryResource* slow_memory = nullptr;
  /// Rows of a head in slow memory, the latest, that lie on the device as well (whole pages, and never
  /// fewer than can be taken back). Of a selecting head those after its choice should be among them.
  std::size_t latest_rows = 512;
  /// The model's output projections, in device memory, for heads that weigh their rows by them
  /// (`ValueNorm::output_l1`); no other head reads them. They must outlive the cache and its forks, and are not saved
  /// with it. Null: a plan with such a head is refused.
  const ValueOutputs* value_outputs = nullptr;

  [[nodiscard]] std::size_t tail_rows() const { return max_rollback + max_append; }
  [[nodiscard]] bool has_slow_memory() const {
    return slow_memory != nullptr || (pool != nullptr && pool->tiers() > 1);
  }
  [[nodiscard]] bool has_engine_pages() const { return pool != nullptr && pool->engine_rows().page_rows > 0; }

  /// @throws ConfigError
  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 20;
    require(max_rollback <= most, "gpu::CacheOptions: max_rollback is ", max_rollback, ", must be at most ",
            most);
    require(max_append >= 1 && max_append <= most, "gpu::CacheOptions: max_append is ", max_append,
            ", must be 1 to ", most);
    const std::size_t least = has_engine_pages() ? 16 : 64;
    require(std::has_single_bit(page_rows) && page_rows >= least && page_rows <= 4096,
            "gpu::CacheOptions: page_rows is ", page_rows, ", must be a power of two from ", least,
            " to 4096");
    require(pool == nullptr || slow_memory == nullptr,
            "gpu::CacheOptions: pool and slow_memory are both given; "
            "the slow memory must be a tier of the pool, or the pool null");
    require(!has_engine_pages() || pool->tiers() == 1, "gpu::CacheOptions: the pool has ",
            pool == nullptr ? 0 : pool->tiers(),
            " tiers; rows in an engine's tensor cannot go to slow memory, so "
            "it must have 1");
    for (std::size_t tier = 0; pool != nullptr && !has_engine_pages() && tier < pool->tiers(); ++tier) {
      require(dynamic_cast<DeviceProvider*>(pool->provider(tier)) != nullptr, "gpu::CacheOptions: tier ",
              tier,
              " of the pool is no memory that kernels can read; its provider must be a gpu::DeviceProvider");
    }
    require(page_rows >= 64 || kept_queries == 0, "gpu::CacheOptions: kept_queries is ", kept_queries,
            ", must be 0 where a page has fewer than 64 rows, not ", page_rows);
    require(kept_queries <= most, "gpu::CacheOptions: kept_queries is ", kept_queries, ", must be at most ",
            most);
    require(latest_rows <= most, "gpu::CacheOptions: latest_rows is ", latest_rows, ", must be at most ",
            most);
    require(memory != nullptr, "gpu::CacheOptions: memory is null, must be a memory resource");
  }
};

}  // namespace kvpolicy::gpu
