// SPDX-License-Identifier: Apache-2.0
//
// Times attention of one layer on a GPU: decode over every kind of head, many sequences at once (also
// under several plans), prefill in chunks, and one launch against separate ones. Each case is checked against double
// precision before it is timed. Times are measured with events and a cold second-level cache, as
// the median of at least 50 samples (5 for prefills that take seconds).
//
//   attention_cuda_bench --benchmark_out=ours.json --benchmark_out_format=json
//   attention_cuda_bench --benchmark_filter=decode/duo
//
// docs/performance.md explains the numbers and the goals; bench/peers_torch.py times PyTorch on the
// same shapes and joins both. The same source also runs in small sizes on the host emulation of the
// test suite (ctest: bench.attention_cuda_smoke).
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "batch_case.hpp"
#include "decode_case.hpp"
#include "duo_layers.hpp"
#include "prefill_case.hpp"
#include "program.hpp"
#include "ragged_case.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

constexpr std::size_t head_dim = 128;
constexpr std::size_t Ki = 1024;

// Query and KV heads, written as in the names of cases.
struct Heads {
  std::size_t q = 32;
  std::size_t kv = 8;
  [[nodiscard]] std::string name() const { return std::to_string(q) + "x" + std::to_string(kv); }
};

class Cases {
 public:
  Cases(Run& run, const std::vector<DuoLayers>& patterns) : run_{run} {
    decode();
    quantized();
    retrieval();
    batch();
    ragged();
    prefill();
    for (const DuoLayers& pattern : patterns) launches(pattern);
  }

 private:
  // ---- sizes: a smoke run uses small ones of the same kind

  [[nodiscard]] Heads scaled(Heads heads) const {
    if (!run_.smoke) return heads;
    return {.q = heads.q / 4, .kv = heads.kv / 4};
  }
  [[nodiscard]] std::size_t scaled(std::size_t tokens) const {
    return run_.smoke ? 300 + tokens % 7 : tokens;
  }
  [[nodiscard]] Streaming::Config streaming() const {
    return run_.smoke ? Streaming::Config{.sinks = 16, .recent = 40}
                      : Streaming::Config{.sinks = 128, .recent = 256};
  }
  [[nodiscard]] static ModelShape shape(Heads heads, std::size_t layers = 1) {
    return {.layers = layers, .q_heads = heads.q, .kv_heads = heads.kv, .head_dim = head_dim};
  }
  [[nodiscard]] static std::string tokens_name(std::size_t tokens) {
    return tokens % Ki == 0 ? std::to_string(tokens / Ki) + "Ki" : std::to_string(tokens);
  }
  // The first `retrieval` heads of a layer read every row, the others sinks and a window.
  void stream_all_but(Plan& plan, std::size_t layer, std::size_t retrieval) const {
    for (std::size_t head = retrieval; head < plan.shape().kv_heads; ++head) {
      plan.set(layer, head, streaming());
    }
  }

  // ---- registration

  template <class Case>
  const Case& keep(std::deque<Case>& cases, Case what) {
    cases.push_back(std::move(what));
    return cases.back();
  }
  template <class Body>
  static void add(const std::string& name, std::size_t samples, Body body) {
    add_case(name, samples, benchmark::kMicrosecond, body);
  }
  // `make(layers)` gives the plan; a small case gets several layers.
  template <class Make>
  void add_decode(DecodeCase what, Make make) {
    const double bytes = bytes_of(what);
    const double layers = run_.smoke ? 2.0 : bytes_of_sample / bytes;
    const auto count = std::clamp<std::size_t>(static_cast<std::size_t>(layers), 1, most_layers);
    if (count > 1) what.plan = make(count);
    add_decode(std::move(what));
  }
  void add_decode(DecodeCase what) {
    const DecodeCase& kept = keep(decode_, std::move(what));
    add(kept.name, run_.samples,
        [&run = run_, &kept](benchmark::State& state) { run_decode(state, run, kept); });
  }
  void add_prefill(PrefillCase what, std::size_t samples) {
    const PrefillCase& kept = keep(prefill_, std::move(what));
    add(kept.name, std::min(samples, run_.samples),
        [&run = run_, &kept](benchmark::State& state) { run_prefill(state, run, kept); });
  }

  // ---- the cases

  void dense(Heads heads, std::size_t tokens) {
    const auto make = [=, this](std::size_t layers) { return Plan{shape(scaled(heads), layers)}; };
    add_decode({.name = dense_name(heads, tokens), .baseline = {}, .plan = make(1), .tokens = scaled(tokens)},
               make);
  }
  [[nodiscard]] static std::string dense_name(Heads heads, std::size_t tokens) {
    return "decode/dense/" + heads.name() + "/" + tokens_name(tokens);
  }
  void duo(Heads heads, std::size_t tokens, double retrieval, const std::string& name) {
    const auto make = [=, this](std::size_t layers) {
      const Heads of_case = scaled(heads);
      Plan plan{shape(of_case, layers)};
      for (std::size_t layer = 0; layer < layers; ++layer) {
        stream_all_but(plan, layer, count_of(of_case.kv, retrieval));
      }
      return plan;
    };
    add_decode({.name = "decode/" + name + "/" + heads.name() + "/" + tokens_name(tokens),
                .baseline = dense_name(heads, tokens),
                .plan = make(1),
                .tokens = scaled(tokens)},
               make);
  }
  [[nodiscard]] static std::size_t count_of(std::size_t heads, double share) {
    return static_cast<std::size_t>(share * static_cast<double>(heads) + 0.5);
  }

  void decode() {
    for (const Heads heads : {Heads{32, 32}, Heads{32, 8}, Heads{32, 4}}) {
      for (const std::size_t tokens : {64 * Ki, 128 * Ki, 256 * Ki, 512 * Ki}) dense(heads, tokens);
    }
    dense({32, 8}, 517000);
    duo({32, 8}, 517000, 0.5, "duo_r50");
    dense({32, 32}, 134000);
    duo({32, 32}, 134000, 0.25, "duo_r25");
  }

  template <class Policy>
  void quantize(const std::string& name, const typename Policy::Config& config) {
    const Heads heads{32, 8};
    const std::size_t tokens = 128 * Ki;
    const auto make = [=, this](std::size_t layers) { return Plan{shape(scaled(heads), layers), config}; };
    add_decode({.name = "decode/" + name + "/" + heads.name() + "/" + tokens_name(tokens),
                .baseline = dense_name(heads, tokens),
                .plan = make(1),
                .tokens = scaled(tokens)},
               make);
  }
  void quantized() {
    const std::size_t residual = run_.smoke ? 64U : 128U;
    struct Widths {
      std::size_t keys, values;
    };
    for (const auto [keys, values] : {Widths{8, 8}, Widths{4, 4}, Widths{2, 2}, Widths{8, 4}, Widths{4, 2}}) {
      const std::string name = keys == values ? "int" + std::to_string(keys)
                                              : "k" + std::to_string(keys) + "v" + std::to_string(values);
      quantize<Quantized>(name, {.storage = {.bits = keys, .value_bits = values, .residual = residual}});
    }
    // KIVI's layout: keys per channel, both in groups of 32.
    for (const std::size_t bits : {4U, 2U}) {
      quantize<Kivi>("kivi" + std::to_string(bits),
                     {.storage = {.bits = bits, .key_group = 32, .value_group = 32, .residual = residual}});
    }
  }

  template <class Policy>
  void retrieve(const std::string& name, std::size_t chunk, bool refresh) {
    const Heads heads{32, 8};
    const std::size_t tokens = 128 * Ki;
    const auto make = [=, this](std::size_t layers) {
      return Plan{shape(scaled(heads), layers),
                  typename Policy::Config{.chunk = chunk, .budget = run_.smoke ? 128U : 4096U}};
    };
    add_decode({.name = "decode/" + name + "/" + heads.name() + "/" + tokens_name(tokens),
                .baseline = dense_name(heads, tokens),
                .plan = make(1),
                .tokens = scaled(tokens),
                .read = Read::selected,
                .refresh = refresh},
               make);
  }
  void retrieval() {
    retrieve<MinMaxChunks>("min_max_16", 16, true);
    retrieve<MinMaxChunks>("min_max_64", 64, true);
    retrieve<MeanChunks>("mean_8", 8, true);
    retrieve<MinMaxChunks>("standing_16", 16, false);
    retrieve<MinMaxChunks>("standing_64", 64, false);
    retrieve<MeanChunks>("standing_8", 8, false);
  }

  void batch() {
    const Heads heads{32, 4};
    BatchCase what{.name = "decode/batch_64/" + heads.name() + "/8Ki",
                   .plan = Plan{shape(scaled(heads))},
                   .sequences = run_.smoke ? 5U : 64U,
                   .tokens = scaled(8 * Ki)};
    const BatchCase& kept = keep(batch_, std::move(what));
    add(kept.name, run_.samples,
        [&run = run_, &kept](benchmark::State& state) { run_batch(state, run, kept); });
  }

  void add_ragged(RaggedCase what) {
    const RaggedCase& kept = keep(ragged_, std::move(what));
    add(kept.name, run_.samples,
        [&run = run_, &kept](benchmark::State& state) { run_ragged(state, run, kept); });
  }
  void ragged() {
    const Heads heads{32, 8};
    const std::size_t tokens = 32 * Ki;
    const std::size_t count = run_.smoke ? 6 : 64;
    const std::size_t part = run_.smoke ? 40 : 512;
    const std::string tail = "/" + heads.name() + "/" + tokens_name(tokens);
    const std::string four = "ragged/4_plans" + tail;
    const std::string prompt = "ragged/prompt_512" + tail;
    const MixedPlans plans{.shape = shape(scaled(heads)),
                           .window = streaming(),
                           .residual = run_.smoke ? 64U : 128U,
                           .capacity = run_.smoke ? 100U : 4096U};
    const std::vector<RaggedSequence> mixed = plans.four(count, scaled(tokens));
    const std::vector<RaggedSequence> reading = plans.prompt(count, scaled(tokens), part);
    add_ragged({.name = four + "/one_by_one",
                .baseline = {},
                .per_byte = {},
                .sequences = mixed,
                .together = Together::one_by_one});
    add_ragged({.name = four,
                .baseline = four + "/one_by_one",
                .per_byte = {},
                .sequences = mixed,
                .together = Together::seated});
    add_ragged({.name = "ragged/5_plans" + tail,
                .baseline = {},
                .per_byte = four,
                .sequences = plans.five(count, scaled(tokens)),
                .together = Together::seated});
    add_ragged({.name = prompt + "/one_by_one",
                .baseline = {},
                .per_byte = {},
                .sequences = reading,
                .together = Together::one_by_one_eager});
    add_ragged({.name = prompt,
                .baseline = prompt + "/one_by_one",
                .per_byte = {},
                .sequences = reading,
                .together = Together::batch});
  }

  // Prefills that take seconds are timed less often.
  static constexpr std::size_t few = 5;

  void prefill_of(Heads heads, std::size_t tokens, std::size_t chunk, double retrieval,
                  const std::string& duo_name, std::size_t samples) {
    const bool whole = chunk == tokens;
    const std::string tail =
        "/" + heads.name() + "/" + tokens_name(tokens) + (whole ? "" : "/chunk_" + tokens_name(chunk));
    const std::size_t small_chunk = whole ? scaled(tokens) : 130;
    Plan plan{shape(scaled(heads))};
    add_prefill({.name = "prefill/dense" + tail,
                 .baseline = {},
                 .plan = plan,
                 .tokens = scaled(tokens),
                 .chunk = run_.smoke ? small_chunk : chunk},
                samples);
    if (duo_name.empty()) return;
    stream_all_but(plan, 0, count_of(plan.shape().kv_heads, retrieval));
    add_prefill({.name = "prefill/" + duo_name + tail,
                 .baseline = "prefill/dense" + tail,
                 .plan = plan,
                 .tokens = scaled(tokens),
                 .chunk = run_.smoke ? small_chunk : chunk},
                samples);
  }
  void prefill() {
    prefill_of({32, 8}, 16 * Ki, 16 * Ki, 0, "", 50);
    prefill_of({32, 8}, 64 * Ki, 64 * Ki, 0, "", 50);
    prefill_of({32, 8}, 320 * Ki, 32 * Ki, 0.5, "duo_r50", few);
    prefill_of({32, 8}, 320 * Ki, 320 * Ki, 0.5, "duo_r50", few);
    prefill_of({32, 32}, 100 * Ki, 10 * Ki, 0.25, "duo_r25", few);
    prefill_of({32, 32}, 100 * Ki, 100 * Ki, 0.25, "duo_r25", few);
  }

  // The attention of whole decode steps: every layer of a model, in one graph.
  void launches(const DuoLayers& pattern) {
    const std::size_t layers = run_.smoke ? 2 : pattern.retrieval.size();
    const Heads heads = scaled(Heads{.q = 32, .kv = pattern.kv_heads});
    Plan plan{shape(heads, layers)};
    for (std::size_t layer = 0; layer < layers; ++layer) {
      stream_all_but(plan, layer, run_.smoke ? 1 : pattern.retrieval[layer]);
    }
    for (const std::size_t tokens : {4 * Ki, 8 * Ki, 16 * Ki, 32 * Ki, 64 * Ki, 128 * Ki}) {
      const std::string name = "launches/" + pattern.name + "/" + tokens_name(tokens);
      add_decode({.name = name + "/separate",
                  .baseline = {},
                  .plan = plan,
                  .tokens = scaled(tokens),
                  .launches = gpu::Launches::separate});
      add_decode(
          {.name = name + "/joint", .baseline = name + "/separate", .plan = plan, .tokens = scaled(tokens)});
      if (run_.smoke) break;
    }
  }

  Run& run_;
  std::deque<DecodeCase> decode_;
  std::deque<BatchCase> batch_;
  std::deque<RaggedCase> ragged_;
  std::deque<PrefillCase> prefill_;
};

constexpr std::string_view usage = R"(usage: attention_cuda_bench [options] [--benchmark_...]

Verifies the attention kernels on this machine's GPU, then times them with a cold cache.

  --samples N       timed launches of each case (default 50)
  --pattern FILE    a DuoAttention full_attention_heads.tsv for the launches/ cases, instead of the
                    four published patterns; may be given several times
  --sparsity S      share of streaming heads in those files (default 0.5)
  --smoke           runs and verifies every case in a small size
  --benchmark_filter=REGEX  only these cases (their names: --benchmark_list_tests)
  --benchmark_out=FILE --benchmark_out_format=json  results for bench/peers_torch.py --join
)";

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files;
  double sparsity = 0.5;
  const std::vector<Option> options{{"--pattern", [&](const char* value) { files.emplace_back(value); }},
                                    {"--sparsity", [&](const char* value) { sparsity = std::atof(value); }}};
  return run_program(argc, argv, usage, /*flushes=*/true, options, [&](Run& run) {
    std::vector<DuoLayers> patterns;
    for (const std::string& file : files) patterns.push_back(read_duo_layers(file, sparsity));
    if (files.empty()) patterns = published_duo_layers();
    if (run.smoke) patterns.resize(1);
    return std::make_unique<Cases>(run, patterns);
  });
}
