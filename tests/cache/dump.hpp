// SPDX-License-Identifier: Apache-2.0
//
// Everything observable of a cache, to check whether a failed call changed anything.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

namespace test {

struct Dump {
  std::vector<std::size_t> counts;  // tokens, commit point, bytes; for each head rows and positions
  std::vector<float> numbers;       // of all rows, as they are read

  friend bool operator==(const Dump& a, const Dump& b) {
    return a.counts == b.counts && same_bits(a.numbers, b.numbers);
  }
};

template <class Cache>
Dump dump(const Cache& cache, bool with_bytes = true) {
  const auto& shape = cache.plan().shape();
  Dump dump;
  dump.counts = {cache.tokens(), cache.commit_point()};
  if (with_bytes) dump.counts.push_back(cache.bytes());
  std::vector<float> row(shape.head_dim);
  for (std::size_t l = 0; l < shape.layers; ++l) {
    dump.counts.push_back(cache.tokens(l));
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
      dump.counts.push_back(cache.head(l, h).rows());
      for (const auto read : {kvpolicy::Read::all, kvpolicy::Read::selected}) {
        for (const kvpolicy::Segment& segment : cache.segments(l, h, read)) {
          segment.for_each_run([&](const kvpolicy::RowRun& run) {
            for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
              dump.counts.push_back(static_cast<std::size_t>(segment.position_of(i)));
              for (const kvpolicy::Plane* plane : {&segment.keys, &segment.values}) {
                kvpolicy::load_row(*plane, i, row);
                dump.numbers.insert(dump.numbers.end(), row.begin(), row.end());
              }
            }
          });
        }
      }
    }
  }
  return dump;
}

/// One layer's call with random numbers, made in advance so that the call itself allocates nothing.
template <class In = float>
struct Chunk {
  Tensor<In> q, k, v;
  Tensor<float> out;
  std::vector<float> log_sum_exp;

  Chunk(Random& random, const kvpolicy::ModelShape& shape, std::size_t tokens,
        Layout layout = Layout::contiguous)
      : q{tokens, shape.q_heads, shape.head_dim, layout},
        k{tokens, shape.kv_heads, shape.head_dim, layout},
        v{tokens, shape.kv_heads, shape.head_dim, layout},
        out{tokens, shape.q_heads, shape.head_dim, layout},
        log_sum_exp(tokens * shape.q_heads, -1.0F) {
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
  }

  template <class Cache>
  void step(Cache& cache, std::size_t layer, kvpolicy::AttendOptions options = {}) {
    options.log_sum_exp = log_sum_exp;
    cache.step(layer, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view(),
               options);
  }
  template <class Cache>
  void append(Cache& cache, std::size_t layer, const kvpolicy::AttendOptions& options = {}) {
    cache.append(layer, std::as_const(k).view(), std::as_const(v).view(), options);
  }
  template <class Cache>
  void attend(Cache& cache, std::size_t layer, kvpolicy::AttendOptions options = {}) {
    options.log_sum_exp = log_sum_exp;
    cache.attend(layer, std::as_const(q).view(), out.view(), options);
  }
};

/// Makes the same random steps on every layer.
template <class Cache>
void feed(Cache& cache, Random& random, const std::vector<std::size_t>& chunks,
          const kvpolicy::AttendOptions& options = {}) {
  for (const std::size_t tokens : chunks) {
    for (std::size_t l = 0; l < cache.plan().shape().layers; ++l) {
      Chunk chunk{random, cache.plan().shape(), tokens};
      chunk.step(cache, l, options);
    }
  }
}

}  // namespace test
