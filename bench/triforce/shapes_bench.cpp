// SPDX-License-Identifier: Apache-2.0
//
// Measures the gain of TriForce's hierarchy on a CPU where the cache is several times the weights:
// a model of the proportions of Llama-2-7B after 120 Ki tokens (cache : weights = 4.8 : 1 by bytes,
// a budget of one row in thirty), with random weights, and draft tokens that are accepted at random
// at given rates. The baseline is our own plain decoding of the same text in the same run. The
// prediction is that of the cost model, with each kind of pass timed by itself.
//
//   triforce_shapes_bench [--smoke] [--benchmark_filter=...]
//                         [--benchmark_out=FILE --benchmark_out_format=json]
//
// Before anything is timed, a verification's logits are compared with those of single steps. With
// --smoke everything is small. ./scripts/bench-triforce runs this program and stores its results.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/speculation/draft_length.hpp>
#include <kvpolicy/triforce.hpp>
#include <reference_model/language_model.hpp>

#include "bench/cpu/machine.hpp"
#include "random_llama.hpp"
#include "scripted.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;
using Clock = std::chrono::steady_clock;
using Engine = cpu::Engine<>;
using Reader = reference::LlamaReader;
using Cache = KvCache<bfloat16, Engine>;
using SmallCache = KvCache<bfloat16, Engine>;

/// The sizes of the measurement, and how long it takes.
struct Size {
  LlamaSize target{8, 512, 1376, 8, 8, 64, 2048};
  LlamaSize small{2, 128, 344, 2, 2, 64, 2048};
  std::size_t context = 32768;
  std::size_t budget = 1088;  // 1/30, in chunks of 8
  std::size_t tokens = 256;
  std::size_t plain_tokens = 24;
  int iterations = 5;
  int passes = 7;
};
Size size;

constexpr Size smoke_size{.target = {2, 64, 96, 1, 1, 64, 64},
                          .small = {1, 64, 96, 1, 1, 64, 64},
                          .context = 512,
                          .budget = 64,
                          .tokens = 24,
                          .plain_tokens = 4,
                          .iterations = 1,
                          .passes = 1};

const CacheOptions cache_options{.max_rollback = 32, .max_append = 64};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> numbers) {
  std::ranges::sort(numbers);
  return numbers[numbers.size() / 2];
}

/// The models, the text, and caches that have read all of the text but its last token.
struct World {
  reference::Llama target = random_llama(size.target, 1);
  reference::Llama small = random_llama(size.small, 2);
  Reader reader{target};
  Reader small_reader{small};
  std::vector<int> text = std::vector<int>(size.context + 1, 1);
  Cache cache =
      filled(Cache{triforce_plan<bfloat16>(target.config().shape(), {.budget = size.budget}), cache_options});
  SmallCache small_cache =
      filled(SmallCache{triforce_draft_plan<bfloat16>(small.config().shape()), cache_options});

  // Fills caches with random rows; the rows of a real prompt have the same bytes.
  template <class C>
  static C filled(C cache) {
    const ModelShape& shape = cache.plan().shape();
    std::mt19937 random{3};
    std::vector<float> rows(2 * cache_options.max_append * shape.kv_heads * shape.head_dim);
    for (float& number : rows) number = static_cast<float>(random()) * 0x1p-31F - 1.0F;
    while (cache.tokens() < size.context) {
      const TensorView<const float> k{rows.data(), cache_options.max_append, shape.kv_heads, shape.head_dim};
      const TensorView<const float> v{rows.data() + rows.size() / 2, k.tokens, k.heads, k.head_dim};
      for (std::size_t layer = 0; layer < shape.layers; ++layer) cache.append(layer, k, v);
    }
    return cache;
  }
};

World& world() {
  static World world;
  return world;
}

/// Makes one pass over the last `count` tokens, and takes it back.
template <class Model, class C>
double pass_seconds(Model& model, C& cache, std::size_t count, Read read) {
  const std::vector<int> tokens(count, 1);
  const std::size_t seen = cache.tokens();
  std::vector<double> times;
  for (int i = 0; i < size.passes; ++i) {
    const auto start = Clock::now();
    benchmark::DoNotOptimize(
        model.read(cache, {.tokens = tokens, .logits = LogitsOf::all, .attend = {.read = read}}));
    times.push_back(seconds_since(start));
    cache.truncate(seen);
  }
  return median(times);
}

void verify() {
  World& w = world();
  const std::array tokens{5, 57, 33, 4};
  Cache alone = w.cache.fork();
  Cache together = w.cache.fork();
  const auto at_once = w.reader.read(together, {.tokens = tokens, .logits = LogitsOf::all});
  float largest = 0.0F;
  float error = 0.0F;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto one = w.reader.read(alone, {.tokens = std::span{tokens}.subspan(i, 1)});
    for (std::size_t t = 0; t < one.size(); ++t) {
      largest = std::max(largest, std::abs(one[t]));
      const float difference = std::abs(one[t] - at_once[i * one.size() + t]);
      error = difference <= error ? error : difference;  // keeps a NaN
    }
  }
  if (!(error <= 1e-3F * largest)) {
    std::fprintf(stderr, "a verification's logits differ by %g of %g from single steps\n",
                 static_cast<double>(error), static_cast<double>(largest));
    std::exit(1);
  }
}

/// Decodes `tokens` tokens, and returns the seconds of each.
template <class Decoder>
double decode(Decoder decoder, std::size_t tokens, LevelStatistics* statistics) {
  decoder.continue_text(world().text);
  (void)decoder.step();  // chooses the chunks
  const LevelStatistics before = decoder.statistics();
  const auto start = Clock::now();
  decoder.generate(tokens);
  const double seconds = seconds_since(start);
  *statistics = since(before, decoder.statistics());
  return seconds / static_cast<double>(statistics->tokens);
}

SpeculationOptions fixed(std::size_t length) {
  return {.sampling = {.temperature = 1.0F},
          .length = length,
          .adapt = false,
          .refresh_selection = {.below_acceptance = 0.0}};
}

/// Measures the hierarchy where the target accepts `Target` and the middle level `Middle` per mille
/// of the draft tokens; without a small model if Middle is 0.
template <unsigned Target, unsigned Middle>
void hierarchy(benchmark::State& state, std::size_t length) {
  World& w = world();
  std::vector<double> plain, ours, ratios;
  LevelStatistics seen;
  for (auto _ : state) {
    Cache cache = w.cache.fork();
    LevelStatistics ignored;
    plain.push_back(
        decode(SpeculativeDecoder{w.reader, cache, NoDraft{}, fixed(0)}, size.plain_tokens, &ignored));
    cache = w.cache.fork();
    SmallCache small_cache = w.small_cache.fork();
    const auto run = [&]<class Inner>(Inner inner) {
      using Draft = SelectedDraft<Reader, Cache, Inner, Scripted<Middle>>;
      return decode(
          SpeculativeDecoder<Reader, Cache, Draft, Scripted<Target>>{
              w.reader, cache, Draft{w.reader, cache, std::move(inner)}, fixed(length)},
          size.tokens, &seen);
    };
    if constexpr (Middle == 0) {
      ours.push_back(run(NoDraft{}));
    } else {
      const auto read = std::span<const int>{w.text}.first(size.context);
      ours.push_back(run(ModelDraft<Reader, SmallCache>{w.small_reader, small_cache, {}, read}));
    }
    ratios.push_back(plain.back() / ours.back());
    state.SetIterationTime(ours.back() * static_cast<double>(size.tokens));
  }
  // The cost model's prediction from passes timed by themselves. A pass of the middle level over
  // one draft token gives one or two tokens.
  Cache cache = w.cache.fork();
  (void)w.reader.read(cache, {.tokens = std::array{1}, .attend = {.refresh_selection = true}});
  SmallCache small_cache = w.small_cache.fork();
  const double one = pass_seconds(w.reader, cache, 1, Read::all);
  const double all = pass_seconds(w.reader, cache, length + 1, Read::all);
  const double selected = pass_seconds(w.reader, cache, Middle == 0 ? 1 : 2, Read::selected);
  const double drafted = Middle == 0 ? 0.0 : pass_seconds(w.small_reader, small_cache, 1, Read::all);
  const double per_pass = Middle == 0 ? 1.0 : 1.0 + Scripted<Middle>::rate;
  const double guesses = static_cast<double>(length) / per_pass * (selected + drafted);
  const double predicted = one * expected_tokens(Scripted<Target>::rate, length) / (all + guesses);
  const auto [slowest, fastest] = std::ranges::minmax(ratios);
  state.counters["speedup"] = median(ratios);
  state.counters["speedup_min"] = slowest;
  state.counters["speedup_max"] = fastest;
  state.counters["predicted"] = predicted;
  state.counters["plain_ms"] = median(plain) * 1e3;
  state.counters["ms"] = median(ours) * 1e3;
  state.counters["verify_ms"] = all * 1e3;
  state.counters["selected_ms"] = selected * 1e3;
  state.counters["draft_ms"] = drafted * 1e3;
  state.counters["acceptance"] = seen.acceptance();
  state.counters["tokens_per_verification"] = seen.tokens_per_verification();
  state.counters["cache_mb"] = static_cast<double>(w.cache.bytes()) * 1e-6;
  state.counters["weights_mb"] = static_cast<double>(weight_bytes(w.target)) * 1e-6;
}

template <unsigned Target, unsigned Middle>
void add() {
  for (const std::size_t length : {4, 6, 8, 11}) {
    const std::string name = "shapes/target:" + std::to_string(Target) + "/middle:" + std::to_string(Middle) +
                             "/length:" + std::to_string(length);
    benchmark::RegisterBenchmark(name.c_str(), hierarchy<Target, Middle>, length)
        ->Iterations(size.iterations)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view{argv[1]} == "--smoke") {
    size = smoke_size;
    argv[1] = argv[0];
    --argc;
    ++argv;
  }
  // The paper's acceptance of the target at temperature 0, 0.6 and 1, and its authors' number for
  // their small draft; 0 is self-speculation without a small draft.
  add<923, small_draft_per_mille>();
  add<914, small_draft_per_mille>();
  add<900, small_draft_per_mille>();
  add<923, 0>();
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("cpu", machine().cpu);
  benchmark::AddCustomContext("context", std::to_string(size.context));
  benchmark::AddCustomContext("budget", std::to_string(size.budget));
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  verify();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
