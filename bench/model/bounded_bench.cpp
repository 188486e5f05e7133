// SPDX-License-Identifier: Apache-2.0
//
// Times attention of one token over long texts, read with a bound, beside reads of all rows: with the keys, values
// and queries of a model, because how much a bound leaves unread depends on them. The rows of a text are repeated
// until there are enough, so its attention is spread as it is over that text; a longer text of its own would leave
// more unread.
//
//   bounded_bench --model DIR --text FILE [--tokens N] [--rows N] [--threads N] [--benchmark_filter=...]
//                 [--benchmark_out=FILE --benchmark_out_format=json]
//   bounded_bench --smoke
//
// Before a case is timed, its output is compared with that of all rows: it may be off by what was left unread, times
// the distance between two values. Beside each case stands how long reading its bytes alone takes on this machine.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <reference_model/run.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>

#include "bench/cpu/ceiling.hpp"
#include "bench/cpu/machine.hpp"
#include "bench/cpu/samples.hpp"
#include "bench/triforce/random_llama.hpp"
#include "examples/common/bytes_read.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

struct Arguments {
  std::string model;
  std::string text;
  std::size_t tokens = 4096;
  std::size_t rows = 65536;
  std::size_t layers = 7;  // of the model, evenly spread
  Patience patience = {.seconds = 2.0, .least = 15};
};
Arguments arguments;

// Notes the queries of each layer's latest token.
class NotingEngine {
 public:
  void attend(const LayerAttention& work) {
    const std::size_t head_dim = work.queries.head_dim;
    std::vector<float> own(work.queries.heads * head_dim);
    for (std::size_t h = 0; h < work.queries.heads; ++h) {
      load_dense(work.queries.encoding, work.queries.row(work.queries.tokens - 1, h),
                 std::span{own}.subspan(h * head_dim, head_dim));
    }
    queries.push_back(std::move(own));
    engine_.attend(work);
  }
  void observe(const LayerObservation& work) { engine_.observe(work); }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) {
    engine_.score(rows, query, out);
  }

  std::vector<std::vector<float>> queries;  // call after call

 private:
  cpu::Engine<> engine_;
};

/// One layer of a text: its latest queries and its rows, as many as were asked for.
struct LayerRows {
  std::vector<float> queries;
  std::vector<bfloat16> keys, values;
};

class RecordedText {
 public:
  explicit RecordedText(const reference::Llama& model, const std::vector<int>& tokens)
      : shape_{model.config().shape()}, tokens_{tokens.size()} {
    KvCache<bfloat16, NotingEngine> cache{HeadPlan<bfloat16>{shape_}, {.max_append = tokens.size()}};
    static_cast<void>(reference::prefill(model, cache, tokens, 512));
    const std::vector<std::vector<float>>& calls = cache.engine().queries;
    const std::size_t layers = std::min(arguments.layers, shape_.layers);
    for (std::size_t i = 0; i < layers; ++i) {
      const std::size_t layer = layers == 1 ? 0 : i * (shape_.layers - 1) / (layers - 1);
      LayerRows rows{calls[calls.size() - shape_.layers + layer], {}, {}};
      const std::size_t width = shape_.kv_heads * shape_.head_dim;
      rows.keys.resize(tokens_ * width);
      rows.values.resize(tokens_ * width);
      std::vector<float> row(shape_.head_dim);
      for (std::size_t h = 0; h < shape_.kv_heads; ++h) {
        for (const Segment& segment : cache.segments(layer, h)) {
          for (std::size_t r = 0; r < segment.rows; ++r) {
            const std::size_t at =
                (static_cast<std::size_t>(segment.position_of(r)) * shape_.kv_heads + h) * shape_.head_dim;
            load_row(segment.keys, r, row);
            std::ranges::transform(row, rows.keys.begin() + static_cast<std::ptrdiff_t>(at),
                                   [](float x) { return bfloat16{x}; });
            load_row(segment.values, r, row);
            std::ranges::transform(row, rows.values.begin() + static_cast<std::ptrdiff_t>(at),
                                   [](float x) { return bfloat16{x}; });
          }
        }
      }
      layers_.push_back(std::move(rows));
    }
  }

  /// A layer's shape.
  [[nodiscard]] ModelShape shape() const {
    return {.layers = 1, .q_heads = shape_.q_heads, .kv_heads = shape_.kv_heads, .head_dim = shape_.head_dim};
  }
  [[nodiscard]] std::span<const LayerRows> layers() const { return layers_; }
  [[nodiscard]] std::size_t rows() const {
    return std::max<std::size_t>(1, arguments.rows / tokens_) * tokens_;
  }

  /// A cache with the rows of one layer.
  [[nodiscard]] cpu::KvCache<bfloat16> cache(const LayerRows& layer,
                                             const HeadSettings<bfloat16>& head) const {
    cpu::KvCache<bfloat16> cache{HeadPlan<bfloat16>{shape(), head}, {.max_append = tokens_}};
    const auto view = [&](const std::vector<bfloat16>& rows) {
      return TensorView<const bfloat16>{rows.data(), tokens_, shape_.kv_heads, shape_.head_dim};
    };
    for (std::size_t done = 0; done < rows(); done += tokens_)
      cache.append(0, view(layer.keys), view(layer.values));
    // One more row, so that no more than that waits in the tail.
    cache.append(0, view(layer.keys).slice(0, 1), view(layer.values).slice(0, 1));
    return cache;
  }

 private:
  ModelShape shape_;
  std::size_t tokens_;
  std::vector<LayerRows> layers_;
};
std::optional<RecordedText> recorded;

struct Case {
  std::string name;
  HeadSettings<bfloat16> head;
  AttendOptions options = {};
};

std::vector<float> attend(cpu::KvCache<bfloat16>& cache, const LayerRows& layer,
                          const AttendOptions& options) {
  const ModelShape shape = recorded->shape();
  std::vector<float> out(shape.q_heads * shape.head_dim);
  cache.attend(0, TensorView<const float>{layer.queries.data(), 1, shape.q_heads, shape.head_dim},
               TensorView<float>{out.data(), 1, shape.q_heads, shape.head_dim}, options);
  return out;
}

// What a layer's read left and what it read; ends the program if the output is not as near as that allows.
struct Checked {
  double unread = 0;
  double rows = 0;  // of all
  double bytes = 0;
};
Checked check(cpu::KvCache<bfloat16>& cache, const LayerRows& layer, const Case& timed) {
  const ModelShape shape = recorded->shape();
  if (timed.options.read != Read::bounded)
    return {0, 1, static_cast<double>(tools::bytes_shown(cache, timed.options.read))};
  std::vector<float> unread(shape.q_heads);
  std::vector<std::size_t> rows(shape.kv_heads);
  AttendOptions options = timed.options;
  options.bound.unread = unread;
  options.bound.rows_read = rows;
  const std::vector<float> all = attend(cache, layer, {});
  const std::vector<float> out = attend(cache, layer, options);
  double farthest = 0;
  for (const bfloat16 value : layer.values)
    farthest = std::max(farthest, 2 * std::abs(static_cast<double>(static_cast<float>(value))));
  for (std::size_t i = 0; i < out.size() && timed.options.bound.certainty == Certainty::sure; ++i) {
    const double most = static_cast<double>(unread[i / shape.head_dim]) * farthest + 0.02;
    if (std::abs(static_cast<double>(all[i] - out[i])) <= most) continue;
    std::fprintf(stderr, "%s: an output is off by %g, at most %g was expected\n", timed.name.c_str(),
                 std::abs(static_cast<double>(all[i] - out[i])), most);
    std::exit(1);
  }
  double read = 0;
  for (const std::size_t count : rows) read += static_cast<double>(count);
  return {static_cast<double>(*std::ranges::max_element(unread)),
          read / static_cast<double>(shape.kv_heads * cache.tokens()),
          static_cast<double>(tools::bytes_of_bounded(cache, rows))};
}

void run(benchmark::State& state, const Case& timed) {
  std::vector<cpu::KvCache<bfloat16>> caches;
  const std::span<const LayerRows> layers = recorded->layers();
  Checked mean;
  for (const LayerRows& layer : layers) {
    caches.push_back(recorded->cache(layer, timed.head));
    const Checked own = check(caches.back(), layer, timed);
    mean.unread = std::max(mean.unread, own.unread);
    mean.rows += own.rows / static_cast<double>(layers.size());
    mean.bytes += own.bytes / static_cast<double>(layers.size());
  }
  const Reader reader{std::size_t{256} << 20};
  const cpu::DefaultParallelFor pool;
  for ([[maybe_unused]] auto _ : state) {
    Samples samples;
    // Layer after layer, so that none finds its rows in a processor's cache.
    repeat(arguments.patience, [&] {
      samples.add(seconds_of([&] {
                    for (std::size_t i = 0; i < layers.size(); ++i)
                      (void)attend(caches[i], layers[i], timed.options);
                  }) /
                  static_cast<double>(layers.size()));
    });
    state.SetIterationTime(samples.sum());
    state.counters["ms"] = samples.median() * 1e3;
    state.counters["min_ms"] = samples.best() * 1e3;
    state.counters["p90_ms"] = samples.at(0.9) * 1e3;
    state.counters["mb"] = mean.bytes * 1e-6;
    state.counters["rows"] = mean.rows;
    state.counters["unread"] = mean.unread;
    state.counters["read_alone_ms"] =
        mean.bytes / read_ceiling(reader, pool, std::max<std::size_t>(1, machine().cores), 2) * 1e3;
  }
}

std::vector<Case> cases(const ModelShape& shape) {
  const auto bounded = LowBitFormat::of_bounded(shape).head<bfloat16>();
  std::vector<Case> all{{"full", FullCache<DenseStorage<bfloat16>>::Config{}},
                        {"int8", LowBitFormat::of_text({8, 8}, shape).head<bfloat16>()},
                        {"int4", LowBitFormat::of_text({4, 4}, shape).head<bfloat16>()},
                        {"bounded/all_rows", bounded}};
  for (const float epsilon : {0.2F, 0.05F, 0.01F}) {
    for (const Certainty certainty : {Certainty::sure, Certainty::four_sigma, Certainty::none}) {
      char name[64];
      std::snprintf(name, sizeof name, "bounded/%s/%g",
                    std::string{names_of(certainty)[static_cast<std::size_t>(certainty)]}.c_str(),
                    static_cast<double>(epsilon));
      all.push_back(
          {name, bounded, {.read = Read::bounded, .bound = {.epsilon = epsilon, .certainty = certainty}}});
    }
  }
  return all;
}

std::vector<int> read_tokens(const reference::Llama& model) {
  std::vector<int> tokens;
  if (arguments.text.empty()) {
    std::mt19937 random{7};
    tokens.resize(arguments.tokens);
    for (int& token : tokens) token = static_cast<int>(random() % model.config().vocabulary);
    return tokens;
  }
  std::ifstream file{arguments.text};
  std::string text{std::istreambuf_iterator<char>{file}, {}};
  text.resize(std::min(text.size(), 8 * arguments.tokens));
  tokens = reference::Tokenizer::load(arguments.model).encode(text);
  require(tokens.size() >= arguments.tokens, arguments.text, ": has ", tokens.size(), " tokens in its first ",
          text.size(), " bytes, ", arguments.tokens, " were asked for");
  tokens.resize(arguments.tokens);
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<char*> rest{argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const auto count = [&] { return std::max<std::size_t>(1, std::strtoull(argv[++i], nullptr, 10)); };
    if (name == "--smoke") {
      arguments.tokens = 300;
      arguments.rows = 600;
      arguments.patience = {.seconds = 0.01, .least = 2, .most = 2};
    } else if (name == "--model" && i + 1 < argc) {
      arguments.model = argv[++i];
    } else if (name == "--text" && i + 1 < argc) {
      arguments.text = argv[++i];
    } else if (name == "--tokens" && i + 1 < argc) {
      arguments.tokens = count();
    } else if (name == "--rows" && i + 1 < argc) {
      arguments.rows = count();
    } else {
      rest.push_back(argv[i]);
    }
  }
  argc = static_cast<int>(rest.size());
  try {
    const reference::Llama model = arguments.model.empty() ? random_llama({2, 64, 96, 2, 1, 64, 300}, 1)
                                                           : reference::Llama::load(arguments.model);
    recorded.emplace(model, read_tokens(model));
  } catch (const Error& error) {
    std::fprintf(stderr, "bounded_bench: %s\n", error.what());
    return 1;
  }
  for (const Case& timed : cases(recorded->shape())) {
    benchmark::RegisterBenchmark(timed.name.c_str(), [timed](benchmark::State& state) { run(state, timed); })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  benchmark::Initialize(&argc, rest.data());
  if (benchmark::ReportUnrecognizedArguments(argc, rest.data())) return 1;
  benchmark::AddCustomContext("cpu", machine().cpu);
  benchmark::AddCustomContext("model", arguments.model.empty()
                                           ? "random weights"
                                           : std::filesystem::path{arguments.model}.filename().string());
  benchmark::AddCustomContext("tokens", std::to_string(arguments.tokens));
  benchmark::AddCustomContext("rows", std::to_string(recorded->rows()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
