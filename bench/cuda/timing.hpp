// SPDX-License-Identifier: Apache-2.0
//
// Times work on a stream with events; the second-level cache holds none of the work's data.
//
// Before each sample a buffer of four times the cache's size is written, and half of it is read. This takes the device
// longer than the host needs to enqueue the events and the work, so no gap made by the host is
// timed; and what was written has left the cache, whose dirty lines would otherwise be written back, up to 50 MB of them, while
// the work is timed. The time that the device itself takes from event to launch remains; it is measured as the
// time of an empty sample, which is printed and not subtracted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>

#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

#include "flush.cuh"

namespace kvpolicy::bench {

class Timer {
 public:
  Timer(std::size_t flushed_bytes, cudaStream_t stream)
      : stream_{stream},
        bytes_{flushed_bytes},
        flushed_{gpu::allocate(gpu::default_memory(), flushed_bytes, stream)} {
    gpu::check(cudaEventCreate(&begin_), "cudaEventCreate");
    gpu::check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }

  /// Seconds that the work that `work()` puts on the stream takes. Waits for it.
  template <class Work>
  double seconds(Work work) {
    round_ = (round_ + 1) % 128;
    gpu::check(cudaMemsetAsync(flushed_.get(), round_, bytes_, stream_), "cudaMemsetAsync");
    gpu::launch(gpu::Kernel{read_kernel<>, "read_kernel", read_threads}, {.x = 512}, stream_,
                {.from = reinterpret_cast<const gpu::Words4*>(flushed_.get()),
                 .count = static_cast<long long>(bytes_ / 2 / sizeof(gpu::Words4)),
                 .never = 0xffffffffU,
                 .to = reinterpret_cast<std::uint32_t*>(flushed_.get())});
    gpu::check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    work();
    gpu::check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    gpu::check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0.0F;
    gpu::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaStream_t stream_;
  std::size_t bytes_;
  gpu::DeviceBuffer flushed_;
  int round_ = 0;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// The samples of one benchmark.
class Samples {
 public:
  void add(double seconds) { seconds_.insert(std::ranges::upper_bound(seconds_, seconds), seconds); }
  [[nodiscard]] std::size_t count() const { return seconds_.size(); }
  /// The sample below which a `share` of all samples lie.
  [[nodiscard]] double at(double share) const {
    return seconds_[static_cast<std::size_t>(share * static_cast<double>(seconds_.size() - 1) + 0.5)];
  }
  [[nodiscard]] double median() const { return at(0.5); }

 private:
  std::vector<double> seconds_;  // ascending
};

/// Bytes per second, read plus written, of a plain copy within the device's memory.
[[nodiscard]] inline double copy_bandwidth(Timer& timer, std::size_t bytes, cudaStream_t stream) {
  const gpu::DeviceBuffer from = gpu::allocate(gpu::default_memory(), bytes, stream);
  const gpu::DeviceBuffer to = gpu::allocate(gpu::default_memory(), bytes, stream);
  gpu::check(cudaMemsetAsync(from.get(), 1, bytes, stream), "cudaMemsetAsync");
  Samples samples;
  for (int i = 0; i < 12; ++i) {
    const double seconds = timer.seconds([&] {
      gpu::check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
    });
    if (i >= 2) samples.add(seconds);
  }
  return 2.0 * static_cast<double>(bytes) / samples.median();
}

/// Seconds of a sample without work.
[[nodiscard]] inline double empty_sample(Timer& timer) {
  Samples samples;
  for (int i = 0; i < 20; ++i) samples.add(timer.seconds([] {}));
  return samples.median();
}

}  // namespace kvpolicy::bench
