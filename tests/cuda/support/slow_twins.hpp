// SPDX-License-Identifier: Apache-2.0
//
// A cache with rows in slow memory beside one that has all on the device, and the same text.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"

namespace test {

/// Heads of which most keep every row, and some that do not beside them.
inline std::vector<HeadSpec> slow_heads() {
  return {
      {},
      {.bits = 4, .residual = 20},
      {.kind = Kind::retrieval, .budget = 32, .chunk = 8},
      {.kind = Kind::retrieval, .budget = 15, .chunk = 5, .min_max = true},
      {.kind = Kind::window, .sinks = 4, .recent = 37},
      {.kind = Kind::retrieval, .budget = 64, .chunk = 16, .bits = 4, .residual = 11},
      {.kind = Kind::budget, .budget = 30, .window = 8},
      {.kind = Kind::retrieval,
       .budget = 96,
       .chunk = 32,
       .bits = 8,
       .key_group = 32,
       .residual = 19,
       .per_channel = true},
      {.bits = 2, .key_group = 16, .value_group = 16, .residual = 13, .per_channel = true},
      {.sinks = 4, .bits = 4, .key_group = 64, .residual = 20, .per_channel = true},
      {.sinks = 35, .bits = 8, .residual = 9},
      {.bits = 3, .key_group = 64, .value_group = 32, .residual = 17, .per_channel = true},
      {.kind = Kind::retrieval, .budget = 64, .chunk = 16, .bits = 6, .value_bits = 5, .residual = 12},
      {.kind = Kind::retrieval,
       .budget = 64,
       .chunk = 32,
       .bits = 8,
       .key_group = 32,
       .residual = 12,
       .per_channel = true,
       .halves = true},
  };
}
/// Heads that all select, or keep little: a selected read of them needs nothing staged.
inline std::vector<HeadSpec> selecting_heads() {
  std::vector<HeadSpec> heads;
  for (const HeadSpec& head : slow_heads()) {
    if (head.kind == Kind::retrieval || head.kind == Kind::window || head.kind == Kind::budget)
      heads.push_back(head);
  }
  return heads;
}
/// Layers that between them have all of these heads.
inline DevicePlan plan_with(const kvpolicy::ModelShape& shape, const std::vector<HeadSpec>& all,
                            std::size_t first = 0) {
  std::vector<HeadSpec> heads;
  for (std::size_t i = 0; i < shape.kv_head_count(); ++i) heads.push_back(all[(first + i) % all.size()]);
  return plan_of<kvpolicy::float16>(shape, heads);
}

/// Every call goes to both.
class SlowTwins {
 public:
  SlowTwins(const DevicePlan& plan, const kvpolicy::gpu::CacheOptions& options, const Stream& stream)
      : stream_{stream},
        options_{with_slow(options)},
        near_{plan, without_slow(options), stream},
        slow_{std::in_place, plan, options_, stream} {}
  SlowTwins(const SlowTwins&) = delete;
  SlowTwins& operator=(const SlowTwins&) = delete;

  [[nodiscard]] DeviceCache& near() { return near_; }
  [[nodiscard]] DeviceCache& slow() { return *slow_; }
  [[nodiscard]] TwoDeviceMemories& memory() { return memory_; }

  /// visit(cache) of both.
  template <class Visit>
  void both(Visit visit) {
    visit(near_);
    visit(*slow_);
  }
  /// `tokens` random ones through all layers of each, without a wait between; whether all results
  /// are the same, bit for bit.
  [[nodiscard]] bool step(Random& random, std::size_t tokens, const AttendOptions& options,
                          bool apart = false) {
    const auto& shape = near_.plan().shape();
    std::vector<DeviceChunk<>> one;
    std::vector<DeviceChunk<>> other;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      Random same = random;
      one.emplace_back(random, shape, tokens, stream_);
      other.emplace_back(same, shape, tokens, stream_);
    }
    put(near_, one, options, apart);
    put(*slow_, other, options, apart);
    bool equal = true;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      equal = equal && same_bits(one[l].results(stream_), other[l].results(stream_));
    }
    return equal && near_.tokens() == slow_->tokens();
  }
  void check_rows() const {
    CHECK(dump_device(near_, false, stream_) == dump_device(*slow_, false, stream_));
  }
  /// Each goes on as a fork of its own, and what it was forked from is gone.
  void fork() {
    near_ = near_.fork(stream_);
    slow_.emplace(slow_->fork(stream_));
  }
  /// Numbers that are none to every byte of slow memory: whoever reads it fails.
  void scribble() const {
    stream_.wait();
    memory_.slow.for_each_block([](void* start, std::size_t bytes) { std::memset(start, 0xff, bytes); });
  }

 private:
  kvpolicy::gpu::CacheOptions with_slow(kvpolicy::gpu::CacheOptions options) {
    options.memory = &memory_;
    options.slow_memory = &memory_.slow;
    return options;
  }
  static kvpolicy::gpu::CacheOptions without_slow(kvpolicy::gpu::CacheOptions options) {
    options.slow_memory = nullptr;
    return options;
  }
  void put(DeviceCache& cache, std::vector<DeviceChunk<>>& chunks, const AttendOptions& options,
           bool apart) const {
    for (std::size_t l = 0; l < chunks.size(); ++l) {
      if (apart) {
        chunks[l].append(cache, l, stream_);
        chunks[l].attend(cache, l, options, stream_);
      } else {
        chunks[l].step(cache, l, options, stream_);
      }
    }
  }

  const Stream& stream_;
  TwoDeviceMemories memory_;
  kvpolicy::gpu::CacheOptions options_;
  DeviceCache near_;
  std::optional<DeviceCache> slow_;
};

}  // namespace test
