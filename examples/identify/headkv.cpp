// SPDX-License-Identifier: Apache-2.0
//
// identify_heads headkv: finds the query heads that look things up, by watching them while the
// model answers.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <reference_model/identify/headkv_scores.hpp>

#include "../common/context_limit.hpp"
#include "../common/files.hpp"
#include "../common/heat_map.hpp"
#include "../common/json_line.hpp"
#include "../common/progress.hpp"
#include "../common/retrieval_text.hpp"
#include "../common/run_tool.hpp"
#include "../common/sequence.hpp"
#include "../common/stopwatch.hpp"
#include "../common/terminal.hpp"
#include "../common/text_model.hpp"
#include "needles.hpp"
#include "own_texts.hpp"
#include "shortened.hpp"
#include "subcommands.hpp"

namespace kvpolicy::tools {
namespace {

struct Arguments {
  std::string model;
  std::string kind = "retrieval";
  std::vector<std::size_t> lengths{512, 1024, 2048, 3072, 4096};
  std::size_t depths = 10;
  std::size_t tries = 8;
  std::uint64_t seed = 1;
  std::size_t threads = 0;
  ContextLimit context;
  std::string samples;  // a file of the user's samples; empty: they are drawn
  std::string answers;  // empty: the default of the model
  std::string out;
  bool json = false;
};

constexpr const char* about = "Finds the query heads that look things up, by watching them answer (HeadKV)";

constexpr const char* explanation = R"(
Scores every query head by where it looks while the model answers.

A fact is hidden at each depth of texts of each length; the question asks for it. While the model
writes the answer, token by token, a head earns

  retrieval  1 / N whenever the row that it attends to most is the fact's and holds the token that
             is written (N tokens in the fact): heads that copy
  enhanced   the attention of those of its N most attended rows that are the fact's, / N: heads
             that look there at all
  reasoning  the same where two facts lead to the answer, with the wrong answer in the text too

The shipped model reads what it was trained on: many facts ("The key of Bamelo is 48213.") in a
text, the whole sentence as the answer, and "What is the key of the older of Bamelo and Kitoru?"
for reasoning. A model with a tokenizer reads prose with one pass key, as the suite niah_depths has
it, for reasoning two pass keys and the owners that they belong to; the question ends with the
opening of its answer, and the fact is the number.

Only samples that the model answers rightly count; where it fails, another is drawn, --tries times.
--answers says what is right: exact, the expected answer token for token, or key, an answer of at most
50 tokens in whose text the key is the first number, which is the default for models with a tokenizer.
Texts come from a part of the sample text that is kept for identification: the plans' answers are
measured on the rest.

Samples of your own are token ids, in a file for --samples:
  {"format": "kvpolicy needle samples", "version": 1, "samples": [
    {"prompt": [5, 9, 2, 7], "answer": [9, 2], "needle": [1, 2]}, ...]}
prompt is text and question, answer what the model should write, needle where the prompt has the
answer: its first token, from 0, and the number of tokens, best as many as in the answer. --kind
only says how they are scored.

The scores are written as HeadKV publishes them, {"layer-head": [a score for each sample, ...]}.
A plan takes the mean over samples and over each group of query heads: --plan headkv@FILE:128.)";

constexpr const char* examples = R"(
Examples:
  identify_heads headkv                               retrieval heads, to headkv/retrieval_heads.json
  identify_heads headkv --kind enhanced --seed 2      other needles
  identify_heads headkv --kind reasoning --tries 12   two-step questions, which the shipped model
                                                      answers about half of the time
  identify_heads headkv --lengths 512 --depths 3      a quick look
  identify_heads headkv --model llama --samples samples.json  samples of your own)";

// The name of the published file for this kind of scores.
std::string file_of(const std::string& kind) {
  return kind == "reasoning" ? "retrieval_reasoning_heads.json" : kind + "_heads.json";
}

struct Cell {
  std::size_t length = 0;
  double depth = 0;
  std::size_t tried = 0;
  bool right = false;
};

struct Identified {
  std::vector<Cell> cells;
  io::HeadSamples samples;
  std::string digest;  // of the file of samples, if there is one

  [[nodiscard]] std::size_t tried() const {
    std::size_t sum = 0;
    for (const Cell& cell : cells) sum += cell.tried;
    return sum;
  }
  [[nodiscard]] std::size_t right() const {
    return static_cast<std::size_t>(std::ranges::count(cells, true, &Cell::right));
  }
};

reference::NeedleRule rule_of(const Arguments& arguments) {
  return arguments.kind == "retrieval" ? reference::NeedleRule::retrieval : reference::NeedleRule::enhanced;
}

// Scores one sample, and returns whether the model answered rightly; only then are the scores kept.
bool score(const reference::Llama& model, const reference::NeedleSample& sample, const Arguments& arguments,
           io::HeadSamples& samples, const reference::AnswerCheck& check = {}) {
  const auto result = reference::score_needle<cpu::Engine<>>(model, sample, rule_of(arguments), check);
  if (!result.right) return false;
  for (std::size_t i = 0; i < result.scores.values().size(); ++i) {
    samples.values()[i].push_back(shortened(result.scores.values()[i]));
  }
  return true;
}

Identified identify_on(const NeedleSamples& own, const Arguments& arguments, const reference::Llama& model) {
  Identified found{{}, {model.config().layers, model.config().q_heads}, own.digest};
  Progress progress;
  for (const reference::NeedleSample& sample : own.samples) {
    const std::size_t done = found.cells.size();
    progress.update(static_cast<double>(done) / static_cast<double>(own.samples.size()),
                    fmt::format("sample {} of {}", done + 1, own.samples.size()));
    found.cells.push_back(
        {.length = sample.prompt.size() + sample.answer.size(),
         .depth = static_cast<double>(sample.needle) / static_cast<double>(sample.prompt.size()),
         .tried = 1,
         .right = score(model, sample, arguments, found.samples)});
  }
  return found;
}

Identified identify_drawn(const Arguments& arguments, const TextModel& model) {
  const std::string plain = identification_text();
  Identified found{{}, {model.config().layers, model.config().q_heads}, {}};
  const double step = 1.0 / static_cast<double>(arguments.depths);
  double total = 0;
  for (const std::size_t length : arguments.lengths) total += static_cast<double>(length);
  double done = 0;
  Progress progress;
  for (const std::size_t length : arguments.lengths) {
    for (std::size_t d = 0; d < arguments.depths; ++d) {
      Cell cell{.length = length, .depth = (static_cast<double>(d) + 0.5) * step};
      progress.update(done / total,
                      fmt::format("{} tokens, depth {}", thousands(length), percent(cell.depth)));
      while (cell.tried < arguments.tries && !cell.right) {
        const auto sample = draw_needle(model, plain,
                                        {.length = length,
                                         .depth = cell.depth,
                                         .tolerance = step / 2,
                                         .reasoning = arguments.kind == "reasoning",
                                         .seed = arguments.seed,
                                         .number = d * arguments.tries + cell.tried});
        ++cell.tried;
        cell.right = score(model.llama(), sample, arguments, found.samples,
                           arguments.answers == "key" ? says_key(model, sample) : reference::AnswerCheck{});
      }
      found.cells.push_back(cell);
      done += static_cast<double>(length) * step;
    }
  }
  return found;
}

HeadScores means(const io::HeadSamples& samples) {
  HeadScores scores{samples.layers(), samples.heads()};
  for (std::size_t i = 0; i < scores.values().size(); ++i) {
    for (const double score : samples.values()[i]) scores.values()[i] += score;
    scores.values()[i] /= static_cast<double>(samples.values()[i].size());
  }
  return scores;
}

nlohmann::json as_json(const Arguments& arguments, const Identified& found) {
  nlohmann::json cells = nlohmann::json::array();
  for (const Cell& cell : found.cells) {
    cells.push_back(
        {{"length", cell.length}, {"depth", cell.depth}, {"tried", cell.tried}, {"right", cell.right}});
  }
  const HeadScores scores = means(found.samples);
  nlohmann::json rows = nlohmann::json::array();
  for (std::size_t layer = 0; layer < scores.layers(); ++layer) {
    rows.push_back(std::vector<double>(scores.layer(layer).begin(), scores.layer(layer).end()));
  }
  nlohmann::json json = {{"method", "headkv"},       {"kind", arguments.kind},    {"tried", found.tried()},
                         {"counted", found.right()}, {"cells", std::move(cells)}, {"scores", std::move(rows)},
                         {"file", arguments.out}};
  if (arguments.samples.empty()) {
    json["seed"] = arguments.seed;
    json["answers"] = arguments.answers;
  } else {
    json["samples"] = std::filesystem::path{arguments.samples}.filename().string();
    json["samples_digest"] = found.digest;
  }
  return json;
}

// The KV heads, shaded by their scores and framed where they have more than an equal share.
std::string picture(const HeadScores& scores, std::size_t kv_heads) {
  HeadGates gates = group_scores(scores, kv_heads);
  const double most = *std::ranges::max_element(gates.values());
  double mean = 0;
  for (double& gate : gates.values()) {
    gate = most > 0 ? gate / most : 0;
    mean += gate / static_cast<double>(gates.values().size());
  }
  HeadKinds kinds{gates.layers(), gates.heads(), HeadKind::streaming};
  for (std::size_t i = 0; i < gates.values().size(); ++i) {
    if (gates.values()[i] > mean) kinds.values()[i] = HeadKind::retrieval;
  }
  return heat_map(gates, kinds, wants_colour(stdout));
}

std::string best_heads(const HeadScores& scores) {
  std::vector<std::size_t> ranked(scores.values().size());
  for (std::size_t i = 0; i < ranked.size(); ++i) ranked[i] = i;
  std::ranges::stable_sort(
      ranked, [&](std::size_t a, std::size_t b) { return scores.values()[a] > scores.values()[b]; });
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(8, ranked.size()); ++i) {
    text += fmt::format("{}{}-{} {:.4f}", i > 0 ? ", " : "", ranked[i] / scores.heads(),
                        ranked[i] % scores.heads(), scores.values()[ranked[i]]);
  }
  return text;
}

void run(Arguments arguments) {
  require_model_folder(arguments.model);
  set_threads(arguments.threads);
  NeedleSamples own;
  if (!arguments.samples.empty()) {
    const std::size_t vocabulary = reference::load_llama_config(arguments.model).vocabulary;
    own = load_needle_samples(arguments.samples, vocabulary);
  }
  const auto model = TextModel::load(arguments.model);
  if (arguments.answers.empty()) {
    arguments.answers = model.config().vocabulary == 256 ? "exact" : "key";
  }
  if (arguments.out.empty()) arguments.out = "headkv/" + file_of(arguments.kind);
  const Stopwatch took;
  if (own.samples.empty()) {
    model.require_reads_texts();
    arguments.context.check(model.config(), std::ranges::max(arguments.lengths));
  }
  const Identified found =
      own.samples.empty() ? identify_drawn(arguments, model) : identify_on(own, arguments, model.llama());
  require(found.right() > 0, "the model answered none of ", found.tried(),
          " questions, so there is nothing to score heads by");
  write_result(arguments.out, io::format_head_samples(found.samples));
  if (arguments.json) {
    fmt::print("{}\n", as_line(as_json(arguments, found)));
    return;
  }
  const HeadScores scores = means(found.samples);
  const std::string counted =
      own.samples.empty()
          ? fmt::format(
                "{} of {} pairs of length and depth gave a sample that counts; {} of {} questions were "
                "answered rightly",
                found.right(), found.cells.size(), found.right(), found.tried())
          : fmt::format("{} of {} samples were answered rightly and count", found.right(), found.tried());
  fmt::print(
      "{} ({}).\n\n"
      "Scores of the KV heads, the mean of their query heads; framed: more than an equal share\n{}\n"
      "Query heads with the most, as layer-head: {}\nWrote {}\n",
      counted, duration(took.seconds()), picture(scores, model.config().kv_heads), best_heads(scores),
      arguments.out);
}

}  // namespace

void add_headkv(CLI::App& app, std::function<void()>& work) {
  const auto arguments = std::make_shared<Arguments>();
  arguments->model = repository_path(shipped_model);
  CLI::App* command = app.add_subcommand("headkv", about);
  command->footer(std::string{explanation} + "\n" + examples);
  command->get_formatter()->column_width(26);
  command->add_option("--kind", arguments->kind, "What is scored, see above")
      ->check(CLI::IsMember({"retrieval", "enhanced", "reasoning"}))
      ->type_name("KIND")
      ->capture_default_str();
  command->add_option("--model", arguments->model, "Hugging Face folder of the model")
      ->type_name("DIR")
      ->capture_default_str();
  CLI::Option* own = command->add_option("--samples", arguments->samples, "Samples of your own, as token ids")
                         ->type_name("FILE");
  // The options for drawing samples have no meaning for samples from a file.
  own->excludes(
      command->add_option("--lengths", arguments->lengths, "Tokens of text, question and answer together")
          ->check(whole_number(1, 1'000'000))
          ->type_name("N...")
          ->default_str(spaced(arguments->lengths)));
  const auto count = [&](const char* name, std::size_t& value, const char* what, std::uint64_t most) {
    own->excludes(command->add_option(name, value, what)
                      ->check(whole_number(1, most))
                      ->type_name("N")
                      ->capture_default_str());
  };
  count("--depths", arguments->depths, "Depths of the fact in texts of each length", 100);
  count("--tries", arguments->tries, "Samples drawn for a depth until one is answered", 1000);
  own->excludes(command->add_option("--seed", arguments->seed, "Other texts, facts and questions")
                    ->check(any_whole_number())
                    ->type_name("N")
                    ->capture_default_str());
  own->excludes(
      command->add_option("--answers", arguments->answers, "exact or key, see above; default: by the model")
          ->check(CLI::IsMember({"exact", "key"}))
          ->type_name("WHAT"));
  command->add_option("--threads", arguments->threads, "Threads; 0: all that OpenMP offers")
      ->check(whole_number(0, most_threads))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--out", arguments->out,
                   "Write the scores there (default: headkv/ and the kind's published name)")
      ->type_name("FILE");
  arguments->context.add_to(*command);
  command->add_flag("--json", arguments->json, "Print JSON: counts, depths and mean scores");
  command->callback([arguments, &work] { work = [arguments] { run(*arguments); }; });
}

}  // namespace kvpolicy::tools
