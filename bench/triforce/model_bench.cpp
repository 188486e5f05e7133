// SPDX-License-Identifier: Apache-2.0
//
// Measures speculative decoding of a pretrained model that has no smaller sibling: the model drafts
// for itself, over selected chunks (TriForce's middle level) or over a cache of another plan, or
// the text drafts by n-grams. And the two observations that TriForce rests on (its section 3): how
// much attention few rows get, and for how long the same few rows.
//
//   triforce_model_bench --model DIR [--texts N] [--contexts N,N] [--smoke]
//                        [--benchmark_filter=novels/4096] [--benchmark_out=FILE ...]
//
// Cases are named by what they measure, the text (examples/common/texts.hpp; its test part) and the
// tokens of context. Each iteration is another piece of the text, so a range is one over texts.
// There are two kinds of text: `continues` goes on with it; in `repeats` passages of it begin
// again, which a model that reads its context goes on to quote. Greedy tokens that differ from
// those of plain decoding are reported as an error, unless these were nearly a tie (`near_ties`).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policy/full_cache.hpp>

#include "bench/cpu/machine.hpp"
#include "common/files.hpp"
#include "common/head_files.hpp"
#include "common/run_tool.hpp"
#include "common/sequence.hpp"
#include "common/speculative_text.hpp"
#include "common/text_model.hpp"
#include "common/texts.hpp"
#include "decoding.hpp"
#include "generate/speculation_run.hpp"
#include "tool_plan.hpp"
#include "visualize/attended_rows.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;
using namespace kvpolicy::tools;

/// The sizes of the measurement.
struct Size {
  std::vector<std::string> names{"novels", "manual", "code"};
  std::vector<std::size_t> contexts{2048, 4096, 8192};
  std::size_t texts = 3;
  std::size_t continues = 64;  // new tokens
  std::size_t passages = 2;    // that begin again
  std::size_t opening = 32;    // their tokens that are given
  std::size_t repeats = 48;    // new tokens after each
  std::size_t followed = 65;   // queries of which the attention is recorded
};
Size size;
std::string model_folder;

const TextModel& model() {
  static const auto loaded = TextModel::load(model_folder);
  return loaded;
}

enum class Kind { continues, repeats };
constexpr std::array kinds{Kind::continues, Kind::repeats};
const char* name_of(Kind kind) { return kind == Kind::continues ? "continues" : "repeats"; }

/// A piece of a text: what is read before anything is measured, and what stands after it.
struct Piece {
  std::vector<int> tokens;
  std::vector<int> next;
};

/// The pieces are spread evenly over the text's test part.
Piece piece_of(const std::string& name, std::size_t context, std::size_t number) {
  const std::string text = part_of(text_named(name), Split::test);
  const std::size_t bytes = 10 * (context + size.followed);  // more than enough
  require(bytes < text.size(), "the text ", name, " is too short for ", context, " tokens");
  std::size_t at = (text.size() - bytes) / size.texts * number;
  while (!is_unit_start(text, at)) ++at;
  Piece piece{.tokens = model().encode(std::string_view{text}.substr(at, bytes)), .next = {}};
  require(piece.tokens.size() >= context + size.followed, "the text ", name, " has ", piece.tokens.size(),
          " tokens in ", bytes, " bytes, too few for ", context);
  const auto end = piece.tokens.begin() + static_cast<std::ptrdiff_t>(context);
  piece.next.assign(end, end + static_cast<std::ptrdiff_t>(size.followed));
  piece.tokens.resize(context);
  return piece;
}

/// A piece that was read, and what plain decoding makes of it.
struct Reading {
  Piece piece;
  std::unique_ptr<SpeculativeText> text = {};
  std::unique_ptr<AttendedRows> attended = {};
  std::array<std::vector<int>, kinds.size()> plain = {};  // the whole text, decoded greedily, if known
};

/// The readings of the latest text and context that were asked for.
Reading& reading(const std::string& name, std::size_t context, std::size_t number) {
  static std::pair<std::string, std::size_t> latest;
  static std::vector<Reading> readings;
  if (latest != std::pair{name, context}) {
    readings.clear();
    latest = {name, context};
  }
  while (readings.size() <= number) readings.push_back({piece_of(name, context, readings.size())});
  return readings[number];
}

SpeculativeText& read_text(Reading& reading) {
  if (!reading.text) {
    reading.text = std::make_unique<SpeculativeText>(model().llama(), nullptr,
                                                     decoding_setup(Structure::plain, 0.0, {}));
    reading.text->read(reading.piece.tokens);
  }
  return *reading.text;
}

/// Where a line of the text begins, at or after the share `depth` of it; there if no line does.
std::size_t passage_at(std::span<const int> tokens, double depth) {
  static const std::vector<int> ends = model().tokens_with("\n");
  const auto from = static_cast<std::size_t>(depth * static_cast<double>(tokens.size()));
  for (std::size_t at = from; at + size.opening < tokens.size(); ++at) {
    if (at > 0 && std::ranges::binary_search(ends, tokens[at - 1])) return at;
  }
  return from;
}

std::vector<SpeculationTurn> turns_of(Kind kind, std::span<const int> tokens) {
  std::vector<SpeculationTurn> turns(kind == Kind::continues ? 1 : size.passages);
  if (kind == Kind::continues) {
    turns.front().most_new = size.continues;
    return turns;
  }
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const double depth = (static_cast<double>(i) + 0.5) / static_cast<double>(turns.size());
    const auto opening = tokens.subspan(passage_at(tokens, depth), size.opening);
    turns[i].prompt = model().encode_after({}, "\n\n");
    turns[i].prompt.insert(turns[i].prompt.end(), opening.begin(), opening.end());
    turns[i].most_new = size.repeats;
  }
  return turns;
}

/// Products over several tokens differ from those over one in float's last bits, and of keys and values that differ so,
/// a few are rounded to neighbouring numbers of bfloat16, as which they are cached. Five tokens together then change a
/// logit of SmolLM2 by up to 0.014, 17 by up to 0.07 (with rows in float 0.00002 and 0.00005), so two that are this
/// close may change places.
constexpr float near_tie = 0.1F;

/// Where two texts first differ: by how much the logits of their tokens do. The texts begin with the same prompt.
float gap_where_they_differ(std::span<const int> one, std::span<const int> other) {
  const auto [a, b] = std::ranges::mismatch(one, other);
  if (a == one.end() || b == other.end()) return 0.0F;  // one of them is shorter
  using Full = FullCache<DenseStorage<bfloat16>>;
  const auto sequence =
      make_sequence(model().llama(), HeadPlan<bfloat16>{model().config().shape(), Full::Config{}});
  const auto logits = sequence->prefill({one.begin(), a});
  return std::abs(logits[static_cast<std::size_t>(*a)] - logits[static_cast<std::size_t>(*b)]);
}

/// What a piece was decoded to.
struct Decoded {
  DecodingTotal total;
  bool near_tie = false;  ///< other tokens than plain decoding's, after a choice that was nearly a tie
};

/// Decodes a piece, beside plain decoding, or compared with what that made of it before.
/// @throws ConfigError if the tokens differ, but for near ties
Decoded decode(Reading& reading, const SpeculationSetup& setup, Kind kind, bool beside_plain) {
  const auto turns = turns_of(kind, reading.piece.tokens);
  const auto run = [&](const SpeculationSetup& own, bool beside, std::vector<int>& text) {
    const auto fork = read_text(reading).fork(own);
    const SpeculationResult result = run_speculation(*fork, turns, beside);
    text.assign(fork->text().begin(), fork->text().end());
    return result;
  };
  const bool greedy = setup.options.sampling.temperature == 0.0F;
  std::vector<int>& plain = reading.plain[static_cast<std::size_t>(kind)];
  if (greedy && !beside_plain && plain.empty()) run(decoding_setup(Structure::plain, 0.0, {}), false, plain);
  std::vector<int> text;
  const SpeculationResult result = run(setup, beside_plain, text);
  Decoded decoded;
  decoded.total.add(result);
  if (!greedy || (beside_plain ? decoded.total.same : text == plain)) return decoded;
  SpeculationSetup slow = setup;  // with the target's own storage
  slow.structure = Structure::plain;
  std::vector<int> own;
  run(slow, false, own);
  const float gap = gap_where_they_differ(own, text);
  require(gap <= near_tie, "the tokens differ from those of plain decoding, where the logits of the two are ",
          gap, " apart; up to ", near_tie, " may be rounding");
  decoded.near_tie = true;
  return decoded;
}

/// Runs `once` for the piece of each iteration, which returns the seconds that it measured.
void for_each_piece(benchmark::State& state, const std::string& name, std::size_t context,
                    const std::function<double(Reading&, std::size_t number)>& once) {
  std::size_t number = 0;
  for (auto _ : state) {
    try {
      state.SetIterationTime(once(reading(name, context, number), number));
    } catch (const std::exception& error) {
      return state.SkipWithError(error.what());
    }
    ++number;
  }
}

void decoding(benchmark::State& state, const std::string& name, std::size_t context, SpeculationSetup setup,
              Kind kind, bool beside_plain) {
  std::vector<DecodingTotal> totals;
  std::size_t near_ties = 0;
  for_each_piece(state, name, context, [&](Reading& reading, std::size_t number) {
    setup.options.seed = number;
    const Decoded decoded = decode(reading, setup, kind, beside_plain);
    totals.push_back(decoded.total);
    near_ties += decoded.near_tie ? 1 : 0;
    return decoded.total.seconds;
  });
  if (totals.size() != size.texts) return;
  report_decoding(state, totals);
  state.counters["near_ties"] = static_cast<double>(near_ties);
}

double mean(std::span<const double> numbers) {
  double sum = 0;
  for (const double number : numbers) sum += number;
  return sum / static_cast<double>(numbers.size());
}

/// A share of the attention over all texts: its mean, and the tenth of heads in which it is lowest
/// (the highest of these heads).
void report_shares(benchmark::State& state, const std::string& name,
                   std::vector<std::vector<double>> by_head) {
  std::vector<double> means;
  for (const std::vector<double>& head : by_head) means.push_back(mean(head));
  state.counters[name] = mean(means);
  std::ranges::sort(means);
  state.counters[name + "_low"] = means[means.size() / 10];
}

void attention(benchmark::State& state, const std::string& name, std::size_t context,
               const SpeculationSetup& setup) {
  const std::size_t heads = model().config().shape().kv_head_count();
  using ByHead = std::vector<std::vector<double>>;
  ByHead best(heads), chosen(heads), latest(heads);
  std::vector<double> fixed, overlap;  // sums over texts and heads, by query
  std::size_t texts = 0;
  for_each_piece(state, name, context, [&](Reading& reading, std::size_t) {
    if (!reading.attended) {
      reading.attended = std::make_unique<AttendedRows>(model().llama(), reading.piece.tokens);
    }
    const auto queries = reading.attended->follow(setup, reading.piece.next);
    fixed.resize(queries.size());
    overlap.resize(queries.size());
    for (std::size_t query = 0; query < queries.size(); ++query) {
      for (std::size_t head = 0; head < heads; ++head) {
        const AttendedShares& shares = queries[query][head];
        require(std::max(shares.chosen, shares.latest) <= shares.best + 1e-4 && shares.best <= 1.0 + 1e-3,
                "rows of a head got ", shares.best, " of its attention at most, ", shares.chosen,
                " if chosen and ", shares.latest, " if latest");
        best[head].push_back(shares.best);
        chosen[head].push_back(shares.chosen);
        latest[head].push_back(shares.latest);
        fixed[query] += shares.fixed;
        overlap[query] += shares.overlap;
      }
    }
    ++texts;
    return 1e-9;  // nothing is timed
  });
  if (texts != size.texts) return;
  report_shares(state, "best", best);
  report_shares(state, "chosen", chosen);
  report_shares(state, "latest", latest);
  for (std::size_t lag = 1; lag < fixed.size(); lag *= 2) {
    const auto all = static_cast<double>(texts * heads);
    state.counters["fixed_" + std::to_string(lag)] = fixed[lag] / all;
    state.counters["overlap_" + std::to_string(lag)] = overlap[lag] / all;
  }
}

SpeculationSetup selecting(bool min_max, std::size_t chunk, std::size_t budget) {
  SpeculationSetup setup = decoding_setup(Structure::self, 0.0, 6);
  setup.min_max = min_max;
  setup.chunk = chunk;
  setup.budget = budget;
  return setup;
}

struct NamedSetup {
  std::string name;
  SpeculationSetup setup;
};

/// The drafts that need no second model, over an eighth of the context's rows where they select or
/// drop rows: with four draft tokens, so that their acceptances compare, and as many as pay.
std::vector<NamedSetup> drafts(std::size_t context) {
  const auto draft = [&](Structure structure, std::optional<std::size_t> length) {
    SpeculationSetup setup = decoding_setup(structure, 0.0, length);
    setup.budget = context / 8;
    setup.recent = context / 8 - setup.sinks;
    return setup;
  };
  std::vector<NamedSetup> all{{"self-4", draft(Structure::self, 4)},
                              {"self", draft(Structure::self, {})},
                              {"streaming-4", draft(Structure::streaming, 4)}};
  // DuoAttention's plan, where somebody has found the model's heads.
  if (std::filesystem::exists(head_file(model_folder, "duo/full_attention_heads.tsv"))) {
    PlanArguments duo;
    duo.plan = "duo:0.5";
    all.push_back({"duo-4", draft(Structure::streaming, 4)});
    all.back().setup.draft_plan = make_plan<bfloat16>(duo, model().config().shape(), model_folder);
  }
  all.push_back({"halves-4", draft(Structure::halves, 4)});
  all.push_back({"halves", draft(Structure::halves, {})});
  all.push_back({"ngram-4", draft(Structure::ngram, 4)});
  all.push_back({"ngram", draft(Structure::ngram, {})});
  return all;
}

void add_cases(const std::string& name, std::size_t context) {
  const std::string at = "/" + name + "/" + std::to_string(context);
  const auto add = [&](const std::string& what, const SpeculationSetup& setup, Kind kind, bool beside_plain) {
    add_case(what, size.texts, decoding, name, context, setup, kind, beside_plain);
  };
  for (const Kind kind : kinds) {
    for (const NamedSetup& draft : drafts(context)) {
      add("structure/" + draft.name + "/" + name_of(kind) + "/t0" + at, draft.setup, kind, true);
    }
  }
  // A greedy text of a small model soon repeats itself; a sampled one does not.
  for (NamedSetup& draft : drafts(context)) {
    if (draft.setup.options.adapt) continue;
    draft.setup.options.sampling.temperature = 1.0F;
    add("structure/" + draft.name + "/continues/t1" + at, draft.setup, Kind::continues, true);
  }
  constexpr std::array<std::size_t, 6> budgets{64, 128, 256, 512, 1024, 2048};
  for (const Kind kind : kinds) {
    for (const bool min_max : {true, false}) {
      const std::string summary = std::string{name_of(kind)} + (min_max ? "-bounds" : "-means");
      for (const std::size_t budget : budgets) {
        if (budget > context / 2) continue;
        add("budget/" + summary + at + "/" + std::to_string(budget),
            selecting(min_max, min_max ? 16 : 8, budget), kind, false);
      }
    }
    for (const std::size_t chunk : {4, 8, 16, 32, 64}) {
      add("chunk/" + std::string{name_of(kind)} + "-bounds" + at + "/" + std::to_string(chunk),
          selecting(true, chunk, 256), kind, false);
    }
  }
  for (const bool min_max : {true, false}) {
    for (const std::size_t budget : budgets) {
      if (budget > context / 2) continue;
      add_case(std::string{"attention/"} + (min_max ? "bounds" : "means") + at + "/" + std::to_string(budget),
               size.texts, attention, name, context, selecting(min_max, min_max ? 16 : 8, budget));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool smoke = false;
  std::size_t threads = 0;
  model_folder = repository_path(shipped_model);
  CLI::App app{"Measures speculative decoding of a model by itself, and how its attention is spread.",
               "triforce_model_bench"};
  app.footer("Options of Google Benchmark are passed on: --benchmark_filter=structure/self");
  app.add_option("--model", model_folder, "Hugging Face folder or GGUF file of the model")->type_name("DIR");
  app.add_option("--text", size.names, "Texts: kjv, novels, lexicon, manual, code")->delimiter(',');
  app.add_option("--contexts", size.contexts, "Tokens read before decoding")->delimiter(',');
  app.add_option("--texts", size.texts, "Pieces of each text")->check(whole_number(1, 100));
  app.add_option("--threads", threads, "Threads; 0: all that OpenMP offers")
      ->check(whole_number(0, most_threads));
  app.add_flag("--smoke", smoke, "Every case once, over a short text that ships");
  app.allow_extras();
  return run_tool(app, argc, argv, [&] {
    if (smoke) {
      size = {.names = {"kjv"},
              .contexts = {256},
              .texts = 1,
              .continues = 12,
              .passages = 1,
              .opening = 8,
              .repeats = 12,
              .followed = 9};
    }
    set_threads(threads);
    for (const std::string& name : size.names) {
      for (const std::size_t context : size.contexts) add_cases(name, context);
    }
    std::vector<std::string> rest = app.remaining();
    std::vector<char*> arguments{argv[0]};
    for (std::string& argument : rest) arguments.push_back(argument.data());
    int count = static_cast<int>(arguments.size());
    arguments.push_back(nullptr);
    benchmark::Initialize(&count, arguments.data());
    require(count == 1, "there is no option ", arguments[count - 1]);
    benchmark::AddCustomContext("cpu", machine().cpu);
    benchmark::AddCustomContext("model", std::filesystem::path{model_folder}.filename().string());
    benchmark::AddCustomContext("texts", std::to_string(size.texts));
    benchmark::AddCustomContext("threads", std::to_string(kvpolicy::tools::threads()));
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
  });
}
