// SPDX-License-Identifier: Apache-2.0
//
// Device memory, asked for in the order of a stream. A caller may bring its own resource (an
// engine's pool, a counting one for tests).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <kvpolicy/core/try.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/stream_order.hpp>

namespace kvpolicy::gpu {

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

/// A stream-ordered pool of the driver's for each device, of the current one. What was given back stays in the pool,
/// because a driver's default pool asks the system again after every wait, which takes far longer than a step.
/// Thread-safe. Pools live until the process ends.
class StreamOrderedMemory final : public MemoryResource {
 public:
  [[nodiscard]] void* allocate(std::size_t bytes, cudaStream_t stream) override {
    void* memory = nullptr;
    check(cudaMallocFromPoolAsync(&memory, bytes, pool(), stream), "cudaMallocFromPoolAsync");
    return memory;
  }
  void deallocate(void* memory, std::size_t, cudaStream_t stream) noexcept override {
    static_cast<void>(cudaFreeAsync(memory, stream));
  }
  /// Gives what is unused back to the system, except for `keep` bytes in all. @throws DeviceError
  void trim(std::size_t keep = 0) { check(cudaMemPoolTrimTo(pool(), keep), "cudaMemPoolTrimTo"); }

 private:
  [[nodiscard]] cudaMemPool_t pool() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const auto own = static_cast<std::size_t>(device);
    const std::scoped_lock lock{mutex_};
    if (own >= pools_.size()) pools_.resize(own + 1, nullptr);
    if (pools_[own] == nullptr) pools_[own] = make_pool(device);
    return pools_[own];
  }
  [[nodiscard]] static cudaMemPool_t make_pool(int device) {
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location.type = cudaMemLocationTypeDevice;
    wanted.location.id = device;
    cudaMemPool_t pool = nullptr;
    check(cudaMemPoolCreate(&pool, &wanted), "cudaMemPoolCreate");
    auto kept = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), "cudaMemPoolSetAttribute");
    return pool;
  }

  std::mutex mutex_;
  std::vector<cudaMemPool_t> pools_;  // by device; null: none yet
};

/// The device's memory, asked for and given back in a stream's order. Its pool keeps what is given back, for the next that
/// asks: beside another allocator in the same program, which may find the device full, give it back to the system by
/// `default_memory()->trim()`, when caches have ended.
[[nodiscard]] inline StreamOrderedMemory* default_memory() {
  static StreamOrderedMemory memory;
  return &memory;
}

/// One owner's part in a block of device memory. The block goes back when its last owner lets go of it, after what
/// every owner did with it on its own stream. Not synchronised; owners of one block may be on several threads.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;  ///< Owns nothing.
  /// The only owner of a new block. @throws std::bad_alloc, DeviceError
  DeviceBuffer(MemoryResource* memory, std::size_t bytes, cudaStream_t stream) : use_{stream} {
    auto block = std::make_unique<Block>(memory, bytes);
    block->start = static_cast<std::byte*>(memory->allocate(bytes, stream));
    block_ = block.release();
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : block_{std::exchange(other.block_, nullptr)}, use_{std::move(other.use_)} {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer taken{std::move(other)};
    std::swap(block_, taken.block_);
    std::swap(use_, taken.use_);
    return *this;
  }
  ~DeviceBuffer() {
    if (block_ != nullptr) block_->leave(use_);
  }

  /// One more owner, who uses it on `stream`.
  [[nodiscard]] DeviceBuffer share(cudaStream_t stream) const noexcept {
    if (block_ == nullptr) return {};
    ++block_->owners;
    DeviceBuffer other;
    other.block_ = block_;
    other.use_ = stream;
    return other;
  }
  [[nodiscard]] std::byte* get() const { return block_ == nullptr ? nullptr : block_->start; }
  [[nodiscard]] bool operator==(std::nullptr_t) const { return block_ == nullptr; }
  [[nodiscard]] bool is_shared() const { return block_ != nullptr && block_->owners > 1; }
  /// This owner's use ends with this one, not with what is on the stream that it was asked for on.
  void give_back_on(const LastUse& use) noexcept { use_ = use; }

 private:
  struct Block {
    MemoryResource* memory;
    std::size_t bytes;
    std::byte* start = nullptr;
    std::atomic<std::size_t> owners{1};
    std::mutex mutex = {};
    std::vector<LastUse> uses = {};  // of owners that have left, the last one of each stream

    Block(MemoryResource* from, std::size_t count) : memory{from}, bytes{count} {}

    void leave(LastUse& use) noexcept {
      if (owners > 1) note(use);  // first, for whoever frees it
      if (--owners > 0) return;
      for (const LastUse& other : uses) other.precede(use.stream());
      memory->deallocate(start, bytes, use.stream());
      delete this;
    }
    void note(LastUse& use) noexcept {
      use.record();
      if (use.number() == 0) return;  // the host has waited
      const std::scoped_lock lock{mutex};
      for (LastUse& other : uses) {
        if (!other.is_of_same_stream(use)) continue;
        if (other.number() < use.number()) other = use;
        return;
      }
      KVPOLICY_TRY { uses.push_back(use); }
      KVPOLICY_CATCH_ALL { use.wait(); }
    }
  };

  Block* block_ = nullptr;
  LastUse use_;
};

/// A block of `bytes` bytes. @throws std::bad_alloc, DeviceError
[[nodiscard]] inline DeviceBuffer allocate(MemoryResource* memory, std::size_t bytes, cudaStream_t stream) {
  return {memory, bytes, stream};
}

}  // namespace kvpolicy::gpu
