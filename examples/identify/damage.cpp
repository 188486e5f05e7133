// SPDX-License-Identifier: Apache-2.0
//
// identify_heads damage: measures every policy of a menu on every head by itself, for `plan
// search`.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/io/damage_json.hpp>
#include <kvpolicy/plan/search_menu.hpp>

#include <common/asked_question.hpp>
#include <common/context_limit.hpp>
#include <common/files.hpp>
#include <common/progress.hpp>
#include <common/retrieval_text.hpp>
#include <common/run_tool.hpp>
#include <common/sequence.hpp>
#include <common/stopwatch.hpp>
#include <common/table.hpp>
#include <common/terminal.hpp>
#include <common/text_model.hpp>

#include "head_damage.hpp"
#include "subcommands.hpp"

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;
using Damages = io::DamageTable<bfloat16>;

constexpr const char* damage_footer = R"(
Every head is given every setting of a menu (all rows, with keys in 8 to 2 bits and values in 8 to 2, below 8 with keys
per channel and most of them rotated; budgets of 32, 64, ... rows, exact and in 4 bits), once while the other heads keep
everything and once while they have the same setting. Damage is the increase of the loss of an answer plus that of a
token of the text's end, in nats. It is the mean of the two cases, because heads that can replace one another seem
expendable in the first. A text is read once and forked under each setting, so the whole table takes some minutes. Windows are
not in the menu, because they change the reading of the text itself.

Examples:
  identify_heads damage --out damage.json
  identify_heads damage --menu bits --by divergence --questions 0 --out bits.json   bits for each head, no row dropped
  plan search --weights DIR --damage damage.json --bytes 1/16 --context 4096 plan.json
  evaluate --plans plan.json                           what the plan is worth
)";

struct DamageArguments {
  std::string model = repository_path(shipped_model);
  std::string out = "damage.json";
  std::size_t length = 4096;
  std::size_t texts = 4;
  std::size_t questions = 6;
  std::size_t min_rows = 32;
  std::size_t window = 8;
  std::size_t kernel = SnapKvScorer::Config{}.kernel;
  std::uint64_t seed = 11;
  std::size_t threads = 0;
  std::string by = "surprise";
  std::string menu = "all";
  ContextLimit context;
  bool json = false;
};

std::vector<RetrievalText> draw_texts(const TextModel& model, const DamageArguments& a) {
  std::vector<RetrievalText> texts;
  for (std::size_t i = 0; i < a.texts; ++i) {
    texts.push_back(draw_text_in_tokens(model, identification_text(), a.length,
                                        {.questions = a.questions, .seed = a.seed, .number = i}));
  }
  return texts;
}

std::vector<HeadSettings<bfloat16>> menu_of(const DamageArguments& a, const ModelShape& shape) {
  const SearchMenuConfig config{.min_rows = a.min_rows,
                                .scorer = {.observation_window = a.window, .kernel = a.kernel}};
  const HeadGates none{shape.layers, shape.kv_heads};
  std::vector<HeadSettings<bfloat16>> menu;
  for (auto& choice : choices_by_importance<bfloat16>(shape, none, a.length, config)) {
    const HeadRule rule = choice.settings.rule(shape.head_dim);
    if (rule.recent > 0 || (a.menu == "bits" && !rule.keeps_every_row())) continue;
    menu.push_back(std::move(choice.settings));
  }
  return menu;
}

std::string report(const Damages& table) {
  Table lines;
  lines.add_column("setting of one head", "", Align::left);
  lines.add_column("bytes");
  lines.add_column("least damage");
  lines.add_column("greatest");
  lines.add_column("by head", "", Align::left);
  for (const HeadChoice<bfloat16>& choice : table.choices) {
    const auto [least, most] = std::ranges::minmax_element(choice.damage.values());
    const auto worst = static_cast<std::size_t>(most - choice.damage.values().begin());
    const Plan one{ModelShape{1, 1, 1, table.shape.head_dim}, choice.settings};
    lines.add_row(
        {describe(choice.settings), thousands(one.memory(table.context, {}, true).heads),
         fmt::format("{:.4f}", *least), fmt::format("{:.4f}", *most),
         fmt::format("layer {} head {}", worst / table.shape.kv_heads, worst % table.shape.kv_heads)});
  }
  return lines.text(wants_colour(stdout));
}

void run(const DamageArguments& a) {
  set_threads(a.threads);
  const auto model = TextModel::load(a.model);
  a.context.check(model.config(), a.length);
  const ModelShape shape = model.config().shape();
  const auto menu = menu_of(a, shape);
  const auto texts = draw_texts(model, a);
  Progress progress;
  const Stopwatch took;
  Damages table{shape, a.length, {}};
  const auto report_share = [&](double share) {
    progress.update(share, fmt::format("{} settings of {} heads", menu.size(), shape.kv_head_count()));
  };
  table.choices = measure_damage(model, menu, texts, report_share,
                                 {.by = a.by == "divergence" ? DamageBy::divergence : DamageBy::surprise});
  progress.note(fmt::format("  measured in {}", duration(took.seconds())));
  const std::string text = io::format_damage(table);
  write_result(a.out, text);
  if (a.json) {
    fmt::print("{}", text);
    return;
  }
  fmt::print("{} texts of {} tokens, {} questions each\n\n{}\nwrote {}\n", texts.size(), thousands(a.length),
             texts.front().questions.size(), report(table), a.out);
}

}  // namespace

void add_damage(CLI::App& app, std::function<void()>& work) {
  CLI::App* command =
      app.add_subcommand("damage", "Measures what each head loses under each policy, for plan search");
  const auto a = std::make_shared<DamageArguments>();
  command->add_option("--model", a->model, "Hugging Face folder of the model")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--out", a->out, "Where the table goes")->type_name("FILE")->capture_default_str();
  add_count(*command, "--length", a->length, "Tokens of text, question and answer together", 512, 1'000'000);
  add_count(*command, "--texts", a->texts, "Texts", 1, 10'000);
  add_count(*command, "--questions", a->questions,
            "Questions on each text, at most; 0: only the text's end counts", 0, 32);
  command
      ->add_option(
          "--by", a->by,
          "surprise: what a token costs, on which answers depend; divergence: how far a prediction is from "
          "the full cache's, which also shows what little 4 bits change")
      ->check(CLI::IsMember({"surprise", "divergence"}))
      ->type_name("WHAT")
      ->capture_default_str();
  command
      ->add_option("--menu", a->menu, "all; or bits: settings that keep every row, for plans that lose none")
      ->check(CLI::IsMember({"all", "bits"}))
      ->type_name("WHICH")
      ->capture_default_str();
  add_count(*command, "--min-rows", a->min_rows, "Rows of the smallest budget", 17, 65'536);
  add_count(*command, "--window", a->window, "Latest queries by which budgets choose", 1, 1024);
  add_count(*command, "--kernel", a->kernel, "Rows that they pool, odd", 1, 1023);
  command->add_option("--seed", a->seed, "Other texts and questions")
      ->check(any_whole_number())
      ->type_name("N")
      ->capture_default_str();
  add_count(*command, "--threads", a->threads, "Threads; 0: all that OpenMP offers", 0, most_threads);
  a->context.add_to(*command);
  command->add_flag("--json", a->json, "Print the table as JSON");
  command->footer(damage_footer);
  command->callback([a, &work] { work = [a] { run(*a); }; });
}

}  // namespace kvpolicy::tools
