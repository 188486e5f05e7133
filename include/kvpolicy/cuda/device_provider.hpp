// SPDX-License-Identifier: Apache-2.0
//
// A tier of a PagePool whose pages kernels can read: device memory, or memory of the host that is pinned.
//
//     gpu::DeviceProvider fast{gpu::default_memory(), stream};
//     PagePool pool{std::array<PageProvider*, 1>{&fast}};
//     gpu::KvCache cache{plan, {.pool = &pool}, stream};
#pragma once

#include <cstddef>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/memory/page_provider.hpp>

namespace kvpolicy::gpu {

/// Asks a memory resource for slabs, and gives them back, in the order of one stream. The caches that share the
/// pool work on this stream. Both must outlive the pool.
class DeviceProvider final : public PageProvider {
 public:
  /// @throws ConfigError if `memory` is null
  explicit DeviceProvider(MemoryResource* memory = default_memory(), cudaStream_t stream = nullptr)
      : memory_{memory}, stream_{stream} {
    require(memory != nullptr, "gpu::DeviceProvider: memory is null, must be a memory resource");
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  /// @throws std::bad_alloc, DeviceError
  [[nodiscard]] std::byte* obtain(std::size_t bytes) override {
    return static_cast<std::byte*>(memory_->allocate(bytes, stream_));
  }
  void give_back(std::byte* start, std::size_t bytes) noexcept override {
    memory_->deallocate(start, bytes, stream_);
  }

 private:
  MemoryResource* memory_;
  cudaStream_t stream_;
};

}  // namespace kvpolicy::gpu
