// SPDX-License-Identifier: Apache-2.0
//
// What a storage needs to know of the cache that it serves.
#pragma once

#include <bit>
#include <cstddef>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/memory/page_pool.hpp>

namespace kvpolicy {

/// The pool of storages that name none: pages of the global heap, each allocated by itself. It lives
/// as long as the program.
[[nodiscard]] inline PagePool& default_pool() {
  static PagePool& pool = *new PagePool{std::pmr::new_delete_resource(), PoolOptions{.max_slab_bytes = 0}};
  return pool;
}

class ValueOutput;

/// The sizes of a head's rows, where their pages come from, and what the head's policy may know of the model.
struct StorageContext {
  std::size_t head_dim = 0;  ///< Channels of a key, and of a value unless `value_dim` says otherwise.
  std::size_t page_rows = 64;
  /// All pages come from this pool; it must outlive the storage and its forks. Null: `default_pool()`.
  PagePool* pool = nullptr;
  /// The tier of the pool that full pages of a head which keeps every row go to; 0: all stay in fast
  /// memory. The head moves them (offload/slow_rows.hpp), not its policy or its storage.
  std::size_t slow_tier = 0;
  std::size_t value_dim = 0;  ///< Channels of a value; 0: as many as of a key.
  /// What the head's values go through after attention (core/value_outputs.hpp), for policies that weigh rows by it;
  /// no storage does. It must outlive the head and its forks. Null: the cache was not told.
  const ValueOutput* value_output = nullptr;

  [[nodiscard]] PagePool& pages() const { return pool == nullptr ? default_pool() : *pool; }

  /// The same for the side that holds the values: its rows have `head_dim` channels there.
  [[nodiscard]] StorageContext of_values() const {
    StorageContext own = *this;
    own.head_dim = value_channels();
    return own;
  }
  /// This is the keys' side, and `values` is the other one: both sides together.
  [[nodiscard]] StorageContext with_values(const StorageContext& values) const {
    StorageContext both = *this;
    both.value_dim = values.head_dim;
    return both;
  }
  [[nodiscard]] std::size_t value_channels() const { return value_dim == 0 ? head_dim : value_dim; }

  /// @throws ConfigError
  void validate() const {
    const auto fits = [](std::size_t channels) {
      return channels > 0 && channels % 8 == 0 && channels <= max_head_dim;
    };
    require(fits(head_dim), "StorageContext: head_dim is ", head_dim, ", must be a multiple of 8 from 8 to ",
            max_head_dim);
    require(fits(value_channels()), "StorageContext: value_dim is ", value_dim,
            ", must be 0 or a multiple of 8 from 8 to ", max_head_dim);
    require(std::has_single_bit(page_rows) && page_rows >= 16 && page_rows <= 4096,
            "StorageContext: page_rows is ", page_rows, ", must be a power of two from 16 to 4096");
    require(pool == nullptr || slow_tier < pool->tiers(), "StorageContext: slow_tier is ", slow_tier,
            ", must be below the pool's ", pool == nullptr ? 0 : pool->tiers(), " tiers");
  }
};

}  // namespace kvpolicy
