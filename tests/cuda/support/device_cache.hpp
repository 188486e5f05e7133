// SPDX-License-Identifier: Apache-2.0
//
// What tests of the device cache have in common: tensors in device memory, streams, graphs, a plan
// of many policies, and all that can be seen of a cache. Runs on the emulation and on a device.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "cache/dump.hpp"
#include "cuda/support/device_backend.hpp"
#include "support/compare.hpp"
#include "support/plans.hpp"
#include "support/tensors.hpp"

namespace test {

using kvpolicy::AttendOptions;
using DevicePlan = kvpolicy::HeadPlan<kvpolicy::float16>;
using DeviceCache = kvpolicy::gpu::KvCache<kvpolicy::float16>;

inline void succeed(cudaError_t status) { REQUIRE(status == cudaSuccess); }

/// An emulated device of few multiprocessors: engines that are made meanwhile launch few blocks,
/// which takes the less time. Back to normal at the end, whatever else was set.
class SmallDevice {
 public:
#if defined(__CUDACC__)
  SmallDevice() {}
  ~SmallDevice() {}
#else
  SmallDevice() { device_.multiprocessors = 2; }
  ~SmallDevice() {
    device_.multiprocessors = 4;
    device_.devices = 1;
    device_.major = 8;
    device_.late = false;
    device_.fail_after(0, cudaSuccess);
    cudaGetLastError();
    device_.finish_all();  // engines give memory back on the default stream
  }
#endif
  SmallDevice(const SmallDevice&) = delete;
  SmallDevice& operator=(const SmallDevice&) = delete;

#if !defined(__CUDACC__)
 private:
  kvpolicy::gpu::simt::Device& device_ = kvpolicy::gpu::simt::device();
#endif
};

/// Meanwhile an emulated device's streams work late: when they are waited for or, with a seed, at times that it draws.
/// A device works at its own pace.
class LateStreams {
 public:
#if defined(__CUDACC__)
  explicit LateStreams(bool = true, std::uint64_t = 0) {}
  ~LateStreams() {}
#else
  explicit LateStreams(bool late = true, std::uint64_t seed = 0) {
    device_.late = late;
    device_.pace(seed);
  }
  ~LateStreams() {
    device_.late = false;
    device_.pace(0);
  }
#endif
  LateStreams(const LateStreams&) = delete;
  LateStreams& operator=(const LateStreams&) = delete;

#if !defined(__CUDACC__)
 private:
  kvpolicy::gpu::simt::Device& device_ = kvpolicy::gpu::simt::device();
#endif
};

class Stream {
 public:
  Stream() { succeed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  operator cudaStream_t() const { return stream_; }  // NOLINT: it stands for it
  void wait() const { succeed(cudaStreamSynchronize(stream_)); }
  /// Work put here from now on comes after what is on `other` now.
  void wait_for(const Stream& other) const {
    cudaEvent_t event = nullptr;
    succeed(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    succeed(cudaEventRecord(event, other.stream_));
    succeed(cudaStreamWaitEvent(stream_, event, 0));
    succeed(cudaEventDestroy(event));
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What `record` puts on the stream, to be launched again and again.
class Graph {
 public:
  template <class Record>
  Graph(const Stream& stream, Record record) {
    succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    record();
    cudaGraph_t graph = nullptr;
    succeed(cudaStreamEndCapture(stream, &graph));
    succeed(cudaGraphInstantiate(&graph_, graph, 0));
    succeed(cudaGraphDestroy(graph));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(graph_); }

  void launch(const Stream& stream) const { succeed(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

/// An array in device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_{count} {
    void* memory = nullptr;
    if (count > 0) succeed(cudaMalloc(&memory, count * sizeof(T)));
    data_ = static_cast<T*>(memory);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : count_{std::exchange(other.count_, 0)}, data_{std::exchange(other.data_, nullptr)} {}
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  void upload(const std::vector<T>& numbers, cudaStream_t stream = nullptr) const {
    REQUIRE(numbers.size() == count_);
    succeed(cudaMemcpyAsync(data_, numbers.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream));
#if defined(__CUDACC__)
    // There a vector is memory that the device shares (cuda/gpu/main.cpp), copied in its own time.
    succeed(cudaStreamSynchronize(stream));
#endif
  }
  [[nodiscard]] std::vector<T> download(cudaStream_t stream = nullptr) const {
    std::vector<T> numbers(count_);
    succeed(cudaMemcpyAsync(numbers.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream));
    succeed(cudaStreamSynchronize(stream));
    return numbers;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

/// The tensors of one layer's call, contiguous, in device memory.
template <class E = kvpolicy::float16>
struct DeviceChunk {
  kvpolicy::ModelShape shape;
  std::size_t tokens;
  DeviceArray<E> q, k, v, out;
  DeviceArray<float> log_sum_exp;

  DeviceChunk(const kvpolicy::ModelShape& model, std::size_t count)
      : shape{model},
        tokens{count},
        q{count * model.q_heads * model.head_dim},
        k{count * model.kv_heads * model.head_dim},
        v{k.size()},
        out{q.size()},
        log_sum_exp{count * model.q_heads} {}
  DeviceChunk(Random& random, const kvpolicy::ModelShape& model, std::size_t count,
              cudaStream_t stream = nullptr)
      : DeviceChunk{model, count} {
    randomize(random, stream);
  }

  void randomize(Random& random, cudaStream_t stream = nullptr) const {
    for (const DeviceArray<E>* tensor : {&q, &k, &v}) {
      std::vector<E> numbers(tensor->size());
      for (E& number : numbers) number = E{normal(random)};
      tensor->upload(numbers, stream);
    }
  }
  /// `count` tokens from `first` on, of a tensor that has `heads` heads.
  template <class T>
  [[nodiscard]] kvpolicy::TensorView<T> rows(T* data, std::size_t heads, std::size_t first,
                                             std::size_t count) const {
    const std::size_t stride = heads * shape.head_dim;
    return {data + first * stride, count, heads, shape.head_dim, stride, shape.head_dim};
  }
  template <class Cache>
  void step(Cache& cache, std::size_t layer, AttendOptions options = {},
            cudaStream_t stream = nullptr) const {
    step_part(cache, layer, 0, tokens, options, stream);
  }
  template <class Cache>
  void step_part(Cache& cache, std::size_t layer, std::size_t first, std::size_t count,
                 AttendOptions options = {}, cudaStream_t stream = nullptr) const {
    options.log_sum_exp = {log_sum_exp.data() + first * shape.q_heads, count * shape.q_heads};
    cache.step(layer, rows<const E>(q.data(), shape.q_heads, first, count),
               rows<const E>(k.data(), shape.kv_heads, first, count),
               rows<const E>(v.data(), shape.kv_heads, first, count),
               rows<E>(out.data(), shape.q_heads, first, count), options, stream);
  }
  template <class Cache>
  void append(Cache& cache, std::size_t layer, cudaStream_t stream = nullptr) const {
    cache.append(layer, rows<const E>(k.data(), shape.kv_heads, 0, tokens),
                 rows<const E>(v.data(), shape.kv_heads, 0, tokens), stream);
  }
  template <class Cache>
  void append_part(Cache& cache, std::size_t layer, std::size_t first, std::size_t count,
                   const AttendOptions& options, cudaStream_t stream = nullptr) const {
    cache.append(layer, rows<const E>(k.data(), shape.kv_heads, first, count),
                 rows<const E>(v.data(), shape.kv_heads, first, count), options, stream);
  }
  template <class Cache>
  void attend_part(Cache& cache, std::size_t layer, std::size_t first, std::size_t count,
                   AttendOptions options = {}, cudaStream_t stream = nullptr) const {
    options.log_sum_exp = {log_sum_exp.data() + first * shape.q_heads, count * shape.q_heads};
    cache.attend(layer, rows<const E>(q.data(), shape.q_heads, first, count),
                 rows<E>(out.data(), shape.q_heads, first, count), options, stream);
  }
  template <class Cache>
  void attend(Cache& cache, std::size_t layer, AttendOptions options = {},
              cudaStream_t stream = nullptr) const {
    options.log_sum_exp = {log_sum_exp.data(), log_sum_exp.size()};
    cache.attend(layer, rows<const E>(q.data(), shape.q_heads, 0, tokens),
                 rows<E>(out.data(), shape.q_heads, 0, tokens), options, stream);
  }
  /// Outputs, then log-sum-exps. Waits for the stream.
  [[nodiscard]] std::vector<float> results(cudaStream_t stream = nullptr) const {
    std::vector<float> all;
    for (const E number : out.download(stream)) all.push_back(static_cast<float>(number));
    for (const float number : log_sum_exp.download(stream)) all.push_back(number);
    return all;
  }
};

/// Feeds every layer random chunks of these lengths. Waits for the stream.
template <class Cache>
void feed_device(Cache& cache, std::uint64_t seed, const std::vector<std::size_t>& chunks,
                 const AttendOptions& options = {}, cudaStream_t stream = nullptr) {
  Random random{seed};
  for (const std::size_t tokens : chunks) {
    for (std::size_t layer = 0; layer < cache.plan().shape().layers; ++layer) {
      const DeviceChunk<typename Cache::element_type> chunk{random, cache.plan().shape(), tokens, stream};
      chunk.step(cache, layer, options, stream);
      succeed(cudaStreamSynchronize(stream));
    }
  }
}

/// The results of one more step of random numbers on every layer.
template <class Cache>
std::vector<float> next_step(Cache& cache, std::uint64_t seed, std::size_t tokens,
                             const AttendOptions& options = {}, cudaStream_t stream = nullptr) {
  std::vector<float> all;
  Random random{seed};
  for (std::size_t layer = 0; layer < cache.plan().shape().layers; ++layer) {
    const DeviceChunk<typename Cache::element_type> chunk{random, cache.plan().shape(), tokens, stream};
    chunk.step(cache, layer, options, stream);
    const auto results = chunk.results(stream);
    all.insert(all.end(), results.begin(), results.end());
  }
  return all;
}

/// All that can be seen of a cache. `with_bytes`: how much memory it has as well.
template <class Cache>
Dump dump_device(const Cache& cache, bool with_bytes = true, cudaStream_t stream = nullptr) {
  const auto& shape = cache.plan().shape();
  Dump dump;
  dump.counts = {cache.tokens(), cache.commit_point()};
  if (with_bytes)
    dump.counts.insert(dump.counts.end(), {cache.bytes(), cache.overhead_bytes(), cache.reserved()});
  for (std::size_t l = 0; l < shape.layers; ++l) {
    dump.counts.push_back(cache.tokens(l));
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
      for (const auto read : {kvpolicy::Read::all, kvpolicy::Read::selected}) {
        const auto rows = cache.rows(l, h, read, 0, stream);
        dump.counts.push_back(rows.positions.size());
        for (std::size_t i = 0; i < rows.positions.size(); ++i) {
          dump.counts.push_back(static_cast<std::size_t>(rows.positions[i]) * 2 +
                                (rows.quantized[i] ? 1 : 0));
        }
        dump.numbers.insert(dump.numbers.end(), rows.keys.begin(), rows.keys.end());
        dump.numbers.insert(dump.numbers.end(), rows.values.begin(), rows.values.end());
      }
    }
  }
  return dump;
}

/// Compresses a cache of this memory, which fails at its first request, then at its second and so on, until none fails;
/// whatever fails leaves all as it was. Returns how many requests there are.
template <class Cache>
std::size_t compress_without_memory(Cache& cache, CountingDeviceMemory& memory) {
  const Dump before = dump_device(cache);
  const std::size_t live = memory.live_bytes();
  for (std::size_t fits = 0;; ++fits) {
    memory.fail_after(fits);
    bool failed = false;
    try {
      cache.compress();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    memory.fail_after(never);
    if (!failed) return fits;
    REQUIRE(dump_device(cache) == before);
    REQUIRE(memory.live_bytes() == live);
  }
}

/// Rings that go round, blocks that are quantised, chunks that are chosen, rows that are dropped.
inline std::vector<HeadSpec> mixed_heads() {
  return {
      {},
      {.bits = 4, .residual = 20},
      {.kind = Kind::window, .sinks = 4, .recent = 37},
      {.kind = Kind::window, .sinks = 3, .recent = 90, .bits = 8, .residual = 9, .halves = true},
      {.kind = Kind::window, .sinks = 5, .recent = 64, .in_cache = true},
      {.kind = Kind::retrieval, .budget = 32, .chunk = 8},
      {.kind = Kind::budget, .budget = 30, .window = 8},
      {.bits = 4,
       .key_group = 16,
       .residual = 13,
       .per_channel = true,
       .key_hadamard = true,
       .value_hadamard = true},
  };
}
/// The same heads in every layer, in another order in each.
inline DevicePlan mixed_device_plan(const kvpolicy::ModelShape& shape) {
  const std::vector<HeadSpec> all = mixed_heads();
  std::vector<HeadSpec> heads;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    for (std::size_t h = 0; h < shape.kv_heads; ++h) heads.push_back(all[(h + 3 * l) % all.size()]);
  }
  return plan_of<kvpolicy::float16>(shape, heads);
}

}  // namespace test
