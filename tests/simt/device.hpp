// SPDX-License-Identifier: Apache-2.0
//
// The state of the stand-in for the CUDA runtime (include/cuda_runtime_api.h): memory, streams, captures, and
// what tests can set: a call that fails, memory that runs out, streams that work late. Not thread-safe.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "runtime_names.hpp"
#include "shared_memory.hpp"

namespace kvpolicy::gpu::simt {

enum class WorkKind : std::uint8_t {
  any,
  kernel,
  early_kernel  ///< begins while a kernel right before it runs
};

/// A piece of work of a stream.
struct Work {
  /// `before` is the work right before it, of which an early kernel sees nothing until it waits; or null.
  std::function<void(const std::function<void()>& before)> run;
  WorkKind kind = WorkKind::any;
};

/// The work that a stream received between BeginCapture and EndCapture.
struct Capture {
  std::vector<Work> work;
  bool relaxed = false;
  bool invalid = false;
};

}  // namespace kvpolicy::gpu::simt

struct CUstream_st {
  std::uint64_t number = 0;
  bool blocking = true;  // waits for, and is waited for by, the default stream
  bool eager = false;    // works at once even if others are late
  std::shared_ptr<kvpolicy::gpu::simt::Capture> capture;
  bool began_capture = false;                     // rather than joined it
  std::deque<kvpolicy::gpu::simt::Work> pending;  // only for streams that work late
  std::uint64_t submitted = 0;
  std::uint64_t done = 0;
};
struct CUevent_st {
  CUstream_st* stream = nullptr;  // recorded on this stream, after `ticket` pieces of work
  std::uint64_t ticket = 0;
  std::weak_ptr<kvpolicy::gpu::simt::Capture> capture;
  bool in_capture = false;
  double milliseconds = 0.0;
};
/// A pool of device memory: what the system gave, of which some is in use.
struct CUmemPoolHandle_st {
  std::uint64_t threshold = 0;  // bytes that a wait leaves
  std::size_t used = 0;
  std::size_t reserved = 0;
  std::size_t growths = 0;  // how often the system was asked

  void give_back(std::uint64_t kept) {
    reserved =
        static_cast<std::size_t>(std::min<std::uint64_t>(reserved, std::max<std::uint64_t>(used, kept)));
  }
};
struct CUgraph_st {
  std::vector<kvpolicy::gpu::simt::Work> work;
};
struct CUgraphExec_st {
  std::vector<kvpolicy::gpu::simt::Work> work;
};

namespace kvpolicy::gpu::simt {

enum class MemoryKind : std::uint8_t { device, pinned };

class Device {
 public:
  // Results of cudaDeviceGetAttribute.
  int devices = 1;
  int major = 8;
  int minor = 0;
  int multiprocessors = 4;
  int max_shared_bytes = 166912;
  std::size_t total_bytes = std::size_t{8} << 30;
  /// Work waits in its stream until the stream is waited for. This reveals host code that reads a result, or
  /// uses a buffer again, too early.
  bool late = false;
  /// Streams that are made from now on are not late. This reveals a stream that overtakes another one that it
  /// should wait for.
  bool eager_streams = false;
  /// Of cudaThreadExchangeStreamCaptureMode.
  cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
  /// Late streams work at times that this seed draws, in any order that events allow, whenever work is put on one of
  /// them; 0: only when they are waited for. This reveals work that comes before what it needs.
  void pace(std::uint64_t seed) {
    paced_ = seed != 0;
    random_.seed(seed);
  }

  Device() { streams_.insert(&default_stream_); }

  // ---- errors --------------------------------------------------------------------------------
  /// Makes the n-th call from now that can fail do so, once; 0: none.
  void fail_after(std::uint64_t n, cudaError_t error) {
    fails_in_ = n;
    failure_ = error;
  }
  /// Every call that can fail calls this first.
  cudaError_t enter() {
    ++calls_;
    if (fails_in_ > 0 && --fails_in_ == 0) return answer(failure_);
    return cudaSuccess;
  }
  cudaError_t answer(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error_ = error;
    return error;
  }
  [[nodiscard]] std::uint64_t calls() const { return calls_; }
  /// Number of calls that made the caller wait for the device, or could have.
  [[nodiscard]] std::uint64_t waits() const { return waits_; }
  void note_wait() {
    ++waits_;
    for (const auto& pool : pools_) pool->give_back(pool->threshold);
  }
  [[nodiscard]] cudaError_t last_error() const { return last_error_; }
  void clear_error() { last_error_ = cudaSuccess; }

  // ---- memory --------------------------------------------------------------------------------
  cudaError_t allocate(void** address, std::size_t bytes, MemoryKind kind) {
    if (address == nullptr) return answer(cudaErrorInvalidValue);
    *address = nullptr;
    if (bytes == 0) return answer(cudaSuccess);
    if (kind == MemoryKind::device && bytes > total_bytes - std::min(total_bytes, live_bytes_)) {
      return answer(cudaErrorMemoryAllocation);
    }
    // Exactly this many bytes, so that AddressSanitizer detects the first byte after them.
    void* memory = ::operator new(bytes, memory_alignment, std::nothrow);
    if (memory == nullptr) return answer(cudaErrorMemoryAllocation);
    poison(memory, bytes);
    memory_.emplace(memory, Memory{bytes, kind});
    if (kind == MemoryKind::device) {
      live_bytes_ += bytes;
      peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    }
    *address = memory;
    return cudaSuccess;
  }
  cudaError_t release(void* address, MemoryKind kind) {
    if (address == nullptr) return cudaSuccess;
    const auto found = memory_.find(address);
    if (found == memory_.end() || found->second.kind != kind) return answer(cudaErrorInvalidValue);
    if (kind == MemoryKind::device) live_bytes_ -= found->second.bytes;
    if (found->second.pool != nullptr) found->second.pool->used -= found->second.bytes;
    memory_.erase(found);
    ::operator delete(address, memory_alignment);
    return cudaSuccess;
  }
  CUmemPoolHandle_st* create_pool() {
    return pools_.emplace_back(std::make_unique<CUmemPoolHandle_st>()).get();
  }
  [[nodiscard]] const auto& pools() const { return pools_; }
  cudaError_t allocate_from(CUmemPoolHandle_st& pool, void** address, std::size_t bytes) {
    const cudaError_t error = allocate(address, bytes, MemoryKind::device);
    if (error != cudaSuccess || *address == nullptr) return error;
    memory_.at(*address).pool = &pool;
    pool.used += bytes;
    if (pool.used > pool.reserved) ++pool.growths;
    pool.reserved = std::max(pool.reserved, pool.used);
    return cudaSuccess;
  }
  /// Whether all of [address, address + bytes) belongs to one allocation of this kind.
  [[nodiscard]] bool holds(const void* address, std::size_t bytes, MemoryKind kind) const {
    auto after = memory_.upper_bound(const_cast<void*>(address));
    if (after == memory_.begin()) return false;
    const auto& [start, memory] = *--after;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) -
                                                 static_cast<const std::byte*>(start));
    return memory.kind == kind && offset <= memory.bytes && bytes <= memory.bytes - offset;
  }
  /// Whether the memory was allocated by the runtime, of either kind.
  [[nodiscard]] bool owns(const void* address, std::size_t bytes) const {
    return holds(address, bytes, MemoryKind::device) || holds(address, bytes, MemoryKind::pinned);
  }
  [[nodiscard]] std::size_t live_bytes() const { return live_bytes_; }
  [[nodiscard]] std::size_t peak_bytes() const { return peak_bytes_; }
  [[nodiscard]] std::size_t allocations() const { return memory_.size(); }

  // ---- streams -------------------------------------------------------------------------------
  CUstream_st* stream_of(CUstream_st* handle) {
    // The handle is null, cudaStreamLegacy or cudaStreamPerThread.
    return reinterpret_cast<std::uintptr_t>(handle) <= 2 ? &default_stream_ : handle;
  }
  CUstream_st& default_stream() { return default_stream_; }
  [[nodiscard]] bool knows(CUstream_st* stream) const { return streams_.count(stream) != 0; }
  CUstream_st* create_stream(bool blocking) {
    auto stream = std::make_unique<CUstream_st>();
    stream->number = ++created_;
    stream->blocking = blocking;
    stream->eager = eager_streams;
    streams_.insert(stream.get());
    return stream.release();
  }
  void destroy_stream(CUstream_st* stream) {
    finish(*stream);
    streams_.erase(stream);
    delete stream;
  }
  [[nodiscard]] std::size_t streams() const { return streams_.size() - 1; }

  template <std::invocable Task>
  cudaError_t submit(CUstream_st* handle, Task task) {
    return submit(handle, Work{[task = std::move(task)](const std::function<void()>&) { task(); }});
  }
  /// Does the work now, or records it for a graph or for later.
  cudaError_t submit(CUstream_st* handle, Work work) {
    CUstream_st* stream = stream_of(handle);
    if (!knows(stream)) return answer(cudaErrorInvalidResourceHandle);
    if (stream->capture != nullptr) {
      if (stream->capture->invalid) return answer(cudaErrorStreamCaptureInvalidated);
      stream->capture->work.push_back(std::move(work));
      return cudaSuccess;
    }
    stream->pending.push_back(late ? in_default_order(*stream, std::move(work)) : std::move(work));
    ++stream->submitted;
    if (!late || stream->eager) finish(*stream);
    if (late && paced_) work_somewhere();
    return cudaSuccess;
  }
  /// Works until `ticket` pieces of work are done.
  void advance(CUstream_st& stream, std::uint64_t ticket) {
    const auto is_next = [&] { return stream.done < ticket && !stream.pending.empty(); };
    while (is_next()) {
      std::vector<Work> together;
      do {
        together.push_back(std::move(stream.pending.front()));
        stream.pending.pop_front();
        ++stream.done;
      } while (together.size() < most_overlapping && together.back().kind != WorkKind::any && is_next() &&
               stream.pending.front().kind == WorkKind::early_kernel);
      run_together(together);
    }
  }
  void finish(CUstream_st& stream) { advance(stream, stream.submitted); }
  void finish_blocking() {
    for (CUstream_st* stream : streams_) {
      if (stream->blocking) finish(*stream);
    }
  }
  void finish_all() {
    for (CUstream_st* stream : streams_) finish(*stream);
  }
  /// For calls that are not allowed while a stream is captured: the capture becomes invalid.
  [[nodiscard]] bool spoils_capture() {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
    bool spoils = false;
    for (CUstream_st* stream : streams_) {
      if (stream->capture == nullptr || stream->capture->relaxed) continue;
      stream->capture->invalid = true;
      spoils = true;
    }
    return spoils;
  }
  [[nodiscard]] const std::set<CUstream_st*>& all_streams() const { return streams_; }

 private:
  /// Kernels of a stream that run at a time, where all but the first are launched early: each of them may begin as
  /// soon as the one before it has, which itself still waits.
  static constexpr std::size_t most_overlapping = 3;

  static void run_together(std::span<const Work> works) {
    const auto earlier = works.first(works.size() - 1);
    works.back().run(earlier.empty() ? std::function<void()>{} : [earlier] { run_together(earlier); });
  }

  struct Memory {
    std::size_t bytes;
    MemoryKind kind;
    CUmemPoolHandle_st* pool = nullptr;
  };
  static constexpr std::align_val_t memory_alignment{256};

  // The default stream and those that block wait for each other.
  Work in_default_order(const CUstream_st& stream, Work work) {
    std::vector<std::pair<CUstream_st*, std::uint64_t>> before;
    if (&stream == &default_stream_) {
      for (CUstream_st* each : streams_) {
        if (each != &default_stream_ && each->blocking) before.emplace_back(each, each->submitted);
      }
    } else if (stream.blocking) {
      before.emplace_back(&default_stream_, default_stream_.submitted);
    }
    if (before.empty()) return work;
    return {[this, before = std::move(before), work = std::move(work)](const std::function<void()>&) {
      for (const auto& [other, ticket] : before) {
        if (knows(other)) advance(*other, ticket);
      }
      work.run({});
    }};
  }
  // A draw of some pieces of work, each the next one of some stream.
  void work_somewhere() {
    std::vector<CUstream_st*> streams(streams_.begin(), streams_.end());
    std::ranges::sort(streams, {}, &CUstream_st::number);  // addresses differ from run to run
    for (auto pieces = random_() % 4; pieces > 0; --pieces) {
      CUstream_st& stream = *streams[random_() % streams.size()];
      advance(stream, stream.done + random_() % 3);
    }
  }

  std::map<void*, Memory> memory_;
  std::vector<std::unique_ptr<CUmemPoolHandle_st>> pools_;
  std::size_t live_bytes_ = 0;
  std::size_t peak_bytes_ = 0;
  CUstream_st default_stream_;
  std::set<CUstream_st*> streams_;
  std::uint64_t created_ = 0;
  bool paced_ = false;
  std::mt19937_64 random_;
  std::uint64_t calls_ = 0;
  std::uint64_t waits_ = 0;
  std::uint64_t fails_in_ = 0;
  cudaError_t failure_ = cudaErrorUnknown;
  cudaError_t last_error_ = cudaSuccess;
};

inline Device& device() {
  static Device instance;
  return instance;
}

/// Makes the n-th call of the runtime from now on fail with `error`, once; 0: none.
inline void fail_after(std::uint64_t n, cudaError_t error = cudaErrorUnknown) {
  device().fail_after(n, error);
}
/// Bytes of device memory that are allocated.
inline std::size_t live_bytes() { return device().live_bytes(); }

}  // namespace kvpolicy::gpu::simt
