// SPDX-License-Identifier: Apache-2.0
//
// Two caches, one on the device and one on the host, that get the same calls and must hold the same rows.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>

#include "cuda/support/device_cache.hpp"

namespace test {

/// Copying forks both.
struct HostPair {
  using E = kvpolicy::float16;

  ModelShape shape;
  kvpolicy::gpu::KvCache<E> there;
  kvpolicy::KvCache<E> here;
  Random random{3};

  explicit HostPair(const kvpolicy::HeadPlan<E>& plan, const kvpolicy::gpu::CacheOptions& options = {},
                    const kvpolicy::ValueOutputs* outputs = nullptr)
      : shape{plan.shape()},
        there{plan, options},
        here{plan,
             {.max_rollback = options.max_rollback,
              .max_append = options.max_append,
              .value_outputs = outputs}} {}
  HostPair(HostPair&&) = default;
  HostPair& operator=(HostPair&&) = default;
  ~HostPair() = default;
  HostPair& operator=(const HostPair&) = delete;
  HostPair(const HostPair& other)
      : shape{other.shape}, there{other.there.fork()}, here{other.here.fork()}, random{other.random} {}

  /// `apart`: append, then attend.
  void step(std::size_t tokens, bool apart = false, const AttendOptions& options = {}) {
    for (std::size_t l = 0; l < shape.layers; ++l)
      step_layer(l, DeviceChunk<>{random, shape, tokens}, apart, options);
    check();
  }
  void step_layer(std::size_t l, const DeviceChunk<>& chunk, bool apart = false,
                  const AttendOptions& options = {}) {
    const std::size_t tokens = chunk.tokens;
    const auto q = chunk.q.download(), k = chunk.k.download(), v = chunk.v.download();
    std::vector<float> out(q.size());
    const auto rows = [&](const std::vector<E>& numbers, std::size_t heads) {
      return kvpolicy::TensorView<const E>{numbers.data(), tokens, heads, shape.head_dim};
    };
    const kvpolicy::TensorView<float> out_rows{out.data(), tokens, shape.q_heads, shape.head_dim};
    if (apart) {
      chunk.append(there, l);
      chunk.attend(there, l, options);
      here.append(l, rows(k, shape.kv_heads), rows(v, shape.kv_heads));
      here.attend(l, rows(q, shape.q_heads), out_rows, options);
    } else {
      chunk.step(there, l, options);
      here.step(l, rows(q, shape.q_heads), rows(k, shape.kv_heads), rows(v, shape.kv_heads), out_rows,
                options);
    }
    succeed(cudaStreamSynchronize(nullptr));
  }
  void compress() {
    there.compress();
    here.compress();
    check();
  }
  void take_scores(const HostPair& scored) {
    there.take_scores(scored.there);
    here.take_scores(scored.here);
  }
  /// Text positions that the host's head holds.
  [[nodiscard]] std::vector<std::int64_t> on_host(std::size_t l, std::size_t h) const {
    std::vector<std::int64_t> positions;
    for (const kvpolicy::Segment& segment : here.segments(l, h)) {
      for (std::size_t i = 0; i < segment.rows; ++i) positions.push_back(segment.position_of(i));
    }
    return positions;
  }
  void check() const {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        CAPTURE(l);
        CAPTURE(h);
        REQUIRE(there.rows(l, h).positions == on_host(l, h));
      }
    }
    CHECK(there.observed_rows() == here.observed_rows());
  }
  /// Rows of all heads.
  [[nodiscard]] std::size_t rows() const {
    std::size_t rows = 0;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      for (std::size_t h = 0; h < shape.kv_heads; ++h) rows += there.rows(l, h).positions.size();
    }
    return rows;
  }
};

/// Random calls of a pair and of a fork that comes and goes, from any state that they are in.
inline void check_random_calls(const kvpolicy::HeadPlan<HostPair::E>& plan,
                               const kvpolicy::gpu::CacheOptions& options, Random& random, int calls) {
  std::vector<HostPair> pairs;
  pairs.emplace_back(plan, options);
  for (int i = 0; i < calls; ++i) {
    CAPTURE(i);
    HostPair& pair = pairs[below(random, pairs.size())];
    const std::size_t what = below(random, 12);
    if (what == 0 && pairs.size() == 1) {
      pairs.emplace_back(HostPair{pairs[0]});
    } else if (what == 1) {
      if (pairs.size() == 2) pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(below(random, 2)));
    } else if (what < 5) {
      pair.compress();
    } else {
      const std::size_t tokens = one_of(random, std::vector<std::size_t>{1, 1, 2, 3, 9, 17, 64, 65});
      pair.step(tokens, tokens < 10 && what < 8);
    }
  }
}

}  // namespace test
