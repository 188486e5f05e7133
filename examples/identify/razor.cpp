// SPDX-License-Identifier: Apache-2.0
//
// identify_heads razor: RazorAttention's echo and induction scores, from random tokens that repeat.
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

#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/identify/razor_scores.hpp>

#include <common/context_limit.hpp>
#include <common/files.hpp>
#include <common/heat_map.hpp>
#include <common/progress.hpp>
#include <common/random.hpp>
#include <common/run_tool.hpp>
#include <common/sequence.hpp>
#include <common/stopwatch.hpp>
#include <common/terminal.hpp>
#include <common/text_model.hpp>

#include "found_gates.hpp"
#include "shortened.hpp"
#include "subcommands.hpp"

namespace kvpolicy::tools {
namespace {

struct RazorArguments {
  std::string model;
  std::string out = "razor";
  std::size_t tokens = 500;
  std::size_t repetitions = 4;
  std::size_t samples = 4;
  std::size_t sinks = 4;
  std::size_t recent = 256;
  double sparsity = 0.5;
  std::uint64_t seed = 1;
  std::size_t threads = 0;
  ContextLimit context;
  bool json = false;
};

constexpr const char* razor_footer = R"(
Reads random tokens four times over and measures how much each query head attends to earlier
occurrences of the token that it reads (echo) and to the tokens that followed them (induction). No text
and no question is needed, so this suits models that answer none.

Files in --out: echo_heads.json and induction_heads.json, in HeadKV's format with a score for each
sample, for `razor_attention_plan`; full_attention_heads.tsv and config.json, gates in DuoAttention's
format: for each KV head the highest of both scores of its query heads.

Examples:
  identify_heads razor --out razor
  evaluate --plans full duo@razor:0.5 headkv@razor/induction_heads.json:128
)";

struct RazorFound {
  io::HeadSamples echo, induction;
  HeadGates gates;
};

/// The tokens that are not special.
std::vector<int> plain_tokens(const TextModel& model) {
  std::vector<int> all;
  for (std::size_t token = 0; token < model.tokenizer().vocabulary(); ++token) {
    const auto id = static_cast<int>(token);
    if (!model.tokenizer().is_special(id) && !model.is_end(id)) all.push_back(id);
  }
  return all;
}

RazorFound find(const RazorArguments& a, const TextModel& model) {
  const reference::LlamaConfig& c = model.config();
  const std::vector<int> opening = model.encode("");
  const std::vector<int> all = plain_tokens(model);
  a.context.check(c, opening.size() + a.tokens * a.repetitions);
  RazorFound found{
      .echo = {c.layers, c.q_heads}, .induction = {c.layers, c.q_heads}, .gates = {c.layers, c.kv_heads}};
  Progress progress{!a.json};
  const std::size_t group = c.q_heads / c.kv_heads;
  for (std::size_t number = 0; number < a.samples; ++number) {
    progress.update(static_cast<double>(number) / static_cast<double>(a.samples),
                    fmt::format("text {} of {}", number + 1, a.samples));
    std::vector<int> tokens = all;
    Random random{a.seed, a.tokens, number};
    random.shuffle(tokens);
    tokens.resize(a.tokens);
    const auto scores = reference::razor_scores(model.llama(), opening, tokens, a.repetitions);
    for (std::size_t i = 0; i < found.echo.values().size(); ++i) {
      found.echo.values()[i].push_back(shortened(scores.echo.values()[i]));
      found.induction.values()[i].push_back(shortened(scores.induction.values()[i]));
    }
  }
  const auto mean = [](const std::vector<double>& values) {
    double sum = 0.0;
    for (const double value : values) sum += value;
    return sum / static_cast<double>(values.size());
  };
  for (std::size_t i = 0; i < found.echo.values().size(); ++i) {
    double& gate = found.gates.values()[i / group];
    gate = std::max({gate, mean(found.echo.values()[i]), mean(found.induction.values()[i])});
  }
  return found;
}

io::Json settings_of(const RazorArguments& a) {
  return {{"method", "razor"},  {"model", model_name(a.model)}, {"texts", "random tokens"},
          {"tokens", a.tokens}, {"repetitions", a.repetitions}, {"samples", a.samples},
          {"seed", a.seed}};
}

void write(const RazorArguments& a, const RazorFound& found) {
  const std::filesystem::path folder{a.out};
  save_gates(folder, found.gates, a.sinks, a.recent, settings_of(a));
  io::write_text_file(folder / "echo_heads.json", io::format_head_samples(found.echo));
  io::write_text_file(folder / "induction_heads.json", io::format_head_samples(found.induction));
}

void run(RazorArguments a) {
  set_threads(a.threads);
  const auto model = TextModel::load(a.model);
  a.tokens = std::min(a.tokens, plain_tokens(model).size());
  const Stopwatch took;
  const RazorFound found = find(a, model);
  write(a, found);
  if (a.json) return print_gates(settings_of(a), found.gates);
  fmt::print(
      "{} texts of {} tokens, {} times each ({}). Gates; at a sparsity of {} the framed heads "
      "keep the whole text:\n\n{}\n{} holds scores and gates.\n",
      a.samples, a.tokens, a.repetitions, duration(took.seconds()), a.sparsity,
      heat_map(found.gates, head_kinds(found.gates, a.sparsity), wants_colour(stdout)), a.out);
}

}  // namespace

void add_razor(CLI::App& app, std::function<void()>& work) {
  const auto a = std::make_shared<RazorArguments>();
  a->model = repository_path(shipped_model);
  CLI::App* command =
      app.add_subcommand("razor", "Echo and induction scores on random tokens that repeat (RazorAttention)");
  command->footer(razor_footer);
  command->add_option("--model", a->model, "Hugging Face folder of the model, or a GGUF file")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--out", a->out, "Folder that the files go to")
      ->type_name("DIR")
      ->capture_default_str();
  add_count(*command, "--tokens", a->tokens, "Different random tokens of a text; all if there are fewer", 3,
            1'000'000);
  add_count(*command, "--repetitions", a->repetitions, "How often a text has them", 2, 1000);
  add_count(*command, "--samples", a->samples, "Texts", 1, 10'000);
  add_count(*command, "--sinks", a->sinks, "First rows of a streaming head, as config.json says", 0,
            1'000'000);
  add_count(*command, "--recent", a->recent, "Latest rows of a streaming head, as config.json says", 1,
            1'000'000);
  command->add_option("--sparsity", a->sparsity, "Share of streaming heads in the picture")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--seed", a->seed, "Other tokens")
      ->check(any_whole_number())
      ->type_name("N")
      ->capture_default_str();
  add_count(*command, "--threads", a->threads, "Threads; 0: all that OpenMP offers", 0, most_threads);
  a->context.add_to(*command);
  command->add_flag("--json", a->json, "Print settings and gates as JSON");
  command->callback([a, &work] { work = [a] { run(*a); }; });
}

}  // namespace kvpolicy::tools
