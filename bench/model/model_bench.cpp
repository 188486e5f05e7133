// SPDX-License-Identifier: Apache-2.0
//
// Times the reference model on a CPU by the format of its weights: reading a prompt, and decoding after it
// over a full cache of bfloat16 rows. Beside decoding stands the limit of the machine: how long reading the
// weights alone takes, measured in the same run.
//
//   model_bench [--model DIR] [--prompt N] [--smoke] [--benchmark_filter=...]
//               [--benchmark_out=FILE --benchmark_out_format=json]
//
// Without --model it is a model of the shape of SmolLM2-135M with random weights. Before anything is timed,
// the logits of each format are compared with those of float weights, and decoding with reading at once.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cpu.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <reference_model/language_model.hpp>
#include <reference_model/run.hpp>

#include "bench/cpu/ceiling.hpp"
#include "bench/cpu/machine.hpp"
#include "bench/cpu/samples.hpp"
#include "bench/triforce/random_llama.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;
using reference::Llama;
using reference::WeightFormat;
using Cache = KvCache<bfloat16, cpu::Engine<>>;

struct Size {
  LlamaSize model{30, 576, 1536, 9, 3, 64, 49152};
  std::size_t prompt = 1425;
  std::size_t chunk = 512;
  std::size_t steps = 48;
  std::size_t prefills = 5;
};
Size size;
std::optional<Llama> bfloat16_model;  // of random weights, or as stored

/// The same weights in another format.
Llama in_format(const Llama& model, WeightFormat format) {
  reference::LlamaWeights weights = model.weights();
  reference::for_each_linear(weights,
                             [&](reference::Linear& layer) { layer.weight = layer.weight.as(format); });
  return Llama{model.config(), std::move(weights)};
}

/// The same model with activations that are rounded where that is faster.
Llama rounding(const Llama& model) {
  reference::LlamaWeights weights = model.weights();
  reference::for_each_linear(weights, [](reference::Linear& layer) { layer.round_activations = true; });
  return Llama{model.config(), std::move(weights)};
}

Cache full_cache(const Llama& model) {
  return Cache{HeadPlan<FullCache<DenseStorage<bfloat16>>>{model.config().shape()}};
}

std::vector<int> some_tokens(const Llama& model, std::size_t count) {
  std::mt19937 random{7};
  std::vector<int> tokens(count);
  for (int& token : tokens) token = static_cast<int>(random() % model.config().vocabulary);
  return tokens;
}

/// The difference of two logits vectors, as a share of the first one's size.
double distance(std::span<const float> a, std::span<const float> b) {
  double squares = 0.0, all = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    squares += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2.0);
    all += std::pow(static_cast<double>(a[i]), 2.0);
  }
  return std::sqrt(squares / all);
}

void require_near(const char* what, double error, double most) {
  if (error <= most) return;
  std::fprintf(stderr, "%s: logits are off by %g, at most %g was expected\n", what, error, most);
  std::exit(1);
}

void verify() {
  const std::vector<int> tokens = some_tokens(*bfloat16_model, 70);
  const auto at_once = [&](const Llama& model) {
    Cache cache = full_cache(model);
    return reference::step(model, cache, tokens);
  };
  const std::vector<float> wanted = at_once(in_format(*bfloat16_model, WeightFormat::float32));
  require_near("weights as stored", distance(wanted, at_once(*bfloat16_model)), 0.01);
  require_near("rounded activations", distance(wanted, at_once(rounding(*bfloat16_model))), 0.1);
  require_near("int8", distance(wanted, at_once(in_format(*bfloat16_model, WeightFormat::int8))), 0.3);
  Cache cache = full_cache(*bfloat16_model);
  std::vector<float> logits;
  for (const int token : tokens) logits = reference::step(*bfloat16_model, cache, std::array{token});
  require_near("token by token", distance(wanted, logits), 0.1);  // rows are rounded to bfloat16
}

void report(benchmark::State& state, const Llama& model, const Samples& samples) {
  state.SetIterationTime(samples.sum());
  state.counters["ms"] = samples.at(0.5) * 1e3;
  state.counters["min_ms"] = samples.at(0.0) * 1e3;
  state.counters["p90_ms"] = samples.at(0.9) * 1e3;
  state.counters["weights_mb"] = static_cast<double>(model.weight_bytes()) * 1e-6;
}

void prefill_of(benchmark::State& state, const Llama& model) {
  const std::vector<int> tokens = some_tokens(model, size.prompt);
  for ([[maybe_unused]] auto _ : state) {
    Samples samples;
    for (std::size_t i = 0; i < size.prefills; ++i) {
      Cache cache = full_cache(model);
      samples.add(seconds_of([&] { (void)reference::prefill(model, cache, tokens, size.chunk); }));
    }
    report(state, model, samples);
  }
}
void prefill(benchmark::State& state, WeightFormat format) {
  prefill_of(state, in_format(*bfloat16_model, format));
}
/// The same with activations rounded to bfloat16, where the machine multiplies that faster.
void rounded(benchmark::State& state, WeightFormat format) {
  prefill_of(state, rounding(in_format(*bfloat16_model, format)));
}

void decode(benchmark::State& state, WeightFormat format) {
  const Llama model = in_format(*bfloat16_model, format);
  Cache cache = full_cache(model);
  (void)reference::prefill(model, cache, some_tokens(model, size.prompt), size.chunk);
  const Reader reader{model.weight_bytes()};
  const cpu::DefaultParallelFor pool;
  for ([[maybe_unused]] auto _ : state) {
    Samples samples;
    for (const int token : some_tokens(model, size.steps)) {
      samples.add(seconds_of([&] { (void)reference::step(model, cache, std::array{token}); }));
    }
    report(state, model, samples);
    const std::size_t threads = std::max<std::size_t>(1, machine().cores);
    const double limit = static_cast<double>(reader.bytes()) / read_ceiling(reader, pool, threads, 2);
    state.counters["read_weights_ms"] = limit * 1e3;
    state.counters["cache_mb"] = static_cast<double>(cache.bytes()) * 1e-6;
  }
}

/// Eight texts, a token each: together, with one read of the weights and one call of attention a layer, and one
/// after another; in turn, on the same caches.
void decode_many(benchmark::State& state, WeightFormat format) {
  constexpr std::size_t texts = 8;
  const Llama model = in_format(*bfloat16_model, format);
  const reference::LlamaReader reader{model};
  std::vector<Cache> caches;
  const std::size_t prompt = std::max<std::size_t>(1, size.prompt / 4);
  caches.push_back(full_cache(model));
  (void)reference::prefill(model, caches.front(), some_tokens(model, prompt), size.chunk);
  while (caches.size() < texts) caches.push_back(caches.front().fork());
  const std::vector<int> tokens = some_tokens(model, texts);
  std::vector<BatchCall<Cache>> calls;
  for (std::size_t i = 0; i < texts; ++i) {
    calls.push_back({&caches[i], {.tokens = std::span{tokens}.subspan(i, 1)}});
  }
  for ([[maybe_unused]] auto _ : state) {
    Samples together, each, ratios;
    for (std::size_t step = 0; step < size.steps + 3; ++step) {
      const double all =
          seconds_of([&] { (void)reader.read_batch(std::span<const BatchCall<Cache>>{calls}); });
      const double one = seconds_of([&] {
        for (const auto& [cache, call] : calls) (void)reader.read(*cache, call);
      });
      if (step < 3) continue;  // warms up
      together.add(all);
      each.add(one);
      ratios.add(one / all);
    }
    report(state, model, together);
    state.counters["ms_one_by_one"] = each.median() * 1e3;
    state.counters["speedup"] = ratios.median();
    state.counters["speedup_p10"] = ratios.at(0.1);
    state.counters["speedup_p90"] = ratios.at(0.9);
    state.counters["tokens_per_s"] = static_cast<double>(texts) / together.median();
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder;
  std::vector<char*> rest{argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const bool valued = (name == "--model" || name == "--prompt") && i + 1 < argc;
    if (name == "--smoke") {
      size = {.model = {2, 64, 96, 2, 1, 64, 300}, .prompt = 70, .chunk = 32, .steps = 3, .prefills = 2};
    } else if (valued && name == "--model") {
      folder = argv[++i];
    } else if (valued) {
      size.prompt = std::max<std::size_t>(1, std::strtoull(argv[++i], nullptr, 10));
    } else {
      rest.push_back(argv[i]);
    }
  }
  argc = static_cast<int>(rest.size());
  for (const WeightFormat format : {WeightFormat::bfloat16, WeightFormat::int8, WeightFormat::float32}) {
    for (const auto& [what, body] :
         {std::pair{"prefill", &prefill}, std::pair{"rounded", &rounded}, std::pair{"decode", &decode},
          std::pair{"decode_8_texts", &decode_many}}) {
      const std::string name = std::string{"model/"}.append(what).append("/").append(name_of(format));
      benchmark::RegisterBenchmark(name.c_str(), body, format)
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  benchmark::Initialize(&argc, rest.data());
  if (benchmark::ReportUnrecognizedArguments(argc, rest.data())) return 1;
  benchmark::AddCustomContext("cpu", machine().cpu);
  benchmark::AddCustomContext(
      "model", folder.empty() ? "random weights" : std::filesystem::path{folder}.filename().string());
  benchmark::AddCustomContext("prompt", std::to_string(size.prompt));
  try {
    bfloat16_model =
        in_format(folder.empty() ? random_llama(size.model, 1) : Llama::load(folder), WeightFormat::bfloat16);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  verify();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
