// SPDX-License-Identifier: Apache-2.0
//
// A sequence on a device that waits: its rows go to pinned memory and come back, by copies on a stream, while
// other streams compute (cache/swapped_cache.hpp is the host's).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/cached_layers.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/cuda/memory.hpp>

namespace kvpolicy::gpu {

/// One sequence over other memory, such as PinnedMemory. On the device it takes what belongs to
/// `KvCache::overhead_bytes` (page tables, positions, sums, choices) and its kept queries, and no page. Pages that
/// forks share are copied, so a waiting sequence keeps no page of a prefix alive; once back it shares none.
/// Captured graphs stay valid: they find the sequence's rows, once it is back, by the same tables, and its queries
/// at the same address.
///
/// Nothing waits for the device. Memory is given back, and asked for, in the stream's order; but a PagePool knows
/// no streams, so a sequence whose pages are a pool's must be moved on the stream of the others that use the pool.
///
/// Not synchronised. Move-only. The other memory must outlive it. For files there is cuda/saved_cache.hpp.
template <Element E>
class SwappedCache {
 public:
  using Cache = KvCache<E>;

  /// Moves all pages of `cache` to one block of `to`. The cache must not have a seat in a batch.
  /// @throws std::bad_alloc if `to` has no room, ConfigError if the rows lie in an inference engine's tensor or may
  /// lie in slow memory, CaptureError inside a capture: the cache is as it was; DeviceError
  SwappedCache(Cache&& cache, MemoryResource& to, cudaStream_t stream = nullptr)
      : bytes_{checked_bytes(cache, stream)},
        block_{bytes_ == 0 ? DeviceBuffer{} : allocate(&to, bytes_, stream)},
        cache_{std::move(cache)} {
    cache_.cache_.enter(stream);
    std::byte* place = block_.get();
    for (Layer& layer : cache_.cache_.layers) {
      for (HeadStore& head : layer.heads) {
        for (Pages* pages : head.pages()) {
          const std::size_t bytes = pages->page_total();
          pages->move_out(place, stream);
          place += bytes;
        }
      }
    }
  }
  SwappedCache(SwappedCache&&) noexcept = default;
  SwappedCache& operator=(SwappedCache&&) noexcept = default;

  /// The cache as it was, with all rows on the device again for work that is put on `stream` from now on. This
  /// object holds nothing then, and can be assigned to or destroyed.
  /// @throws std::bad_alloc if there is no room on the device, CaptureError inside a capture: it stays as it was;
  /// DeviceError
  [[nodiscard]] Cache swap_in(cudaStream_t stream = nullptr) {
    refuse_capture(stream, "moving a sequence back");
    std::vector<Pages::Growth> growths;
    auto& layers = held(cache_.cache_.layers);
    cache_.cache_.enter(stream);
    for (Layer& layer : layers) {
      for (HeadStore& head : layer.heads) {
        for (Pages* pages : head.pages()) growths.push_back(pages->prepare_back(stream));
      }
    }
    DeviceWrites writes{stream};
    const std::byte* place = block_.get();
    auto growth = growths.begin();
    for (Layer& layer : cache_.cache_.layers) {
      for (HeadStore& head : layer.heads) {
        for (Pages* pages : head.pages()) {
          pages->move_back(*growth++, place, writes);
          place += pages->page_total();
        }
      }
    }
    writes.flush();
    block_.give_back_on(stream);
    block_ = {};
    bytes_ = 0;
    return std::move(cache_);
  }

  /// Bytes in the other memory, which are as many as `swap_in` takes on the device.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] std::size_t tokens() const { return cache_.tokens(); }

 private:
  [[nodiscard]] static std::size_t checked_bytes(Cache& cache, cudaStream_t stream) {
    refuse_capture(stream, "moving a sequence out");
    require(
        !cache.options().has_slow_memory(),
        "gpu::SwappedCache: the cache may have rows in slow memory, and must have them all on the device");
    std::size_t total = 0;
    for (Layer& layer : held(cache.cache_.layers)) {
      for (HeadStore& head : layer.heads) {
        require(!head.settings().engine_pages,
                "gpu::SwappedCache: rows lie in an inference engine's tensor, which the engine itself must "
                "move");
        for (const Pages* pages : head.pages()) total += pages->page_total();
      }
    }
    return total;
  }

  std::size_t bytes_;
  DeviceBuffer block_;  // in the other memory: pages of all heads, layer by layer
  Cache cache_;         // without its pages
};

}  // namespace kvpolicy::gpu
