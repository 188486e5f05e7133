// SPDX-License-Identifier: Apache-2.0
//
// The device cache as tests/cache/sequence.hpp drives it: the same random operations, the same
// models, the same oracle as the host's.
#pragma once

#include <doctest/doctest.h>

#include <concepts>
#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <kvpolicy/cuda.hpp>

#include "cache/random_operations.hpp"

namespace test {

/// Counts what lives, fails on demand.
class CountingDeviceMemory : public kvpolicy::gpu::MemoryResource {
 public:
  explicit CountingDeviceMemory(MemoryResource* from = kvpolicy::gpu::default_memory()) : from_{from} {}

  void* allocate(std::size_t bytes, cudaStream_t stream) override {
    if (left_ == 0) throw std::bad_alloc{};
    if (left_ != never) --left_;
    void* memory = from_->allocate(bytes, stream);
    blocks_[memory] = bytes;
    live_ += bytes;
    ++allocations_;
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, cudaStream_t stream) noexcept override {
    const auto found = blocks_.find(memory);
    if (found == blocks_.end() || found->second != bytes) {
      ++faults_;
      return;
    }
    live_ -= bytes;
    blocks_.erase(found);
    from_->deallocate(memory, bytes, stream);
  }

  [[nodiscard]] std::size_t live_bytes() const { return live_; }
  [[nodiscard]] std::size_t live_blocks() const { return blocks_.size(); }
  [[nodiscard]] std::size_t allocations() const { return allocations_; }
  /// Blocks given back that were never given, or with another size.
  [[nodiscard]] std::size_t faults() const { return faults_; }
  void fail_after(std::size_t successes) { left_ = successes; }
  /// visit(start, bytes) of all that lives.
  template <class Visit>
  void for_each_block(Visit visit) const {
    for (const auto& [start, bytes] : blocks_) visit(start, bytes);
  }

 private:
  MemoryResource* from_;
  std::map<void*, std::size_t> blocks_;
  std::size_t live_ = 0;
  std::size_t allocations_ = 0;
  std::size_t faults_ = 0;
  std::size_t left_ = never;
};

/// Memory of the device, with memory of the host beside it.
struct TwoDeviceMemories : CountingDeviceMemory {
  kvpolicy::gpu::PinnedMemory pinned;
  CountingDeviceMemory slow{&pinned};

  [[nodiscard]] std::size_t live_bytes() const {
    return CountingDeviceMemory::live_bytes() + slow.live_bytes();
  }
  [[nodiscard]] std::size_t live_blocks() const {
    return CountingDeviceMemory::live_blocks() + slow.live_blocks();
  }
  [[nodiscard]] std::size_t faults() const { return CountingDeviceMemory::faults() + slow.faults(); }
};

/// Waits after each call: tests give their tensors back at once. Sink logits go to the device, where
/// the cache copies them from.
template <kvpolicy::Element E>
class WaitingCache : public kvpolicy::gpu::KvCache<E> {
 public:
  using Base = kvpolicy::gpu::KvCache<E>;
  using Base::Base;
  explicit WaitingCache(Base base) : Base{std::move(base)} {}

  [[nodiscard]] WaitingCache fork() const { return WaitingCache{Base::fork()}; }
  template <class Q, class K, class V, class Out>
  void step(std::size_t layer, Q q, K k, V v, Out out, kvpolicy::AttendOptions options = {}) {
    const auto sinks = move_sinks(options);
    Base::step(layer, q, k, v, out, options);
    wait();
  }
  template <class... Arguments>
  void append(Arguments&&... arguments) {
    Base::append(std::forward<Arguments>(arguments)...);
    wait();
  }
  template <class Q, class Out>
  void attend(std::size_t layer, Q q, Out out, kvpolicy::AttendOptions options = {}) {
    const auto sinks = move_sinks(options);
    Base::attend(layer, q, out, options);
    wait();
  }

 protected:
  static kvpolicy::gpu::DeviceBuffer move_sinks(kvpolicy::AttendOptions& options) {
    const std::size_t bytes = options.attention_sink_bias.size_bytes();
    if (bytes == 0) return {};
    auto block = kvpolicy::gpu::allocate(kvpolicy::gpu::default_memory(), bytes, nullptr);
    kvpolicy::gpu::check(cudaMemcpyAsync(block.get(), options.attention_sink_bias.data(), bytes,
                                         cudaMemcpyHostToDevice, nullptr),
                         "cudaMemcpyAsync");
    options.attention_sink_bias = {reinterpret_cast<const float*>(block.get()),
                                   options.attention_sink_bias.size()};
    return block;
  }
  static void wait() { kvpolicy::gpu::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"); }
};

template <kvpolicy::Element E>
struct DeviceBackend {
  using Cache = WaitingCache<E>;
  using Options = kvpolicy::gpu::CacheOptions;
  using Memory = CountingDeviceMemory;
  using Out = E;
  // Probabilities and outputs are rounded to E, 2^-9 or 2^-12 of numbers up to about 3; quantised
  // rows to half, and in prefill to E.
  static constexpr double out_error = std::same_as<E, kvpolicy::float16> ? 4e-3 : 3e-2;
  static constexpr double lse_error = std::same_as<E, kvpolicy::float16> ? 4e-3 : 3e-2;
  static constexpr double score_error = 1e-5;
  static constexpr double mean_error = std::same_as<E, kvpolicy::float16> ? 0.05 : 0.2;
  static constexpr double bound_error = 1e-3;
  static constexpr Layout odd_layout = Layout::aligned;
  static constexpr std::size_t flush_rows = kvpolicy::gpu::quantized_together;
  static constexpr bool trees = true;

  /// Rows of the text; the model knows the nodes of a pending tree.
  static Rows rows_of(const Cache& cache, std::size_t l, std::size_t h, Read read, std::size_t appended) {
    const std::size_t dim = cache.plan().shape().head_dim;
    const kvpolicy::gpu::CachedRows cached = cache.rows(l, h, read, appended);
    Rows rows;
    bool once = true;
    for (std::size_t i = 0; i < cached.positions.size() - cached.nodes; ++i) {
      oracle::Row& row = rows[cached.positions[i]];
      once = once && row.key.empty();
      row.position = cached.positions[i];
      const auto first = static_cast<std::ptrdiff_t>(i * dim);
      const auto last = first + static_cast<std::ptrdiff_t>(dim);
      row.key.assign(cached.keys.begin() + first, cached.keys.begin() + last);
      row.value.assign(cached.values.begin() + first, cached.values.begin() + last);
    }
    CHECK(once);
    return rows;
  }
  /// Tentative rows lie where committed ones do: they are shown as well.
  static Rows held(const Cache& cache, std::size_t l, std::size_t h, Read read, std::size_t appended) {
    return rows_of(cache, l, h, read, appended);
  }
  static Rows shown(const Cache& cache, std::size_t l, std::size_t h, Read read) {
    return rows_of(cache, l, h, read, 0);
  }
  static void check_held(const Cache& cache, std::size_t l, std::size_t h, const Rows& rows,
                         const HeadModel& model) {
    const kvpolicy::gpu::CachedRows cached = cache.rows(l, h);
    const std::size_t text = cached.quantized.size() - cached.nodes;
    std::size_t wrong = text == rows.size() ? 0 : 1;
    for (std::size_t i = 0; i < text; ++i) {
      const std::int64_t position = cached.positions[i];
      if (cached.quantized[i] != model.key_is_quantized(position)) ++wrong;
    }
    CHECK(wrong == 0);
  }
  static std::size_t live_bytes(const std::vector<const Cache*>& caches) {
    std::size_t total = caches.front()->engine()->workspace_bytes();
    for (const Cache* cache : caches) total += cache->bytes() + cache->overhead_bytes();
    return total - (caches.size() > 1 ? caches.front()->shared_bytes() : 0);
  }
};

/// A cache with slow memory: it does what the one without does, and what can be there is there.
template <kvpolicy::Element E>
struct SlowDeviceBackend : DeviceBackend<E> {
  using Memory = TwoDeviceMemories;

  /// `bytes`: of the rows that stay for good.
  static void check_slow(const typename DeviceBackend<E>::Cache& cache, std::size_t bytes) {
    CHECK(cache.slow_bytes() >= bytes);
  }
};

/// Every kind of head that the kernels serve.
inline std::vector<HeadSpec> device_heads() {
  constexpr std::size_t block = kvpolicy::gpu::quantized_together;
  std::vector<HeadSpec> heads{
      {},
      {.bits = 4, .residual = 20},
      {.bits = 8, .value_bits = 4, .key_group = 32, .value_group = 16},
      {.bits = 2, .key_group = 16, .value_group = 32, .residual = 13, .per_channel = true},
      {.bits = 4, .value_bits = 2, .key_group = 32, .residual = 64, .per_channel = true},
      {.sinks = 4, .bits = 4, .residual = 20},
      {.sinks = 35, .bits = 2, .key_group = 32, .residual = 40, .per_channel = true},
      {.sinks = 4, .bits = 4, .key_group = 64, .residual = 9, .per_channel = true},
      {.kind = Kind::window, .sinks = 4, .recent = 37},
      {.kind = Kind::window, .sinks = 0, .recent = 1},
      {.kind = Kind::window, .sinks = 33, .recent = 16, .prefill_chunk_mask = true},
      {.kind = Kind::window, .sinks = 5, .recent = 64, .in_cache = true},
      {.kind = Kind::window, .sinks = 3, .recent = 140, .bits = 2, .key_bits = 8, .residual = 9},
      {.kind = Kind::window, .sinks = 1, .recent = 17, .prefill_chunk_mask = true, .bits = 4, .residual = 50},
      {.kind = Kind::budget, .budget = 30, .window = 8},
      {.kind = Kind::budget, .budget = 0, .window = 5, .kernel = 5, .average = true},
      {.kind = Kind::budget, .budget = 24, .window = 3, .kernel = 1, .compress_every = 40},
      {.kind = Kind::budget, .budget = 26, .window = 7, .kernel = 5, .largest = true},
      {.kind = Kind::budget, .budget = 19, .window = 5, .average = true, .largest = true},
      {.kind = Kind::budget, .budget = 23, .window = 4, .kernel = 3, .weighed = true},
      {.kind = Kind::budget, .budget = 11, .window = 4, .compress_every = 9, .after_first = true},
      {.kind = Kind::budget, .budget = 9, .window = 4, .compress_from = 75},
      {.kind = Kind::budget, .budget = 6, .window = 2, .compress_every = 20, .compress_from = 60},
      {.kind = Kind::budget, .budget = 20, .window = 5, .compress_from = 90, .bits = 4, .residual = 3},
      {.kind = Kind::budget,
       .budget = 140,
       .window = 6,
       .kernel = 3,
       .bits = 8,
       .value_bits = 4,
       .residual = 7},
      {.kind = Kind::budget, .budget = 40, .window = 6, .bits = 4, .residual = 10},
      {.kind = Kind::budget, .budget = 40, .window = 6, .bits = 4, .residual = 10, .kivi = true},
      {.kind = Kind::budget,
       .budget = 21,
       .window = 3,
       .compress_from = 50,
       .bits = 8,
       .value_bits = 2,
       .residual = 24,
       .kivi = true},
      {.kind = Kind::budget,
       .budget = 150,
       .window = 6,
       .bits = 4,
       .value_group = 32,
       .residual = 96,
       .kivi = true},
      {.kind = Kind::budget, .rank = Rank::tova, .budget = 33, .window = 0},
      {.kind = Kind::budget, .rank = Rank::tova, .budget = 20, .window = 0, .compress_every = 1},
      {.kind = Kind::budget, .rank = Rank::h2o, .budget = 17, .window = 9},
      {.kind = Kind::budget, .rank = Rank::h2o, .budget = 25, .window = 0, .compress_every = 3},
      {.kind = Kind::budget, .rank = Rank::h2o, .budget = 18, .window = 4, .largest = true},
      {.kind = Kind::budget, .rank = Rank::h2o, .budget = 22, .window = 3, .weighed = true},
      {.kind = Kind::budget, .rank = Rank::key_norm, .budget = 31, .window = 2},
      {.kind = Kind::budget, .rank = Rank::key_norm, .budget = 12, .window = 0, .compress_every = 5},
      {.kind = Kind::budget, .rank = Rank::key_diff, .budget = 29, .window = 2},
      {.kind = Kind::budget, .rank = Rank::key_diff, .budget = 14, .window = 0, .compress_every = 6},
      {.kind = Kind::budget, .rank = Rank::expected, .budget = 28, .window = 0, .draws = 12, .future = 30},
      {.kind = Kind::budget,
       .rank = Rank::expected,
       .budget = 13,
       .window = 3,
       .compress_every = 8,
       .weighed = true,
       .draws = 5,
       .future = 1},
      {.kind = Kind::retrieval, .budget = 32, .chunk = 8},
      {.kind = Kind::retrieval, .budget = 15, .chunk = 5, .refresh_every = 1, .min_max = true},
      {.kind = Kind::retrieval, .budget = 64, .chunk = 16, .refresh_every = 20, .bits = 4, .residual = 11},
      {.kind = Kind::retrieval,
       .budget = 32,
       .chunk = 16,
       .bits = 8,
       .value_bits = 4,
       .key_group = 16,
       .residual = 19,
       .per_channel = true},
      {.kind = Kind::retrieval, .budget = 64, .chunk = 32, .min_max = true, .bits = 2, .residual = 3},
      {.bits = 4, .value_bits = 2, .key_group = 16, .residual = 32, .per_channel = true, .kivi = true},
      {.bits = 2, .key_group = 32, .residual = 128, .per_channel = true, .kivi = true},
      {.bits = 8, .residual = 24, .kivi = true},
      {.sinks = 4,
       .bits = 3,
       .key_group = 64,
       .residual = 20,
       .per_channel = true,
       .key_hadamard = true,
       .value_hadamard = true},
      {.bits = 5, .key_group = 16, .residual = 48, .per_channel = true, .kivi = true},
      {.sinks = 3,
       .bits = 8,
       .key_group = 32,
       .residual = 20,
       .per_channel = true,
       .key_hadamard = true,
       .halves = true},
      {.kind = Kind::budget,
       .budget = 37,
       .window = 5,
       .bits = 8,
       .value_bits = 3,
       .residual = 8,
       .halves = true},
      {.kind = Kind::retrieval,
       .budget = 48,
       .chunk = 16,
       .bits = 5,
       .value_bits = 8,
       .residual = 6,
       .halves = true},
      {.bits = 8, .key_group = 16, .residual = 48, .per_channel = true, .halves = true, .kivi = true},
      {.kind = Kind::window, .sinks = 2, .recent = 130, .bits = 6, .key_bits = 2, .residual = 7},
      {.kind = Kind::budget, .budget = 40, .window = 6, .bits = 6, .value_bits = 3, .residual = 10},
      {.kind = Kind::retrieval, .budget = 64, .chunk = 16, .bits = 3, .residual = 5},
      {.kind = Kind::window,
       .sinks = 2,
       .recent = 70,
       .bits = 4,
       .value_group = 32,
       .residual = 16,
       .kivi = true},
      {.kind = Kind::retrieval,
       .budget = 32,
       .chunk = 16,
       .refresh_every = 33,
       .min_max = true,
       .bits = 4,
       .key_group = 16,
       .residual = 48,
       .per_channel = true,
       .kivi = true},
  };
  const std::vector<HeadSpec> rotated{
      {.bits = 4, .value_bits = 2, .key_group = 32, .residual = 20, .per_channel = true},
      {.sinks = 4, .bits = 8, .residual = 9},
      {.kind = Kind::window, .sinks = 3, .recent = 140, .bits = 8, .residual = 9},
      {.kind = Kind::budget, .budget = 40, .window = 6, .bits = 4, .residual = 10},
      {.kind = Kind::retrieval,
       .budget = 64,
       .chunk = 16,
       .refresh_every = 20,
       .bits = 4,
       .value_bits = 2,
       .key_group = 16,
       .residual = 11,
       .per_channel = true},
      {.bits = 4, .key_group = 16, .residual = 32, .per_channel = true, .kivi = true},
  };
  for (HeadSpec head : rotated) {
    head.key_hadamard = head.value_hadamard = true;
    heads.push_back(head);
  }
  heads.push_back({.bits = 2, .key_group = 16, .value_group = 32, .per_channel = true, .key_hadamard = true});
  heads.push_back({.bits = 8, .key_group = 32, .value_group = 16, .value_hadamard = true});
  for (HeadSpec& head : heads) {
    head.flush_rows = head.bits > 0 ? block : 1;
    head.returns_rows = true;
  }
  return heads;
}

}  // namespace test
