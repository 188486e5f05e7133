// SPDX-License-Identifier: Apache-2.0
//
// identify_heads kvzip: how much a model needs each head's rows to repeat its context, found once for the model, as
// gates of streaming heads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>
#include <reference_model/scoring_pass.hpp>

#include <common/asked_question.hpp>
#include <common/context_limit.hpp>
#include <common/files.hpp>
#include <common/heat_map.hpp>
#include <common/progress.hpp>
#include <common/retrieval_text.hpp>
#include <common/run_tool.hpp>
#include <common/sequence.hpp>
#include <common/stopwatch.hpp>
#include <common/terminal.hpp>
#include <common/text_model.hpp>

#include "found_gates.hpp"
#include "subcommands.hpp"

namespace kvpolicy::tools {
namespace {

struct KvZipArguments {
  std::string model;
  std::string text;
  std::string out = "kvzip";
  std::size_t length = 1024;
  std::size_t texts = 4;
  std::size_t sinks = 16;
  std::size_t recent = 64;
  double sparsity = 0.5;
  std::uint64_t seed = 1;
  std::size_t threads = 0;
  ContextLimit context;
  bool json = false;
};

constexpr const char* kvzip_footer = R"(
The model reads a text, is asked to repeat it, and the most attention that this pays a row of each head counts, as in
KVzip (arXiv:2505.23416), but for rows that a streaming head keeps as well: a head whose rows it needs keeps the whole
text, another one may stream. One pass over
each text, where optimised gates (identify_heads duo) take hundreds. The mean over the texts is written as gates in
DuoAttention's format, full_attention_heads.tsv and config.json in --out.

Examples:
  identify_heads kvzip --length 512 --texts 2 --out kvzip
  evaluate --plans full duo@kvzip:0.5
)";

// Of each KV head the largest score that a row gets, a mean over the texts.
HeadGates find(const KvZipArguments& a, const TextModel& model) {
  using Zip = HeadBudgetCache<DenseStorage<bfloat16>, KvZipScorer>;
  constexpr std::size_t every_row = std::size_t{1} << 40;
  const reference::LlamaConfig& c = model.config();
  reference::RepeatRequest ask = model.repeat_request();
  ask.beyond_context = a.context.beyond;
  const std::string plain = a.text.empty() ? identification_text() : io::read_text_file(a.text);
  a.context.check(
      c, a.length + ask.further.size() + ask.overlap + std::min(a.length, reference::least_repeated));
  HeadGates gates{c.layers, c.kv_heads};
  Progress progress{!a.json};
  for (std::size_t number = 0; number < a.texts; ++number) {
    progress.update(static_cast<double>(number) / static_cast<double>(a.texts),
                    fmt::format("text {} of {}", number + 1, a.texts));
    const std::vector<int> tokens =
        draw_plain_tokens(model, plain, a.length, {.seed = a.seed, .number = number});
    const auto sequence =
        make_sequence(model.llama(), HeadPlan<bfloat16>{c.shape(), Zip::Config{.budget = every_row}});
    static_cast<void>(sequence->prefill(tokens));
    sequence->score_rows(tokens, ask);
    const std::vector<double> largest = sequence->largest_scores(a.sinks, a.recent);
    for (std::size_t i = 0; i < largest.size(); ++i) {
      gates.values()[i] += largest[i] / static_cast<double>(a.texts);
    }
  }
  return gates;
}

io::Json settings_of(const KvZipArguments& a) {
  return {{"method", "kvzip"},
          {"model", model_name(a.model)},
          {"texts", a.texts},
          {"length", a.length},
          {"seed", a.seed}};
}

void run(const KvZipArguments& a) {
  set_threads(a.threads);
  require(a.length > a.sinks + a.recent, "identify_heads kvzip: texts of ", a.length,
          " tokens have no row beyond the ", a.sinks, " first and ", a.recent,
          " latest, which a streaming head keeps as well; take longer texts");
  const auto model = TextModel::load(a.model);
  const Stopwatch took;
  const HeadGates gates = find(a, model);
  save_gates(a.out, gates, a.sinks, a.recent, settings_of(a));
  if (a.json) return print_gates(settings_of(a), gates);
  fmt::print(
      "{} texts of {} tokens ({}). Gates; at a sparsity of {} the framed heads keep the whole "
      "text:\n\n{}\n{} holds the gates.\n",
      a.texts, a.length, duration(took.seconds()), a.sparsity,
      heat_map(gates, head_kinds(gates, a.sparsity), wants_colour(stdout)), a.out);
}

}  // namespace

void add_kvzip(CLI::App& app, std::function<void()>& work) {
  const auto a = std::make_shared<KvZipArguments>();
  a->model = repository_path(shipped_model);
  CLI::App* command =
      app.add_subcommand("kvzip", "What repeating a text takes of each head, as gates (KVzip)");
  command->footer(kvzip_footer);
  command->add_option("--model", a->model, "Hugging Face folder of the model, or a GGUF file")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--text", a->text, "Text file to draw from; default: the King James text's first part")
      ->type_name("FILE");
  command->add_option("--out", a->out, "Folder that the files go to")
      ->type_name("DIR")
      ->capture_default_str();
  add_count(*command, "--length", a->length, "Tokens of a text", 16, 10'000'000);
  add_count(*command, "--texts", a->texts, "Texts", 1, 10'000);
  add_count(*command, "--sinks", a->sinks, "First rows of a streaming head, as config.json says", 0,
            1'000'000);
  add_count(*command, "--recent", a->recent, "Latest rows of a streaming head, as config.json says", 1,
            1'000'000);
  command->add_option("--sparsity", a->sparsity, "Share of streaming heads in the picture")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--seed", a->seed, "Other texts")
      ->check(any_whole_number())
      ->type_name("N")
      ->capture_default_str();
  add_count(*command, "--threads", a->threads, "Threads; 0: all that OpenMP offers", 0, most_threads);
  a->context.add_to(*command);
  command->add_flag("--json", a->json, "Print settings and gates as JSON");
  command->callback([a, &work] { work = [a] { run(*a); }; });
}

}  // namespace kvpolicy::tools
