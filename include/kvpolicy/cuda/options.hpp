// SPDX-License-Identifier: Apache-2.0
//
// What, besides the plan, decides how much device memory a cache takes and what it allows.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/memory.hpp>

namespace kvpolicy::cuda {

/// How a layer's heads are launched.
enum class Launches : std::uint8_t {
  joint,    ///< All heads in one launch.
  separate  ///< One for each run of neighbouring heads of one kind: for tests and comparisons.
};

struct CacheOptions {
  /// Latest rows that `truncate` can take back.
  std::size_t max_rollback = 0;
  /// Most rows of one `append`; `step` takes any number.
  std::size_t max_append = 1;
  /// Most tokens the cache will take; 0: as many as memory holds.
  std::size_t max_tokens = 0;
  /// Rows of a page. A power of two, 64 to 4096.
  std::size_t page_rows = 64;
  Launches launches = Launches::joint;
  /// Every byte on the device is asked of this resource; it must outlive the cache and its forks.
  MemoryResource* memory = default_memory();

  [[nodiscard]] std::size_t tail_rows() const { return max_rollback + max_append; }

  /// @throws ConfigError
  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 20;
    require(max_rollback <= most, "cuda::CacheOptions: max_rollback is ", max_rollback,
            ", must be at most ", most);
    require(max_append >= 1 && max_append <= most, "cuda::CacheOptions: max_append is ", max_append,
            ", must be 1 to ", most);
    require(std::has_single_bit(page_rows) && page_rows >= 64 && page_rows <= 4096,
            "cuda::CacheOptions: page_rows is ", page_rows,
            ", must be a power of two from 64 to 4096");
    require(memory != nullptr, "cuda::CacheOptions: memory is null, must be a memory resource");
  }
};

}  // namespace kvpolicy::cuda
