// SPDX-License-Identifier: Apache-2.0
//
// Brings the rows of heads in slow memory to the device, layer by layer: two buffers, each for all
// rows of a layer, and a stream of its own. While a layer is attended from one buffer, the copies of
// the next fill the other.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/pages.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// Room that a layer's slow rows take.
struct StageExtent {
  std::size_t bytes = 0;
  std::size_t pages = 0;

  /// Room for either.
  [[nodiscard]] StageExtent united(const StageExtent& other) const {
    return {std::max(bytes, other.bytes), std::max(pages, other.pages)};
  }
};

/// The pages of a layer that a call reads: of each head the first `count`, which are never written
/// again.
struct StagedLayer {
  struct Head {
    const Pages* pages = nullptr;
    std::size_t count = 0;
    std::size_t offset = 0;  ///< in a buffer
  };
  std::uint64_t id = 0;  ///< of these pages at these offsets, among all of a program
  std::vector<Head> heads;
};

/// Not synchronised, and for caches on one stream at a time, like the engine that owns it.
class Staging {
 public:
  /// @throws std::bad_alloc, DeviceError
  Staging(std::size_t kv_heads, MemoryResource* memory) : kv_heads_{kv_heads}, memory_{memory} {
    KVPOLICY_TRY {
      check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      for (cudaEvent_t* event : {&reached_, &buffers_[0].arrived, &buffers_[1].arrived}) {
        check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
      }
    }
    KVPOLICY_CATCH_ALL {
      destroy();
      KVPOLICY_RETHROW;
    }
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    static_cast<void>(cudaStreamSynchronize(copies_));
    destroy();
  }

  [[nodiscard]] std::size_t bytes() const { return block_ == nullptr ? 0 : block_bytes(extent_); }

  /// Memory for larger layers, obtained before anything changes.
  struct Growth {
    DeviceBuffer block;  ///< null: there is room
    StageExtent extent;
  };
  /// @throws std::bad_alloc
  [[nodiscard]] Growth prepare(const StageExtent& extent, cudaStream_t stream) const {
    const bool fits = extent.bytes <= extent_.bytes && extent.pages <= extent_.pages;
    if (block_ != nullptr && fits) return {};
    Growth growth{.block = {}, .extent = extent_.united(extent)};
    growth.block = allocate(memory_, block_bytes(growth.extent), stream);
    return growth;
  }
  /// What was staged is lost; the old buffers come back in `growth`.
  void grow(Growth& growth, cudaStream_t stream) noexcept {
    if (growth.block == nullptr) return;
    join(stream);
    give_back_on(stream);
    for (Buffer& buffer : buffers_) buffer.id = 0;
    std::swap(block_, growth.block);
    extent_ = growth.extent;
  }

  /// Puts the copies of what is missing on the way, after the work that is on `stream` now and into
  /// the buffer that does not hold layer `beside`. @throws DeviceError; then nothing of it counts
  void fetch(const StagedLayer& layer, std::uint64_t beside, cudaStream_t stream) {
    Buffer& buffer = buffer_for(layer.id, beside);
    if (buffer.id != layer.id) {
      buffer.id = 0;
      buffer.pages.assign(layer.heads.size(), 0);
    }
    bool missing = false;
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      missing = missing || buffer.pages[h] < layer.heads[h].count;
    }
    if (missing) {
      buffer.id = 0;
      // Then the pages have been written, and whoever read the buffer has done so.
      check(cudaEventRecord(reached_, stream), "cudaEventRecord");
      check(cudaStreamWaitEvent(copies_, reached_, 0), "cudaStreamWaitEvent");
      for (std::size_t h = 0; h < layer.heads.size(); ++h) {
        const StagedLayer::Head& head = layer.heads[h];
        if (buffer.pages[h] >= head.count) continue;
        head.pages->copy(buffer.pages[h], head.count, rows(buffer) + head.offset, copies_);
        buffer.pages[h] = head.count;
      }
      check(cudaEventRecord(buffer.arrived, copies_), "cudaEventRecord");
    }
    buffer.id = layer.id;
    latest_ = buffer.id;
  }
  /// Where a layer that was fetched lies, for work put on `stream` from now on. @throws DeviceError
  [[nodiscard]] std::byte* rows_of(std::uint64_t id, cudaStream_t stream) {
    Buffer& buffer = buffer_for(id, 0);
    check(cudaStreamWaitEvent(stream, buffer.arrived, 0), "cudaStreamWaitEvent");
    return rows(buffer);
  }
  /// For one call at a time: a page table for `extent` pages, and views [kv_heads].
  [[nodiscard]] std::byte** table() const {
    return reinterpret_cast<std::byte**>(block_.get() + 2 * buffer_bytes(extent_));
  }
  [[nodiscard]] HeadView* views() const { return reinterpret_cast<HeadView*>(table() + extent_.pages); }

  /// Work put on `stream` from now on comes after all copies.
  void join(cudaStream_t stream) const noexcept {
    for (const Buffer& buffer : buffers_) {
      if (cudaStreamWaitEvent(stream, buffer.arrived, 0) == cudaSuccess) continue;
      static_cast<void>(cudaGetLastError());
      static_cast<void>(cudaStreamSynchronize(copies_));
    }
  }
  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept { block_.give_back_on(use); }

 private:
  struct Buffer {
    std::uint64_t id = 0;            // of the layer whose pages it holds; 0: none
    std::vector<std::size_t> pages;  // of each head, from the first on
    cudaEvent_t arrived = nullptr;
  };

  [[nodiscard]] static std::size_t buffer_bytes(const StageExtent& extent) {
    return (extent.bytes + 255) / 256 * 256;
  }
  [[nodiscard]] std::size_t block_bytes(const StageExtent& extent) const {
    return 2 * buffer_bytes(extent) + extent.pages * sizeof(std::byte*) + kv_heads_ * sizeof(HeadView);
  }
  [[nodiscard]] std::byte* rows(const Buffer& buffer) const {
    return block_.get() + (&buffer == &buffers_[0] ? 0 : buffer_bytes(extent_));
  }
  [[nodiscard]] Buffer& buffer_for(std::uint64_t id, std::uint64_t beside) {
    for (Buffer& buffer : buffers_) {
      if (buffer.id == id) return buffer;
    }
    // Not the one that is needed sooner, nor, if either will do, the one that was filled last.
    const std::uint64_t kept = beside != 0 ? beside : latest_;
    return buffers_[0].id == kept && kept != 0 ? buffers_[1] : buffers_[0];
  }
  void destroy() noexcept {
    for (const cudaEvent_t event : {reached_, buffers_[0].arrived, buffers_[1].arrived}) {
      if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
    }
    if (copies_ != nullptr) static_cast<void>(cudaStreamDestroy(copies_));
  }

  std::size_t kv_heads_;
  MemoryResource* memory_;
  cudaStream_t copies_ = nullptr;
  cudaEvent_t reached_ = nullptr;  // how far the caller's stream was when copies were put on the way
  std::array<Buffer, 2> buffers_;
  std::uint64_t latest_ = 0;
  StageExtent extent_;
  DeviceBuffer block_;  // the buffers, then a page table, then views
};

}  // namespace kvpolicy::gpu
