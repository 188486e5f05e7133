// SPDX-License-Identifier: Apache-2.0
//
// Measures the limits of the machine in the same run as the cases: bytes read from memory, and
// multiply-adds in float. It also empties the processor's caches for cases that are too small or
// too costly to be repeated over more memory than the caches hold.
//
// Reading is measured with one, four and eight streams for each thread, prefetched into the
// first-level cache one or four KiB ahead, because a single stream shows up to a third less than
// the memory can deliver.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/huge_pages.hpp>

#include "samples.hpp"

namespace kvpolicy::bench {

/// Memory that is read. `pool(count, body)` is a cpu::ParallelFor.
class Reader {
 public:
  explicit Reader(std::size_t bytes) : memory_(bytes / sizeof(std::uint64_t), 1, &pages_) {}

  /// Reads all of it once with `threads` threads.
  template <class Pool>
  void read(const Pool& pool, std::size_t threads, std::size_t streams, std::size_t ahead) const {
    constexpr std::size_t step = 32;  // words: four lines of 64 bytes
    const std::size_t length = memory_.size() / threads / streams / step * step;
    std::vector<std::uint64_t> sums(threads * 8);  // a line for each thread
    pool(threads, [&](std::size_t thread) {
      const std::uint64_t* base = memory_.data() + thread * streams * length;
      std::uint64_t sum[8] = {};
      for (std::size_t at = 0; at < length; at += step) {
        for (std::size_t stream = 0; stream < streams; ++stream) {
          const std::uint64_t* words = base + stream * length + at;
#ifdef __GNUC__
          for (std::size_t i = 0; i < step; i += 8) __builtin_prefetch(words + i + ahead / 8, 0, 3);
#endif
          for (std::size_t i = 0; i < step; i += 8) {
            for (std::size_t j = 0; j < 8; ++j) sum[j] += words[i + j];
          }
        }
      }
      for (std::size_t j = 1; j < 8; ++j) sum[0] += sum[j];
      sums[thread * 8] = sum[0];
    });
    benchmark::DoNotOptimize(sums.data());
  }
  [[nodiscard]] std::size_t bytes() const { return memory_.size() * sizeof(std::uint64_t); }

 private:
  cpu::HugePages pages_;
  std::pmr::vector<std::uint64_t> memory_;
};

/// The most bytes per second that `threads` threads read, over all numbers of streams and
/// distances.
template <class Pool>
[[nodiscard]] double read_ceiling(const Reader& reader, const Pool& pool, std::size_t threads,
                                  std::size_t rounds) {
  double best = 0.0;
  for (std::size_t round = 0; round < rounds; ++round) {
    for (const std::size_t streams : {1U, 4U, 8U}) {
      for (const std::size_t ahead : {1024U, 4096U}) {
        const double seconds = seconds_of([&] { reader.read(pool, threads, streams, ahead); });
        best = std::max(best, static_cast<double>(reader.bytes()) / seconds);
      }
    }
  }
  return best;
}

namespace HWY_NAMESPACE {

/// Computes float multiply-adds with the widest vectors that the program was compiled for, and
/// returns the number of operations. `out` gets a vector of results, so that the compiler cannot
/// drop the work.
inline double fma_loop(std::size_t rounds, float* out) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> tag;
  using Vector = hn::Vec<decltype(tag)>;
  constexpr std::size_t chains = 10;  // enough to hide the latency of two units
  const Vector factor = hn::Set(tag, 0.999F);
  const Vector term = hn::Set(tag, 0.001F);
  Vector sums[chains];
  for (std::size_t i = 0; i < chains; ++i) sums[i] = hn::Set(tag, static_cast<float>(i));
  for (std::size_t round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < chains; ++i) sums[i] = hn::MulAdd(sums[i], factor, term);
  }
  for (std::size_t i = 1; i < chains; ++i) sums[0] = hn::Add(sums[0], sums[i]);
  hn::StoreU(sums[0], tag, out);
  return 2.0 * static_cast<double>(chains * rounds * hn::Lanes(tag));
}

}  // namespace HWY_NAMESPACE

/// The most float operations per second of `threads` threads.
template <class Pool>
[[nodiscard]] double fma_ceiling(const Pool& pool, std::size_t threads, std::size_t rounds) {
  double best = 0.0;
  std::vector<float> out(threads * 64);
  std::vector<double> operations(threads);
  for (std::size_t round = 0; round < rounds; ++round) {
    const double seconds = seconds_of([&] {
      pool(threads, [&](std::size_t thread) {
        operations[thread] = HWY_NAMESPACE::fma_loop(200000, out.data() + thread * 64);
      });
    });
    double total = 0.0;
    for (const double number : operations) total += number;
    best = std::max(best, total / seconds);
  }
  return best;
}

}  // namespace kvpolicy::bench
