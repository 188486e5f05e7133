// SPDX-License-Identifier: Apache-2.0
//
// Times whole models on a GPU, with full attention and with DuoAttention's split: decode steps by
// context, in a CUDA graph and launched one by one, and chunked prefill. Shapes, contexts and
// settings are those of that paper's figures 9 to 11 (arXiv:2410.10819); weights are random.
//
//   llama_cuda_bench --benchmark_out=llama.json --benchmark_out_format=json
//   llama_cuda_bench --benchmark_filter=Llama-2
//
// A context that does not fit is skipped and reports the missing memory. bench/plot_cuda.py draws
// the measurements, and marks extrapolated points.
#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "model_case.hpp"
#include "program.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

struct Model {
  std::string name;
  reference::LlamaConfig config;
  double retrieval = 0.5;  ///< share of retrieval heads, as in the paper
  std::vector<std::size_t> contexts;
  std::size_t prompt = 0;
  std::size_t chunk = 0;
};

std::vector<Model> models(bool smoke) {
  std::vector<Model> all{
      {"Llama-3-8B", llama_3_8b(), 0.5, {100000, 200000, 300000, 400000, 517000, 1000000}, 320000, 32000},
      {"Llama-2-7B", llama_2_7b(), 0.25, {20000, 60000, 100000, 134000, 200000}, 100000, 10000},
  };
  if (!smoke) return all;
  for (Model& model : all) {
    model.config = smoke_model(model.config);
    model.contexts = {70, 130};
    model.prompt = 96;
    model.chunk = 40;
  }
  return all;
}

class Cases {
 public:
  explicit Cases(Run& run) : run_{run}, rig_{run} {
    for (const Model& model : models(run.smoke)) {
      const Model& kept = models_.emplace_back(model);
      for (const bool duo : {false, true}) {
        for (const std::size_t context : kept.contexts) {
          for (const bool graph : {true, false}) decode(kept, duo, context, graph);
        }
      }
      // Prefills come after all decoding, because the buffers for a chunk's activations stay
      // allocated.
      for (const bool duo : {false, true}) prefill(kept, duo);
    }
  }

 private:
  static constexpr std::size_t filling_rows = 2048;

  [[nodiscard]] Plan plan_of(const Model& model, bool duo) const {
    const auto window = run_.smoke ? Streaming::Config{.sinks = 8, .recent = 24}
                                   : Streaming::Config{.sinks = 128, .recent = 256};
    return bench::duo_plan(model.config.shape(), duo ? model.retrieval : 1.0, Full::Config{}, window);
  }
  [[nodiscard]] static std::string name_of(const Model& model, bool duo) {
    return model.name + (duo ? "/duo" : "/full");
  }
  void use(const Model& model, bool duo) {
    rig_.use(model.name, model.config, reference::WeightFormat::bfloat16, name_of(model, duo),
             plan_of(model, duo), run_.smoke ? 32 : filling_rows);
  }

  void decode(const Model& model, bool duo, std::size_t context, bool graph) {
    const std::string tail = "/" + std::to_string(context) + (graph ? "/graph" : "/eager");
    const std::string name = name_of(model, duo) + "/decode" + tail;
    const std::string baseline = duo ? name_of(model, false) + "/decode" + tail : "";
    add_case(name, run_.samples, benchmark::kMillisecond, [=, this, &model](benchmark::State& state) {
      guarded(state, run_, name, [&] {
        // Steps in the graph and steps without it follow each other in one text.
        const std::size_t more = 2 * run_.samples + 32;
        use(model, duo);
        if (rig_.cache().tokens() > context + more) rig_.drop_cache();
        use(model, duo);
        if (const std::size_t missing = rig_.missing(context + more)) {
          return skip_unfitting(state, run_, page_bytes(rig_.cache().plan(), rig_.cache().options(), context),
                                missing);
        }
        rig_.fill(context, more);
        rig_.time_steps(state, name, baseline, graph);
      });
    });
  }

  // Makes one pass; the curve over the text length comes from its chunks.
  void prefill(const Model& model, bool duo) {
    const std::string tail = "/prefill/" + std::to_string(model.prompt);
    const std::string name = name_of(model, duo) + tail;
    const std::string baseline = duo ? name_of(model, false) + tail : "";
    add_case(name, 1, benchmark::kMillisecond, [=, this, &model](benchmark::State& state) {
      guarded(state, run_, name, [&] {
        rig_.drop_cache();
        use(model, duo);
        rig_.model().reserve(model.chunk, 1, run_.stream);
        if (const std::size_t missing = rig_.missing(model.prompt)) {
          return skip_unfitting(
              state, run_, page_bytes(rig_.cache().plan(), rig_.cache().options(), model.prompt), missing);
        }
        std::vector<int> tokens(model.prompt);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          tokens[i] = static_cast<int>(i * 7919 % model.config.vocabulary);
        }
        // Libraries choose and load their kernels in the first chunk, so another text is read
        // first.
        static_cast<void>(reference::prefill(rig_.model(), rig_.cache(), std::span{tokens}.first(model.chunk),
                                             model.chunk, {}, {}, run_.stream));
        rig_.drop_cache();
        use(model, duo);
        rig_.cache().reserve(model.prompt, run_.stream);
        gpu::check(cudaStreamSynchronize(run_.stream), "cudaStreamSynchronize");

        double seconds = 0.0;
        for (auto _ : state) {
          const auto start = std::chrono::steady_clock::now();
          const auto passed = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
          };
          static_cast<void>(reference::prefill(
              rig_.model(), rig_.cache(), tokens, model.chunk,
              [&](std::size_t done, std::size_t) {
                state.counters["s_at_" + std::to_string(done)] = passed();
              },
              {}, run_.stream));
          seconds = passed();
          state.SetIterationTime(seconds);
        }
        run_.seconds[name] = seconds;
        report_ratio(state, run_, baseline, seconds);
        state.counters["seconds"] = seconds;
        state.counters["samples"] = 1;
        state.counters["kv_GiB"] = gibibytes(rig_.cache().bytes());
        state.counters["held_GiB"] = gibibytes(rig_.held_bytes());
        report_flops(state, model, duo, seconds);
      });
      rig_.drop_cache();
    });
  }
  void report_flops(benchmark::State& state, const Model& model, bool duo, double seconds) const {
    const reference::LlamaConfig& config = model.config;
    const Plan plan = plan_of(model, duo);
    const ModelShape shape = config.shape();
    double pairs = 0.0;
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      pairs += visible_pairs(gpu::served_rule(plan, 0, head), 0, model.prompt);
    }
    const double attention =
        pairs * static_cast<double>(shape.queries_per_kv() * shape.layers) * flops_of_pair(shape.head_dim);
    const std::size_t qkv = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim;
    const std::size_t weights =
        shape.layers * config.hidden * (qkv + shape.q_heads * shape.head_dim + 3 * config.intermediate);
    const double linear = 2.0 * static_cast<double>(weights) * static_cast<double>(model.prompt);
    state.counters["attention_flops"] = attention;
    state.counters["linear_flops"] = linear;
    state.counters["TFLOP_per_s"] = (attention + linear) / seconds * 1e-12;
  }

  Run& run_;
  ModelRig rig_;
  std::deque<Model> models_;
};

constexpr std::string_view usage = R"(usage: llama_cuda_bench [options] [--benchmark_...]

Times decode steps and prefill of Llama-3-8B's and Llama-2-7B's shapes with random weights, with full
attention and with DuoAttention's split (sinks 128, recent 256; half or a quarter of the heads see all).

  --samples N   timed decode steps of each case (default 50)
  --smoke       runs every case in a small size
  --benchmark_filter=REGEX  only these cases (their names: --benchmark_list_tests)
  --benchmark_out=FILE --benchmark_out_format=json  results for bench/plot_cuda.py
)";

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, usage, /*flushes=*/false, {},
                     [](Run& run) { return std::make_unique<Cases>(run); });
}
