// SPDX-License-Identifier: Apache-2.0
//
// Shared by all cases of the attention bench: plans, random rows, caches filled by `append`, and
// the facts of the run (machine, limits, results so far).
#pragma once

#include <algorithm>
#include <any>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "ceiling.hpp"
#include "machine.hpp"
#include "neighbours.hpp"
#include "samples.hpp"

namespace kvpolicy::bench {

using Dense = DenseStorage<bfloat16>;
using Full = FullCache<Dense>;
using Streaming = SinkRecentCache<Dense>;
using PerToken = QuantizedResidualCache<bfloat16, Granularity::per_token>;
using PerChannel = QuantizedResidualCache<bfloat16, Granularity::per_channel>;
using Budget = HeadBudgetCache<Dense>;
using MinMaxChunks = ChunkRetrievalCache<Dense, MinMaxKey>;
using MeanChunks = ChunkRetrievalCache<Dense, MeanKey>;

#ifdef _OPENMP
using Pool = cpu::OpenMpFor;
[[nodiscard]] inline Pool pool_of(std::size_t threads) { return {threads}; }
#else
using Pool = cpu::SerialFor;
[[nodiscard]] inline Pool pool_of(std::size_t) { return {}; }
#endif
using Engine = cpu::Engine<Pool>;
template <Element E>
using Cache = cpu::KvCache<E, Engine>;

/// How results are falsified, to test that the check finds it.
enum class Spoil {
  nothing,
  output,  ///< one number of the output is changed
  rows,    ///< one row more is counted than is read
  silence  ///< the output is never written
};

/// The state of one run of the program.
struct Run {
  Machine machine;
  bool smoke = false;  ///< small shapes, verified and hardly timed
  bool quick = false;
  bool cached = false;        ///< decode always reads the same rows, which are then cached
  double case_seconds = 1.0;  ///< for the samples of each case
  Spoil spoil = Spoil::nothing;
  bool failed = false;  ///< set if any result was wrong
  std::unique_ptr<Reader> reader;
  std::map<std::size_t, double> fma_ceiling;  ///< operations per second, by threads
  std::map<std::string, double> seconds;      ///< medians by case, for ratios
  std::size_t memory_bytes = 0;               ///< for the rows of one case

  /// Bytes that repeated samples must read together so that none of them is still cached.
  [[nodiscard]] double cold_bytes() const {
    return smoke || cached ? 0.0 : 4.0 * static_cast<double>(machine.l3_bytes);
  }
  [[nodiscard]] Patience patience() const {
    if (smoke) return {.seconds = 0.0, .least = 2, .most = 2};
    return {.seconds = case_seconds, .least = quick ? 10U : 30U};
  }
  /// Bytes per second that `threads` threads read now.
  [[nodiscard]] double reading(std::size_t threads, std::size_t rounds) const {
    return read_ceiling(*reader, pool_of(threads), threads, rounds);
  }
  /// Removes all data of a case from the processor's caches.
  void flush() const { reader->read(pool_of(machine.cores), machine.cores, 4, 1024); }

  /// Keeps a filled cache for the next case, if that asks for the same one.
  template <class Rig, class Make>
  Rig& rig(const std::string& key, Make make) {
    if (key_ != key || rig_.type() != typeid(std::shared_ptr<Rig>)) {
      rig_.reset();  // frees the memory first
      rig_ = std::shared_ptr<Rig>{make()};
      key_ = key;
    }
    return *std::any_cast<std::shared_ptr<Rig>&>(rig_);
  }
  void drop_rig() {
    rig_.reset();
    key_.clear();
  }

 private:
  std::any rig_;
  std::string key_;
};

template <class... Parts>
[[nodiscard]] std::string message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Fails the whole run, and reports the error.
inline void refuse(benchmark::State& state, Run& run, const std::string& why) {
  run.failed = true;
  std::fprintf(stderr, "wrong: %s\n", why.c_str());
  state.SkipWithError(why.c_str());
}

/// Runs `body`; an exception makes the case a skipped one.
template <class Body>
void guarded(benchmark::State& state, Run& run, const std::string& name, Body body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    run.drop_rig();
    state.SkipWithError("does not fit in this machine's memory");
  } catch (const std::exception& error) {
    run.drop_rig();
    refuse(state, run, name + ": " + error.what());
  }
}

/// Random numbers, uniformly distributed with mean 0 and variance 1, which spreads logits as in a
/// trained model. Tensors are cut from one pool at random offsets, so their rows differ.
template <Element E>
class Numbers {
 public:
  explicit Numbers(std::size_t largest) : pool_(largest + spare) {
    for (E& number : pool_) {
      const float even = static_cast<float>(random_() >> 40) * 0x1p-24F;  // [0, 1)
      number = E{(even - 0.5F) * 3.4641016F};
    }
  }
  [[nodiscard]] TensorView<const E> tensor(std::size_t tokens, std::size_t heads, std::size_t head_dim) {
    const std::size_t first = random_() % spare;
    return {pool_.data() + first, tokens, heads, head_dim};
  }

 private:
  static constexpr std::size_t spare = std::size_t{1} << 20;
  std::mt19937_64 random_{1};
  std::vector<E> pool_;
};

/// Rows in one `append`, and in one chunk of a prefill.
inline constexpr std::size_t portion_rows = 512;

/// Appends rows until the layer has `tokens`, and commits all of them.
template <Element E>
void fill(cpu::KvCache<E, Engine>& cache, Numbers<E>& numbers, std::size_t layer, std::size_t tokens) {
  const ModelShape& shape = cache.plan().shape();
  const std::size_t portion = cache.options().max_append;
  while (cache.tokens(layer) < tokens) {
    const std::size_t rows = std::min(portion, tokens - cache.tokens(layer));
    cache.append(layer, numbers.tensor(rows, shape.kv_heads, shape.head_dim),
                 numbers.tensor(rows, shape.kv_heads, shape.head_dim));
  }
}

/// Fills `out` with NaN, so that a number that is never written is found.
inline void poison(std::vector<float>& out) {
  std::ranges::fill(out, std::numeric_limits<float>::quiet_NaN());
}

/// Falsifies the output after a call as `--spoil` says.
inline void spoil_output(const Run& run, std::vector<float>& out) {
  if (run.spoil == Spoil::output) out.front() += 1.0F;
  if (run.spoil == Spoil::silence) poison(out);
}

/// The heads of a layer that are checked: the first, the last, and the first head of every other
/// kind.
template <Element E>
[[nodiscard]] std::vector<std::size_t> checked_heads(const HeadPlan<E>& plan, std::size_t layer, bool all) {
  const std::size_t count = plan.shape().kv_heads;
  std::vector<std::size_t> heads{0};
  for (std::size_t head = 1; head < count; ++head) {
    const bool other = plan.at(layer, head) != plan.at(layer, head - 1);
    if (all || other || head + 1 == count) heads.push_back(head);
  }
  if (!all && heads.size() > 3) heads = {heads[0], heads[1], heads.back()};
  return heads;
}

/// The call's own rows as a segment, for the reference.
template <Element E>
[[nodiscard]] Segment own_rows(const TensorView<const E>& k, const TensorView<const E>& v, std::size_t head,
                               std::size_t position) {
  const auto plane = [&](const TensorView<const E>& side) {
    return Plane{.format = {.encoding = encoding_of<E>},
                 .base = reinterpret_cast<const std::byte*>(side.row(0, head)),
                 .row_stride = side.token_stride * sizeof(E)};
  };
  return {.keys = plane(k),
          .values = plane(v),
          .rows = k.tokens,
          .position = static_cast<std::int64_t>(position)};
}

// ---- the counters of a result; `units`: layers in one sample

inline void report_times(benchmark::State& state, Run& run, const std::string& name, const Samples& samples,
                         const Neighbours& neighbours, double units = 1.0) {
  const double median = samples.median() / units;
  run.seconds[name] = median;
  state.counters["ms"] = median * 1e3;
  state.counters["ms_best"] = samples.best() / units * 1e3;
  state.counters["ms_p10"] = samples.at(0.1) / units * 1e3;
  state.counters["ms_p90"] = samples.at(0.9) / units * 1e3;
  state.counters["others_percent"] = neighbours.percent();
  state.counters["samples"] = static_cast<double>(samples.count());
  state.SetIterationTime(median);
}
/// `ceiling`: the machine's bytes per second.
inline void report_bytes(benchmark::State& state, double ceiling, double seconds, double bytes) {
  state.counters["bytes"] = bytes;
  state.counters["GB_per_s"] = bytes / seconds * 1e-9;
  state.counters["ceiling_GB_per_s"] = ceiling * 1e-9;
  state.counters["percent_of_ceiling"] = 100 * bytes / seconds / ceiling;
}
inline void report_flops(benchmark::State& state, const Run& run, std::size_t threads, double seconds,
                         double flops) {
  state.counters["flops"] = flops;
  state.counters["GFLOP_per_s"] = flops / seconds * 1e-9;
  state.counters["percent_of_fma"] = 100 * flops / seconds / run.fma_ceiling.at(threads);
}
/// How many times as fast this case is as another one of the run.
inline void report_ratio(benchmark::State& state, const Run& run, const std::string& baseline,
                         double seconds) {
  const auto found = run.seconds.find(baseline);
  if (found != run.seconds.end()) state.counters["speedup"] = found->second / seconds;
}

}  // namespace kvpolicy::bench
