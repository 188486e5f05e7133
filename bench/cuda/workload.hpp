// SPDX-License-Identifier: Apache-2.0
//
// Shared by all cases of the attention bench: one plan type, random numbers made on the device,
// caches filled by `append`, and the facts of the run (device, timer, results so far).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <reference_model/cuda/kernels/random.cuh>
#include <reference_model/cuda/tabulate.hpp>

#include "device_info.hpp"
#include "reads.hpp"
#include "timing.hpp"

namespace kvpolicy::bench {

using Dense = DenseStorage<bfloat16>;
using Full = FullCache<Dense>;
using Streaming = SinkRecentCache<Dense>;
using Quantized = QuantizedResidualCache<bfloat16>;
using Kivi = QuantizedResidualCache<bfloat16, Granularity::per_channel>;
using MeanChunks = ChunkRetrievalCache<Dense, MeanKey>;
using MinMaxChunks = ChunkRetrievalCache<Dense, MinMaxKey>;
using Plan = HeadPlan<bfloat16>;
using Cache = gpu::KvCache<bfloat16>;
using Engine = gpu::Engine<bfloat16>;

/// The state of one run of the program.
struct Run {
  Run() = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    timer.reset();
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }

  DeviceInfo device;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Timer> timer;
  double copy_bytes_per_second = 0.0;
  std::size_t samples = 50;               ///< for each case except prefills that take seconds
  bool smoke = false;                     ///< small shapes, to test that every case runs
  bool failed = false;                    ///< set if any result was wrong
  std::map<std::string, double> seconds;  ///< medians by case, for ratios
  std::map<std::string, double> rates;    ///< bytes per second by case, where ratios are per byte
};

/// A device tensor of 16-bit numbers.
class Tensor16 {
 public:
  Tensor16(std::size_t count, cudaStream_t stream)
      : count_{count}, memory_{gpu::allocate(gpu::default_memory(), count * sizeof(bfloat16), stream)} {}

  [[nodiscard]] bfloat16* data() const { return reinterpret_cast<bfloat16*>(memory_.get()); }
  [[nodiscard]] std::size_t count() const { return count_; }

  /// Fills it with uniformly distributed numbers of mean 0 and variance 1, which spreads logits as
  /// in a trained model.
  void randomize(std::uint64_t seed, cudaStream_t stream) const {
    reference::tabulate(bits(), count_, gpu::llama::RandomNumbers{seed << 32, 1.7320508F}, stream);
  }
  /// Fills it with NaN, so that an element that is never written is found.
  void poison(cudaStream_t stream) const {
    gpu::check(cudaMemsetAsync(memory_.get(), 0xff, count_ * sizeof(bfloat16), stream), "cudaMemsetAsync");
  }
  /// How many of its numbers are NaN. Waits for the stream.
  [[nodiscard]] std::size_t nans(cudaStream_t stream) const {
    return reference::count_of(bits(), count_, gpu::llama::IsNan{}, stream);
  }

  [[nodiscard]] TensorView<bfloat16> view(std::size_t heads, std::size_t head_dim) const {
    return {data(), count_ / heads / head_dim, heads, head_dim};
  }

 private:
  [[nodiscard]] std::uint16_t* bits() const { return reinterpret_cast<std::uint16_t*>(memory_.get()); }

  std::size_t count_;
  gpu::DeviceBuffer memory_;
};

/// Rows in one `append`.
inline constexpr std::size_t portion_rows = 4096;

/// Appends random rows to layers.
class Filler {
 public:
  Filler(const ModelShape& shape, std::size_t portion, cudaStream_t stream)
      : shape_{shape},
        stream_{stream},
        keys_{portion * shape.kv_heads * shape.head_dim, stream},
        values_{keys_.count(), stream} {}

  /// Appends rows until the layer has `tokens`. The latest rows stay tentative until the cache's
  /// next call.
  template <class AnyCache>
  void fill(AnyCache& cache, std::size_t layer, std::size_t tokens) {
    const std::size_t portion = keys_.count() / shape_.kv_heads / shape_.head_dim;
    while (cache.tokens(layer) < tokens) {
      const std::size_t rows = std::min(portion, tokens - cache.tokens(layer));
      keys_.randomize(++seed_, stream_);
      values_.randomize(++seed_, stream_);
      cache.append(layer, TensorView<const bfloat16>{view(keys_).slice(0, rows)},
                   TensorView<const bfloat16>{view(values_).slice(0, rows)}, stream_);
    }
  }

 private:
  [[nodiscard]] TensorView<bfloat16> view(const Tensor16& rows) const {
    return rows.view(shape_.kv_heads, shape_.head_dim);
  }

  ModelShape shape_;
  cudaStream_t stream_;
  Tensor16 keys_;
  Tensor16 values_;
  std::uint64_t seed_ = 0;
};

/// Reports the seconds that `measure()` returns, once for each iteration.
template <class Measure>
[[nodiscard]] Samples sample(benchmark::State& state, Measure measure) {
  Samples samples;
  for (auto _ : state) {
    const double seconds = measure();
    state.SetIterationTime(seconds);
    samples.add(seconds);
  }
  return samples;
}

/// Reports times (median, 10th and 90th percentile) and rates. `seconds` is one layer's share.
inline void report_times(benchmark::State& state, Run& run, const std::string& name, const Samples& samples,
                         double layers) {
  const double median = samples.median() / layers;
  run.seconds[name] = median;
  state.counters["us"] = median * 1e6;
  state.counters["us_p10"] = samples.at(0.1) / layers * 1e6;
  state.counters["us_p90"] = samples.at(0.9) / layers * 1e6;
  state.counters["samples"] = static_cast<double>(samples.count());
  state.counters["layers"] = layers;
}
inline void report_bytes(benchmark::State& state, const Run& run, double seconds, double bytes) {
  state.counters["bytes"] = bytes;
  state.counters["GB_per_s"] = bytes / seconds * 1e-9;
  state.counters["percent_of_nominal"] = 100 * bytes / seconds / run.device.bytes_per_second;
  state.counters["percent_of_copy"] = 100 * bytes / seconds / run.copy_bytes_per_second;
  state.counters["limit_us"] = bytes / run.device.bytes_per_second * 1e6;
}
/// How many times as fast this case is as another one of the run.
inline void report_ratio(benchmark::State& state, const Run& run, const std::string& baseline,
                         double seconds) {
  const auto found = run.seconds.find(baseline);
  if (found != run.seconds.end()) state.counters["speedup"] = found->second / seconds;
}

}  // namespace kvpolicy::bench
