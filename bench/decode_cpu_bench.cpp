// SPDX-License-Identifier: Apache-2.0
//
// Decoding on the CPU: one query token against a layer of cached rows, cold. The cache has enough
// layers that none is still in the processor's cache when its turn comes round again; the whole
// step is timed, cache bookkeeping included. Beside it what the machine can read at best, in the
// same run, and how far prefill is from decode's limits. Results are checked before they are timed.
//
//   decode_cpu_bench [--benchmark_filter=...] [--benchmark_out=FILE --benchmark_out_format=json]
//
// best_ms, median_ms and p75_ms are over single calls: on a shared machine the best is what the
// code can do, the others what it had to share.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/plan/any_plan.hpp>

namespace {
using namespace kvpolicy;
using Clock = std::chrono::steady_clock;

#ifdef _OPENMP
using Pool = cpu::OpenMpFor;
Pool pool_of(std::size_t threads) { return {threads}; }
#else
using Pool = cpu::SerialFor;
Pool pool_of(std::size_t) { return {}; }
#endif
using CpuEngine = cpu::Engine<Pool>;

std::vector<float> random_numbers(std::size_t count) {
  static std::mt19937 random{1};
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    number = static_cast<float>(random()) * 0x1p-31F - 1.0F;
  }
  return numbers;
}

// The times of a benchmark's iterations.
class Times {
 public:
  template <class Call>
  void measure(benchmark::State& state, Call call) {
    for (auto _ : state) {
      const auto start = Clock::now();
      call();
      const std::chrono::duration<double> passed = Clock::now() - start;
      state.SetIterationTime(passed.count());
      seconds_.push_back(passed.count());
    }
    std::ranges::sort(seconds_);
  }
  [[nodiscard]] double at(double share) const {
    return seconds_[static_cast<std::size_t>(share * static_cast<double>(seconds_.size() - 1))];
  }
  void report(benchmark::State& state) const {
    state.counters["best_ms"] = at(0) * 1e3;
    state.counters["median_ms"] = at(0.5) * 1e3;
    state.counters["p75_ms"] = at(0.75) * 1e3;
  }

 private:
  std::vector<double> seconds_;
};

constexpr std::size_t layers = 4;

// A cache of `rows` rows in every layer, made once for all thread counts.
template <class Plan>
auto filled_cache(const Plan& plan, std::size_t rows) {
  const ModelShape& shape = plan.shape();
  constexpr std::size_t portion = 1024;
  auto cache = std::make_unique<cpu::KvCache<Plan, CpuEngine>>(
      plan, CacheOptions{.max_append = portion}, CpuEngine{});
  const auto k = random_numbers(portion * shape.kv_heads * shape.head_dim);
  const auto v = random_numbers(portion * shape.kv_heads * shape.head_dim);
  const TensorView<const float> keys{k.data(), portion, shape.kv_heads, shape.head_dim};
  const TensorView<const float> values{v.data(), portion, shape.kv_heads, shape.head_dim};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t done = 0; done < rows; done += portion) cache->append(layer, keys, values);
  }
  cache->commit();
  return cache;
}

template <class Cache>
std::vector<Segment> shown(const Cache& cache, std::size_t head) {
  return cache.segments(0, head);
}

// The engine against ScalarEngine on layer 0.
template <class Cache>
void verify(const Cache& cache, std::size_t threads) {
  const ModelShape& shape = cache.plan().shape();
  const auto q = random_numbers(shape.q_heads * shape.head_dim);
  std::vector<float> out(q.size());
  std::vector<float> expected(q.size());
  std::vector<SegmentList> lists;
  std::vector<std::span<const Segment>> heads;
  for (std::size_t head = 0; head < shape.kv_heads; ++head) lists.push_back(shown(cache, head));
  for (const auto& list : lists) heads.emplace_back(list);
  const auto attend = [&](auto& engine, std::vector<float>& to) {
    LayerAttention work;
    work.queries = ConstTensor{TensorView<const float>{q.data(), 1, shape.q_heads, shape.head_dim}};
    work.out = MutableTensor{TensorView<float>{to.data(), 1, shape.q_heads, shape.head_dim}};
    work.first_position = static_cast<std::int64_t>(cache.tokens());
    work.heads = heads;
    engine.attend(work);
  };
  CpuEngine engine{pool_of(threads)};
  ScalarEngine scalar;
  attend(engine, out);
  attend(scalar, expected);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (std::abs(out[i] - expected[i]) <= 1e-5F) continue;
    std::fprintf(stderr, "wrong result: %g instead of %g\n", static_cast<double>(out[i]),
                 static_cast<double>(expected[i]));
    std::exit(1);
  }
}

template <class Cache>
void decode(benchmark::State& state, Cache& cache, std::size_t rows) {
  const auto threads = static_cast<std::size_t>(state.range(0));
  const ModelShape& shape = cache.plan().shape();
  cache.engine() = CpuEngine{pool_of(threads)};
  verify(cache, threads);
  const auto q = random_numbers(shape.q_heads * shape.head_dim);
  const auto kv = random_numbers(shape.kv_heads * shape.head_dim);
  std::vector<float> out(q.size());
  const TensorView<const float> query{q.data(), 1, shape.q_heads, shape.head_dim};
  const TensorView<const float> row{kv.data(), 1, shape.kv_heads, shape.head_dim};
  const TensorView<float> to{out.data(), 1, shape.q_heads, shape.head_dim};
  std::size_t layer = 0;
  Times times;
  times.measure(state, [&] {
    cache.step(layer, query, row, row, to);
    layer = (layer + 1) % shape.layers;
    benchmark::DoNotOptimize(out.data());
  });
  times.report(state);
  // What a step reads: the heads' rows, not the tail that filled them.
  const MemoryEstimate memory = cache.plan().memory(cache.tokens(), cache.options());
  const double bytes = static_cast<double>(memory.heads) / static_cast<double>(shape.layers);
  state.counters["layer_MiB"] = bytes / 0x1p20;
  state.counters["best_GB/s"] = bytes / times.at(0) * 1e-9;
  state.counters["median_GB/s"] = bytes / times.at(0.5) * 1e-9;
  state.SetLabel(std::to_string(rows) + " rows");
}

void prefill(benchmark::State& state, std::size_t tokens, std::size_t rows) {
  const auto threads = static_cast<std::size_t>(state.range(0));
  const ModelShape shape{.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  using Plan = HeadPlan<FullCache<DenseStorage<bfloat16>>>;
  const auto cache = filled_cache(Plan{shape}, rows);
  const auto q = random_numbers(tokens * shape.q_heads * shape.head_dim);
  std::vector<float> out(q.size());
  std::vector<SegmentList> lists;
  std::vector<std::span<const Segment>> heads;
  for (std::size_t head = 0; head < shape.kv_heads; ++head) lists.push_back(shown(*cache, head));
  for (const auto& list : lists) heads.emplace_back(list);
  LayerAttention work;
  work.queries = ConstTensor{TensorView<const float>{q.data(), tokens, shape.q_heads, shape.head_dim}};
  work.out = MutableTensor{TensorView<float>{out.data(), tokens, shape.q_heads, shape.head_dim}};
  work.first_position = static_cast<std::int64_t>(rows - tokens);
  work.heads = heads;
  CpuEngine engine{pool_of(threads)};
  Times times;
  times.measure(state, [&] { engine.attend(work); });
  times.report(state);
  const double seen = static_cast<double>(tokens) *
                      (static_cast<double>(rows) - static_cast<double>(tokens - 1) / 2);
  const double operations = 4.0 * seen * static_cast<double>(shape.q_heads * shape.head_dim);
  state.counters["best_GFLOP/s"] = operations / times.at(0) * 1e-9;
  state.counters["median_GFLOP/s"] = operations / times.at(0.5) * 1e-9;
}

// Reads memory as fast as plain code can: several streams, fetched ahead.
void read_ceiling(benchmark::State& state) {
  const auto threads = static_cast<std::size_t>(state.range(0));
  const auto streams = static_cast<std::size_t>(state.range(1));
  static std::vector<std::uint64_t> memory(std::size_t{32} << 20, 1);  // 256 MiB
  constexpr std::size_t step = 32;  // words: 4 lines
  const std::size_t length = memory.size() / threads / streams / step * step;
  std::vector<std::uint64_t> sums(threads * 8);
  Times times;
  times.measure(state, [&] {
    pool_of(threads)(threads, [&](std::size_t thread) {
      const std::uint64_t* base = memory.data() + thread * streams * length;
      std::uint64_t sum[8] = {};
      for (std::size_t at = 0; at < length; at += step) {
        for (std::size_t stream = 0; stream < streams; ++stream) {
          const std::uint64_t* words = base + stream * length + at;
#ifdef __GNUC__
          for (std::size_t i = 0; i < step; i += 8) __builtin_prefetch(words + i + 512, 0, 2);
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
  });
  times.report(state);
  const double bytes = static_cast<double>(length * streams * threads * 8);
  state.counters["best_GB/s"] = bytes / times.at(0) * 1e-9;
  state.counters["median_GB/s"] = bytes / times.at(0.5) * 1e-9;
}

std::size_t most_threads() { return Pool{}.threads(); }

// A benchmark of one plan; the cache lives until its last thread count is done.
template <class Plan>
void add(const std::string& name, std::size_t rows, std::size_t q_heads, std::size_t kv_heads,
         const typename Plan::Config& config = {}) {
  using Cache = cpu::KvCache<Plan, CpuEngine>;
  auto cache = std::make_shared<std::unique_ptr<Cache>>();
  const std::size_t most = most_threads();
  const auto run = [=](benchmark::State& state) {
    const ModelShape shape{layers, q_heads, kv_heads, 128};
    if (*cache == nullptr) *cache = filled_cache(Plan{shape, config}, rows);
    decode(state, **cache, rows);
    if (static_cast<std::size_t>(state.range(0)) == most) cache->reset();
  };
  auto* registered = benchmark::RegisterBenchmark(name.c_str(), run)
                         ->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(120)
                         ->ArgName("threads")->Arg(1);
  if (most > 1) registered->Arg(static_cast<std::int64_t>(most));
}

}  // namespace

int main(int argc, char** argv) {
  using BFloat16 = HeadPlan<FullCache<DenseStorage<bfloat16>>>;
  using Half = HeadPlan<FullCache<DenseStorage<half>>>;
  using PerToken = HeadPlan<QuantizedResidualCache<bfloat16, Granularity::per_token>>;
  using PerChannel = HeadPlan<QuantizedResidualCache<bfloat16, Granularity::per_channel>>;
  const auto bits = [](auto config, std::size_t count) {
    std::get<0>(config).storage.bits = count;
    return config;
  };
  const auto most = static_cast<std::int64_t>(most_threads());
  for (const std::int64_t streams : {1, 4, 8}) {
    auto* read = benchmark::RegisterBenchmark("read", read_ceiling)->UseManualTime()
                     ->Unit(benchmark::kMillisecond)->Iterations(40)
                     ->ArgNames({"threads", "streams"})->Args({1, streams});
    if (most > 1) read->Args({most, streams});
  }
  add<BFloat16>("decode/bfloat16/32x8x128", 16384, 32, 8);
  add<BFloat16>("decode/bfloat16/32x8x128/4Ki", 4096, 32, 8);
  add<BFloat16>("decode/bfloat16/32x32x128/4Ki", 4096, 32, 32);
  add<Half>("decode/float16/32x8x128", 16384, 32, 8);
  add<PerToken>("decode/int8/32x8x128", 16384, 32, 8, bits(PerToken::Config{}, 8));
  add<PerToken>("decode/int4/32x8x128", 16384, 32, 8, bits(PerToken::Config{}, 4));
  add<PerChannel>("decode/kivi2/32x8x128", 16384, 32, 8, bits(PerChannel::Config{}, 2));
  auto* last = benchmark::RegisterBenchmark("prefill/512 of 4096/32x8x128", [](auto& state) {
                 prefill(state, 512, 4096);
               })->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(5)
                   ->ArgName("threads")->Arg(1);
  if (most > 1) last->Arg(most);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
