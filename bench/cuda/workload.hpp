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

#include "device_info.hpp"
#include "reads.hpp"
#include "tensor16.hpp"
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
