// SPDX-License-Identifier: Apache-2.0
//
// The options that decide, together with the plan, how much memory a cache takes and what it allows.
#pragma once

#include <bit>
#include <cstddef>
#include <memory_resource>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/value_outputs.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/memory/slow_memory.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// The longest text whose memory can be computed and that a saved cache may hold. It is longer than any
/// real text, and the bytes of one head's rows do not wrap around.
inline constexpr std::size_t max_text_tokens = std::size_t{1} << 40;

/// Refuses a text longer than `max_text_tokens`; `asked` names the function for the message.
/// @throws CapacityError
inline void check_text_tokens(const char* asked, std::size_t tokens) {
  require<CapacityError>(tokens <= max_text_tokens, asked, ": ", tokens,
                         " tokens, must be at most 2^40 = ", max_text_tokens);
}

/// Options of a KvCache. By default no row can be taken back, and only memory limits a text.
struct CacheOptions {
  /// Latest rows that `truncate` can take back. They are kept exact in the cache's tail.
  std::size_t max_rollback = 0;
  /// Most rows that one `append` takes; `step` takes any number.
  std::size_t max_append = 1;
  /// Most tokens of the text; 0: as many as memory holds.
  std::size_t max_tokens = 0;
  /// Latest queries that every layer keeps even if the heads of the plan need fewer. A fork under a plan
  /// whose heads rank rows by these queries needs them (KvCache::fork_as).
  std::size_t kept_queries = 0;
  /// Rows of a page. Heads grow by pages and forks share pages. A power of two from 16 to 4096.
  std::size_t page_rows = 64;
  /// The resource that row memory is allocated from, page by page. It must outlive the cache and its
  /// forks, and be thread-safe if forks are used on different threads.
  std::pmr::memory_resource* memory = std::pmr::get_default_resource();
  /// The slow memory, for rows that only reads of all rows need: full pages of heads that keep every row
  /// (Full, QuantizedResidual, ChunkRetrieval, and a policy of your own whose rule says so and which has a
  /// `storage()`). Null: all rows stay in `memory`. Heads of bounded size,
  /// residuals, tails, summaries, and copies of the rows that ChunkRetrieval selected always stay in
  /// `memory`, so a `selected` read touches no slow memory. The rows of a call are written to `memory`
  /// first, so feed a long prompt in several calls. For slow memory in a file see
  /// offload/file_resource.hpp.
  TierMemory slow_memory = nullptr;
  /// The pool that pages come from. Many caches may share it, on several threads; it must outlive the cache
  /// and its forks. `memory` then serves only what is not a page (tails, kept queries). If the pool has a
  /// tier 1, that is the slow memory, and `slow_memory` must be null. Null: the cache and its forks have a
  /// pool of their own over `memory` and `slow_memory`. That pool allocates each page separately and keeps
  /// no free pages, so `bytes()` is what was allocated from the resources.
  PagePool* pool = nullptr;
  /// The model's output projections, for heads that weigh their rows by them (`ValueNorm::output_l1`); no other head
  /// reads them. They must outlive the cache and its forks, and are not saved with it. Null: a plan with such a head
  /// is refused.
  const ValueOutputs* value_outputs = nullptr;

  friend bool operator==(const CacheOptions&, const CacheOptions&) = default;

  /// What a plan needs to compute the memory of heads whose keys have `head_dim` channels and whose values
  /// have `value_dim` (0: also `head_dim`). A cache adds the pool that it uses.
  [[nodiscard]] StorageContext context(std::size_t head_dim, std::size_t value_dim = 0) const {
    const bool is_slow = slow_memory != nullptr || (pool != nullptr && pool->tiers() > 1);
    return {head_dim, page_rows, pool, is_slow ? std::size_t{1} : 0, value_dim, nullptr};
  }
  [[nodiscard]] std::size_t tail_rows() const { return max_rollback + max_append; }

  /// @throws ConfigError
  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 20;
    require(max_rollback <= most, "CacheOptions: max_rollback is ", max_rollback, ", must be at most ", most);
    require(max_append >= 1 && max_append <= most, "CacheOptions: max_append is ", max_append,
            ", must be 1 to ", most);
    require(kept_queries <= most, "CacheOptions: kept_queries is ", kept_queries, ", must be at most ", most);
    require(std::has_single_bit(page_rows) && page_rows >= 16 && page_rows <= 4096,
            "CacheOptions: page_rows is ", page_rows, ", must be a power of two from 16 to 4096");
    require(memory != nullptr, "CacheOptions: memory is null, must be a memory resource");
    require(pool == nullptr || slow_memory == nullptr,
            "CacheOptions: pool and slow_memory are both given; the slow memory must be a tier of the "
            "pool, or the pool null");
  }
};

}  // namespace kvpolicy
