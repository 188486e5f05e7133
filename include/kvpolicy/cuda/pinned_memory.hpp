// SPDX-License-Identifier: Apache-2.0
//
// Slow memory for CacheOptions::slow_memory: memory of the host that kernels and copies can address.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// Page-locked memory of the host, mapped into the address space of every device. Asking for it takes
/// the driver long, so a text that grows far should `reserve`. May be used from several threads.
class PinnedMemory final : public MemoryResource {
 public:
  PinnedMemory() = default;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  /// Waits for the work after which memory was given back. All of it must have been.
  ~PinnedMemory() override { wait(); }

  /// @throws std::bad_alloc where the host has no more to lock, DeviceError for everything else
  [[nodiscard]] void* allocate(std::size_t bytes, cudaStream_t) override {
    const std::lock_guard lock{mutex_};
    collect();
    waiting_.reserve(waiting_.size() + live_ + 1);  // giving back must not fail
    void* memory = nullptr;
    cudaError_t status = cudaHostAlloc(&memory, bytes, flags);
    if (status == cudaErrorMemoryAllocation && !waiting_.empty()) {
      static_cast<void>(cudaGetLastError());
      wait();
      status = cudaHostAlloc(&memory, bytes, flags);
    }
    check(status, "cudaHostAlloc");
    ++live_;
    return memory;
  }
  void deallocate(void* memory, std::size_t, cudaStream_t stream) noexcept override {
    const std::lock_guard lock{mutex_};
    --live_;
    Waiting block{memory, nullptr};
    const bool noted = cudaEventCreateWithFlags(&block.after, cudaEventDisableTiming) == cudaSuccess &&
                       cudaEventRecord(block.after, stream) == cudaSuccess;
    if (noted) {
      waiting_.push_back(block);
      return;
    }
    static_cast<void>(cudaGetLastError());
    static_cast<void>(cudaStreamSynchronize(stream));
    release(block);
  }

 private:
  static constexpr unsigned flags = cudaHostAllocPortable | cudaHostAllocMapped;

  // Given back, but perhaps in use by work that comes before the event.
  struct Waiting {
    void* memory;
    cudaEvent_t after;
  };

  static void release(const Waiting& block) noexcept {
    if (block.after != nullptr) static_cast<void>(cudaEventDestroy(block.after));
    static_cast<void>(cudaFreeHost(block.memory));
    static_cast<void>(cudaGetLastError());  // an asynchronous failure is for the next call to find
  }
  void collect() noexcept {
    std::erase_if(waiting_, [](const Waiting& block) {
      const bool done = cudaEventQuery(block.after) == cudaSuccess;
      if (done) release(block);
      return done;
    });
    static_cast<void>(cudaGetLastError());  // "not ready" is no error
  }
  void wait() noexcept {
    for (const Waiting& block : waiting_) {
      static_cast<void>(cudaEventSynchronize(block.after));
      release(block);
    }
    waiting_.clear();
  }

  std::mutex mutex_;
  std::vector<Waiting> waiting_;
  std::size_t live_ = 0;  // blocks that are in use
};

}  // namespace kvpolicy::gpu
