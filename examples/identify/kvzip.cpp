// SPDX-License-Identifier: Apache-2.0
//
// identify_heads kvzip: how much a model needs each head's rows to repeat its context, found once for the model, as
// gates of streaming heads and as the share of each head's rows that would be kept.
#include <algorithm>
#include <cmath>
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
#include <kvpolicy/io/text_file.hpp>
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
#include <common/texts.hpp>

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
  double keep = 0.25;
  std::uint64_t seed = 1;
  std::size_t threads = 0;
  ContextLimit context;
  bool json = false;
};

constexpr const char* kvzip_footer = R"(
The model reads a text, is asked to repeat it, and the most attention that this pays a row of each head counts, as in
KVzip (arXiv:2505.23416), but for rows that a streaming head keeps as well: a head whose rows it needs keeps the whole
text, another one may stream. One pass over each text, where optimised gates (identify_heads duo) take hundreds. The
mean over the texts is written as gates in DuoAttention's format, full_attention_heads.tsv and config.json in --out.

kept.json there holds, for each KV head and text, the share of its rows that is kept where one threshold over all heads
keeps a share of --keep of the model's rows. Budgets by it (keydiff@kvzip/kept.json:128,1024) do without reading each
prompt a second time: a head has as many rows as it usually needs, and its keys choose which.

Examples:
  identify_heads kvzip --length 512 --texts 2 --out kvzip
  evaluate --plans full duo@kvzip:0.5 keydiff@kvzip/kept.json --bytes 1/4 --compress text
)";

// What is found of each KV head.
struct KvZipFound {
  HeadGates gates;       // the largest score that a row gets, a mean over the texts
  io::HeadSamples kept;  // of each text, the share of the head's rows that one threshold over all heads keeps
};

std::string plain_text(const KvZipArguments& a) {
  if (a.text.empty()) return identification_text();
  if (std::ranges::count(text_names, a.text) > 0) return part_of(text_named(a.text), Split::validation);
  return io::read_text_file(a.text);
}

KvZipFound find(const KvZipArguments& a, const TextModel& model) {
  using Zip = HeadBudgetCache<DenseStorage<bfloat16>, KvZipScorer>;
  const reference::LlamaConfig& c = model.config();
  reference::RepeatRequest ask = model.repeat_request();
  ask.beyond_context = a.context.beyond;
  const std::string plain = plain_text(a);
  const auto budget =
      std::max<std::size_t>(static_cast<std::size_t>(std::lround(a.keep * static_cast<double>(a.length))), 1);
  const HeadPlan<bfloat16> plan{c.shape(),
                                Zip::Config{.budget = budget, .adaptive_in_model = true, .safeguard = 0}};
  a.context.check(
      c, a.length + ask.further.size() + ask.overlap + std::min(a.length, reference::least_repeated));
  KvZipFound found{HeadGates{c.layers, c.kv_heads}, io::HeadSamples{c.layers, c.kv_heads}};
  Progress progress{!a.json};
  for (std::size_t number = 0; number < a.texts; ++number) {
    progress.update(static_cast<double>(number) / static_cast<double>(a.texts),
                    fmt::format("text {} of {}", number + 1, a.texts));
    const std::vector<int> tokens =
        draw_plain_tokens(model, plain, a.length, {.seed = a.seed, .number = number});
    const auto sequence = make_sequence(model.llama(), plan);
    static_cast<void>(sequence->prefill(tokens));
    const std::vector<std::size_t> all = sequence->head_bytes();
    sequence->score_rows(tokens, ask);
    const std::vector<double> largest = sequence->largest_scores(a.sinks, a.recent);
    for (std::size_t i = 0; i < largest.size(); ++i) {
      found.gates.values()[i] += largest[i] / static_cast<double>(a.texts);
    }
    sequence->compress();
    const std::vector<std::size_t> kept = sequence->head_bytes();
    for (std::size_t i = 0; i < kept.size(); ++i) {
      found.kept.values()[i].push_back(static_cast<double>(kept[i]) / static_cast<double>(all[i]));
    }
  }
  return found;
}

io::Json settings_of(const KvZipArguments& a) {
  return {{"method", "kvzip"}, {"model", model_name(a.model)},
          {"texts", a.texts},  {"length", a.length},
          {"keep", a.keep},    {"seed", a.seed}};
}

void run(const KvZipArguments& a) {
  set_threads(a.threads);
  require(a.length > a.sinks + a.recent, "identify_heads kvzip: texts of ", a.length,
          " tokens have no row beyond the ", a.sinks, " first and ", a.recent,
          " latest, which a streaming head keeps as well; take longer texts");
  const auto model = TextModel::load(a.model);
  const Stopwatch took;
  const auto [gates, kept] = find(a, model);
  save_gates(a.out, gates, a.sinks, a.recent, settings_of(a));
  const std::filesystem::path kept_file = std::filesystem::path{a.out} / "kept.json";
  io::write_text_file(kept_file, io::format_head_samples(kept));
  if (a.json) return print_gates(settings_of(a), gates);
  fmt::print(
      "{} texts of {} tokens ({}). Gates; at a sparsity of {} the framed heads keep the whole "
      "text:\n\n{}\n{} holds the gates, and kept.json there what heads keep of {} of all rows.\n",
      a.texts, a.length, duration(took.seconds()), a.sparsity,
      heat_map(gates, head_kinds(gates, a.sparsity), wants_colour(stdout)), a.out, percent(a.keep));
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
  command
      ->add_option(
          "--text", a->text,
          "Which text, as in evaluate, of which the first 30 % are used, or a text file; default: kjv")
      ->type_name("TEXT");
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
  command->add_option("--keep", a->keep, "Share of all rows that kept.json divides among heads")
      ->check(number_from(1e-6, 1))
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
