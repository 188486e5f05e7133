// SPDX-License-Identifier: Apache-2.0
//
// Device memory, asked for in the order of a stream. A caller may bring its own resource (an
// engine's pool, a counting one for tests).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::cuda {

/// Gives and takes device memory. Addresses are aligned to at least 256 bytes. Calls come from the
/// threads that use the caches; a resource that several share must be safe for that.
class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  /// Memory that work put on `stream` from now on may use. @throws std::bad_alloc
  [[nodiscard]] virtual void* allocate(std::size_t bytes, cudaStream_t stream) = 0;
  /// Takes it back once the work that is on `stream` now is done.
  virtual void deallocate(void* memory, std::size_t bytes, cudaStream_t stream) noexcept = 0;
};

/// The driver's stream-ordered pool.
class StreamOrderedMemory final : public MemoryResource {
 public:
  [[nodiscard]] void* allocate(std::size_t bytes, cudaStream_t stream) override {
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes, stream), "cudaMallocAsync");
    return memory;
  }
  void deallocate(void* memory, std::size_t, cudaStream_t stream) noexcept override {
    static_cast<void>(cudaFreeAsync(memory, stream));
  }
};

/// The device's memory, asked for and given back in a stream's order (cudaMallocAsync).
[[nodiscard]] inline MemoryResource* default_memory() {
  static StreamOrderedMemory memory;
  return &memory;
}

/// Device memory with an owner count.
using DeviceBuffer = std::shared_ptr<std::byte>;

/// Gives a block back, on the stream that used it last.
struct GiveBack {
  MemoryResource* memory;
  std::size_t bytes;
  cudaStream_t stream;
  void operator()(std::byte* place) noexcept {
    memory->deallocate(place, bytes, std::atomic_ref{stream}.load());
  }
};

/// A block of `bytes` bytes. @throws std::bad_alloc, DeviceError
[[nodiscard]] inline DeviceBuffer allocate(MemoryResource* memory, std::size_t bytes, cudaStream_t stream) {
  auto* start = static_cast<std::byte*>(memory->allocate(bytes, stream));
  return {start, GiveBack{memory, bytes, stream}};
}
/// Memory goes back on the stream it was asked for on, unless this says that another one uses it now.
inline void give_back_on(const DeviceBuffer& block, cudaStream_t stream) noexcept {
  if (auto* how = std::get_deleter<GiveBack>(block)) {
    std::atomic_ref{how->stream}.store(stream);  // forks on two threads may share the block
  }
}

}  // namespace kvpolicy::cuda
