// SPDX-License-Identifier: Apache-2.0
//
// Measures how long this processor takes over a head of each kind: what `balance` and the model of ranks start from.
// One thread attends with the query heads of one KV head over all of its rows, which lie in memory and in no cache: a
// buffer as large as the last-level cache is read before each sample. Adding the new row is not in it. Every head is
// checked against plain loops in double before it is timed.
//
// Times are the thread's processor time. Turns that other processes take are not in it, but what they read from memory
// meanwhile makes it longer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <time.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/plan/cost_table.hpp>

#include "bench/cpu/ceiling.hpp"
#include "bench/cpu/samples.hpp"
#include "bench/cpu/verify.hpp"
#include "bench/cpu/workload.hpp"

namespace kvpolicy::bench {

/// Seconds of processor time that `work()` takes of this thread.
template <class Work>
[[nodiscard]] double thread_seconds_of(Work work) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

/// Bytes a second that one thread reads at best.
[[nodiscard]] inline double reading_speed(const Reader& reader) {
  double best = 0;
  for (const std::size_t streams : {1U, 4U, 8U}) {
    for (const std::size_t ahead : {1024U, 4096U}) {
      const double seconds = thread_seconds_of([&] { reader.read(pool_of(1), 1, streams, ahead); });
      best = std::max(best, static_cast<double>(reader.bytes()) / seconds);
    }
  }
  return best;
}

/// A kind of head, by name, and how few rows it is measured with.
struct CostKind {
  std::string name;
  HeadSettings<bfloat16> settings;
  std::size_t least_rows = 1;
};

struct CostSettings {
  std::size_t head_dim = 128;
  std::vector<std::size_t> queries = {1, 2, 4, 8, 16};  ///< query heads of a KV head
  std::vector<std::size_t> rows = {64, 320, 1024, 4096, 16384, 65536, 131072};
  std::size_t samples = 9;  ///< of each point
};

/// One point of a curve.
struct CostPoint {
  std::size_t rows = 0;
  double median = 0, p10 = 0, p90 = 0;  ///< seconds of one head
  double error = 0;                     ///< against plain loops
};

/// Measures one point. @throws StorageError if the result is not that of plain loops
[[nodiscard]] inline CostPoint measure_cost(const CostKind& kind, std::size_t queries, std::size_t rows,
                                            const CostSettings& settings, const Reader* flushed) {
  // Enough heads that a sample is long enough for the clock: about four megabytes.
  const double bytes = bytes_read(kind.settings.rule(settings.head_dim), rows,
                                  {queries, 1, settings.head_dim, settings.head_dim}, sizeof(bfloat16));
  const auto layers = static_cast<std::size_t>(std::clamp(4e6 / bytes, 1.0, 32.0));
  const ModelShape shape{layers, queries, 1, settings.head_dim};
  Cache<bfloat16> cache{HeadPlan<bfloat16>{shape, kind.settings}};
  cache.engine() = Engine{pool_of(1)};
  Numbers<bfloat16> numbers{512 * settings.head_dim};
  Numbers<float> query_numbers{queries * settings.head_dim};
  for (std::size_t layer = 0; layer < layers; ++layer) {
    while (cache.tokens(layer) < rows) {
      const std::size_t some =
          std::min({rows - cache.tokens(layer), cache.options().max_append, std::size_t{512}});
      cache.append(layer, numbers.tensor(some, 1, settings.head_dim),
                   numbers.tensor(some, 1, settings.head_dim));
    }
  }
  std::vector<float> out(queries * settings.head_dim);
  const auto query = query_numbers.tensor(1, queries, settings.head_dim);
  const auto attend = [&](std::size_t layer) {
    cache.attend(layer, query, TensorView<float>{out.data(), 1, queries, settings.head_dim});
  };
  CostPoint point{.rows = rows};
  poison(out);
  attend(0);
  const auto position = static_cast<std::int64_t>(rows) - 1;
  const auto expected = attention({query.row(0, 0), queries * settings.head_dim}, settings.head_dim,
                                  cache.segments(0, 0, Read::all), {.position = position, .window = {}});
  const bool packed = kind.settings.rule(settings.head_dim).is_quantized();
  for (std::size_t q = 0; q < queries; ++q) {
    const double error =
        relative_error(std::span{out}.subspan(q * settings.head_dim, settings.head_dim), expected[q].out);
    require<StorageError>(error <= (packed ? most_error_packed : most_error_exact), kind.name, ", ", rows,
                          " rows: query head ", q, " is off by ", error);
    require<StorageError>(expected[q].keys.exact + expected[q].keys.packed == rows, kind.name,
                          ": the head shows ", expected[q].keys.exact + expected[q].keys.packed,
                          " rows, must show ", rows);
    point.error = std::max(point.error, error);
  }
  Samples samples;
  for (std::size_t i = 0; i < settings.samples + 1; ++i) {
    if (flushed != nullptr) flushed->read(pool_of(1), 1, 4, 1024);
    const double seconds = thread_seconds_of([&] {
      for (std::size_t layer = 0; layer < layers; ++layer) attend(layer);
    });
    if (i > 0) samples.add(seconds / static_cast<double>(layers));
  }
  point.median = samples.median();
  point.p10 = samples.at(0.1);
  point.p90 = samples.at(0.9);
  return point;
}

}  // namespace kvpolicy::bench
