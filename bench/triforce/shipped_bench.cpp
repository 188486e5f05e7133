// SPDX-License-Identifier: Apache-2.0
//
// Measures speculative decoding of the shipped model on the CPU, at the longest text that it
// answers well: for each structure the acceptance, the speedup over plain decoding of the same
// text, which alternates with it in the same run, and the cost model's prediction; and how often
// the full cache agrees with its selected rows, by budget and by chunk size (TriForce's figure 6).
//
//   triforce_shipped_bench [--smoke] [--benchmark_filter=structure]
//                          [--benchmark_out=FILE --benchmark_out_format=json]
//
// With --smoke every case runs once, over a short text. ./scripts/bench-triforce runs this program,
// stores its results, and draws docs/triforce_acceptance.png.
//
// There are two kinds of text: `prose` continues the King James Bible, `needles` answers questions
// about facts hidden in it. A greedy run whose tokens differ from those of plain decoding is
// reported as an error.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <benchmark/benchmark.h>

#include <reference_model/llama.hpp>

#include "bench/cpu/machine.hpp"
#include "common/files.hpp"
#include "common/retrieval_text.hpp"
#include "common/speculative_text.hpp"
#include "common/text_model.hpp"
#include "decoding.hpp"
#include "generate/speculation_run.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;
using namespace kvpolicy::tools;

/// The sizes of the measurement, and how often it is repeated.
struct Size {
  std::size_t text = 7680;  // with its continuation within the 8,192 bytes of the training
  std::size_t texts = 3;
  std::size_t prose = 192;  // new tokens
  std::size_t questions = 6;
  std::size_t iterations = 3;
};
Size size;

constexpr Size smoke_size{.text = 400, .texts = 1, .prose = 24, .questions = 1, .iterations = 1};

const TextModel& target() {
  static const auto model = TextModel::load(repository_path(shipped_model));
  return model;
}
const reference::Llama& small() {
  static const auto model = reference::Llama::load(draft_folder_of(repository_path(shipped_model)));
  return model;
}

enum class Kind { prose, needles };

std::vector<SpeculationTurn> turns_of(Kind kind, std::uint64_t seed) {
  const RetrievalText text =
      draw_text(held_out_text(), {.length = size.text, .questions = size.questions, .seed = seed});
  std::vector<SpeculationTurn> turns(1);
  turns.front().prompt = target().encode(text.body);
  turns.front().past_stop_tokens = true;
  turns.front().most_new = kind == Kind::prose ? size.prose : 1;
  if (kind == Kind::prose) return turns;
  for (const Question& question : text.questions) {
    SpeculationTurn& turn = turns.emplace_back();
    turn.prompt = target().encode_after(text.body, question.text);
    turn.most_new = 64;
  }
  return turns;
}

DecodingTotal run(const SpeculationSetup& setup, Kind kind, bool beside_plain) {
  DecodingTotal total;
  for (std::size_t text = 1; text <= size.texts; ++text) {
    SpeculationSetup own = setup;
    own.options.stop_tokens = {'.'};
    own.options.seed = text;
    SpeculativeText speculative{target().llama(), needs_small_model(setup.structure) ? &small() : nullptr,
                                own};
    total.add(run_speculation(speculative, turns_of(kind, text), beside_plain));
  }
  return total;
}

void structure(benchmark::State& state, Structure named, Kind kind, double temperature) {
  std::vector<DecodingTotal> totals;
  for (auto _ : state) {
    totals.push_back(run(decoding_setup(named, temperature, {}), kind, true));
    state.SetIterationTime(totals.back().seconds);
    if (temperature == 0.0 && !totals.back().same) {
      return state.SkipWithError("the tokens differ from those of plain decoding");
    }
  }
  report_decoding(state, totals);
}

void selection(benchmark::State& state, Kind kind, bool min_max, std::size_t chunk, std::size_t budget) {
  std::vector<DecodingTotal> totals;
  for (auto _ : state) {
    SpeculationSetup setup = decoding_setup(Structure::self, 0.0, 6);
    setup.min_max = min_max;
    setup.chunk = chunk;
    setup.budget = budget;
    totals.push_back(run(setup, kind, false));
    state.SetIterationTime(totals.back().seconds);
  }
  report_decoding(state, totals);
}

void add_all() {
  const auto kind_name = [](Kind kind) { return kind == Kind::prose ? "prose" : "needles"; };
  for (const Kind kind : {Kind::prose, Kind::needles}) {
    for (const NamedStructure& s : structures()) {
      if (s.structure == Structure::plain) continue;
      add_case(std::string{"structure/"} + s.name + "/" + kind_name(kind) + "/t0", size.iterations, structure,
               s.structure, kind, 0.0);
    }
  }
  add_case("structure/triforce/prose/t0.6", size.iterations, structure, Structure::triforce, Kind::prose,
           0.6);
  add_case("structure/triforce/prose/t1", size.iterations, structure, Structure::triforce, Kind::prose, 1.0);
  // Selection by mean keys, as in the paper, and by Quest's bounds.
  for (const bool min_max : {false, true}) {
    for (const Kind kind : {Kind::prose, Kind::needles}) {
      const std::string text = std::string{kind_name(kind)} + (min_max ? "-bounds/" : "-means/");
      for (const std::size_t budget : {32, 64, 128, 256, 512, 1024, 2048, 4096}) {
        add_case("budget/" + text + std::to_string(budget), 1, selection, kind, min_max, std::size_t{8},
                 budget);
      }
      for (const std::size_t chunk : {1, 2, 4, 8, 16, 32, 64}) {
        add_case("chunk/" + text + std::to_string(chunk), 1, selection, kind, min_max, chunk,
                 std::size_t{512});
      }
    }
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
  add_all();
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("cpu", bench::machine().cpu);
  benchmark::AddCustomContext("text", std::to_string(size.text));
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
