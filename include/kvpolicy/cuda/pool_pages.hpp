// SPDX-License-Identifier: Apache-2.0
//
// Pages that the device cache takes from a PagePool by their ids: of a pool over device memory
// (cuda/device_provider.hpp), or those of an inference engine's tensor (memory/engine_pages.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/memory/page_pool.hpp>

namespace kvpolicy::gpu {

/// How rows lie in a page, in bytes but for `page_rows`.
using PageRows = PagePool::EngineRows;

/// Rows of a page that is the cache's own: all keys lie before all values, with no gap.
[[nodiscard]] inline PageRows contiguous_rows(std::size_t page_rows, std::size_t row_bytes) {
  return {page_rows, row_bytes, row_bytes, page_rows * row_bytes};
}

/// Puts a copy of a page's rows on the stream; the bytes between the rows stay as they are.
/// @throws DeviceError
inline void copy_page_rows(std::byte* to, const PageRows& to_rows, const std::byte* from,
                           const PageRows& from_rows, cudaStream_t stream) {
  for (const bool key : {true, false}) {
    check(cudaMemcpy2DAsync(to + (key ? 0 : to_rows.values_offset), to_rows.row_stride,
                            from + (key ? 0 : from_rows.values_offset), from_rows.row_stride,
                            to_rows.row_bytes, to_rows.page_rows, cudaMemcpyDefault, stream),
          "cudaMemcpy2DAsync");
  }
}

/// Refuses a pool whose pages the kernels cannot read. `row_bytes` are those of one head's key.
/// @throws ConfigError
inline void check_pool(const PagePool& pool, std::size_t page_rows, std::size_t row_bytes) {
  const PageRows& rows = pool.engine_rows();
  require(rows.page_rows > 0 && rows.values_offset > 0,
          "gpu::CacheOptions: the pool's pages must be an engine's with keys and values (EnginePages)");
  require(rows.page_rows == page_rows && rows.row_bytes == row_bytes,
          "gpu::CacheOptions: the pool's pages have ", rows.page_rows, " rows of ", rows.row_bytes,
          " bytes, the cache's ", page_rows, " rows of ", row_bytes, " bytes; they must be the same");
  require(rows.row_stride % 16 == 0 && rows.values_offset % 16 == 0,
          "gpu::CacheOptions: the pool's row_stride is ", rows.row_stride, " and its values_offset ",
          rows.values_offset, " bytes; kernels read 16 bytes at a time, so both must be multiples of 16");
  constexpr std::size_t most = std::size_t{1} << 31;
  require(rows.row_stride < most / page_rows, "gpu::CacheOptions: the pool's row_stride is ", rows.row_stride,
          " bytes, must be less than ", most / page_rows);
}

/// Owns one count of each of its pages. Not synchronised.
class PoolPages {
 public:
  /// Holds nothing, and can if there is a pool.
  explicit PoolPages(PagePool* pool = nullptr, std::size_t tier = 0) noexcept : pool_{pool}, tier_{tier} {}
  PoolPages(PoolPages&& other) noexcept
      : pool_{other.pool_}, tier_{other.tier_}, ids_{std::exchange(other.ids_, {})} {}
  PoolPages& operator=(PoolPages&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(tier_, other.tier_);
    std::swap(ids_, other.ids_);
    return *this;
  }
  ~PoolPages() {
    for (const PageId page : ids_) pool_->release(page);
  }

  [[nodiscard]] PagePool* pool() const { return pool_; }
  /// For the same pages of the same pool; holds none.
  [[nodiscard]] PoolPages empty() const { return PoolPages{pool_, tier_}; }
  [[nodiscard]] std::span<const PageId> ids() const { return ids_; }
  [[nodiscard]] std::size_t shared_pages() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(ids_, [&](PageId page) { return pool_->is_shared(page); }));
  }

  /// Room for the ids of so many pages, so that `share` and `take` do not fail. @throws std::bad_alloc
  void reserve(std::size_t count) { ids_.reserve(count); }
  /// New pages for one that holds none. @throws what PagePool::allocate throws, ConfigError if a page is
  /// not where kernels can read it
  void allocate(std::size_t page_bytes, std::size_t count) {
    std::vector<PageId> pages(count, no_page);
    pool_->allocate(page_bytes, pages, tier_);
    ids_ = std::move(pages);
    for (const PageId page : ids_) {
      const auto address = reinterpret_cast<std::uintptr_t>(pool_->address(page));
      require(address % 16 == 0, "cuda: page ", page, " of the pool lies at ", address % 16,
              " bytes after a multiple of 16; kernels read 16 bytes at a time, so it must lie at one");
    }
  }
  /// Becomes one more owner of a page.
  void share(PageId page) {
    ids_.push_back(page);
    pool_->retain(page);
  }
  /// The pages of another one follow those that are here.
  void take(PoolPages& other) {
    ids_.insert(ids_.end(), other.ids_.begin(), other.ids_.end());
    other.ids_.clear();
  }

 private:
  PagePool* pool_;
  std::size_t tier_;
  std::vector<PageId> ids_;
};

}  // namespace kvpolicy::gpu
