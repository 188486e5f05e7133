// SPDX-License-Identifier: Apache-2.0
//
// identify_heads shares: which share of its rows each head reads under a bound, and what it loses where rows are
// dropped before the question is known, for `plan search`.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/io/damage_json.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/search_menu.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>

#include <common/asked_question.hpp>
#include <common/context_limit.hpp>
#include <common/files.hpp>
#include <common/json_line.hpp>
#include <common/progress.hpp>
#include <common/retrieval_text.hpp>
#include <common/run_tool.hpp>
#include <common/sequence.hpp>
#include <common/stopwatch.hpp>
#include <common/table.hpp>
#include <common/terminal.hpp>
#include <common/text_model.hpp>
#include <common/texts.hpp>

#include "found_gates.hpp"
#include "head_shares.hpp"
#include "shortened.hpp"
#include "subcommands.hpp"

namespace kvpolicy::tools {
namespace {

using Dense = DenseStorage<bfloat16>;

constexpr const char* shares_footer = R"(
The model reads a text. Then every head gets every setting of a menu beside it: all rows, in 8 to 2 bits; all rows, read
with a bound; windows; and budgets whose rows are ranked without a question (--scorer). Rows are dropped there, and only
then comes a question about the text with its answer, or the text goes on; texts take turns (--later). Measured of each
head and setting, with the queries that the model has under full attention:
  rows read  of a read with a bound, the share of the rows in halves that it reads in full: what the head costs
  lost       the share of a later query's attention that the dropped rows have, of the budget of --budget rows
  damage     how far the head's output is off, squared, as a share of its square: the unit of `plan search`
One reading of a text is enough for all heads and settings, where `identify_heads damage` takes one for each. But a head
is judged by its own output, not by what the model then says: give the plans that come of it to `evaluate`.

With --menu bound only the rows read are measured and written, in a fraction of the time.

Files in --out: rows_read.json and lost.json in HeadKV's format, a sample for each text, with one score for each KV
head; damage.json, for `plan search`. Texts are drawn from the first 30 % of a text (evaluate --split validation).

Examples:
  identify_heads shares --length 1024 --texts 2 --out shares
  plan search --weights DIR --damage shares/damage.json --bytes-read 1/4 --context 4096 plan.json
  plan budgets shares/lost.json --capacity 128
)";

struct SharesArguments {
  std::string model = repository_path(shipped_model);
  std::string out = "shares";
  std::string text = "kjv";
  std::string scorer = "keydiff";
  std::string later = "both";
  std::string menu = "all";
  double epsilon = 0.05;
  std::size_t length = 2048;
  std::size_t texts = 4;
  std::size_t tokens = 48;
  std::size_t budget = 256;
  std::size_t min_rows = 32;
  std::uint64_t seed = 11;
  std::size_t threads = 0;
  ContextLimit context;
  bool json = false;
};

HeadSettings<bfloat16> budget_of(const SharesArguments& a, std::size_t rows, const RotaryConfig& rotary) {
  if (a.scorer == "keynorm") return HeadBudgetCache<Dense, KeyNormScorer>::Config{.budget = rows};
  if (a.scorer == "expected") {
    HeadBudgetCache<Dense, ExpectedAttentionScorer>::Config config{.budget = rows};
    config.scorer.rotary = rotary;
    config.weigh_values = true;
    return config;
  }
  return HeadBudgetCache<Dense, KeyDiffScorer>::Config{.budget = rows};
}

// The menu, of which `lost` is the place of the budget of --budget rows, and `bounded` that of the head read with a
// bound.
struct SharesMenu {
  std::vector<HeadSettings<bfloat16>> settings;
  std::optional<std::size_t> lost;  // none: only reads with a bound are measured
  std::size_t bounded = 0;
};

SharesMenu menu_of(const SharesArguments& a, const reference::LlamaConfig& model) {
  const ModelShape shape = model.shape();
  const SearchMenuConfig config{.min_rows = a.min_rows};
  SharesMenu menu;
  if (a.menu == "bound") {
    menu.settings.push_back(LowBitFormat::of_bounded(shape, 4, config.residual).head<bfloat16>());
    return menu;
  }
  const HeadGates none{shape.layers, shape.kv_heads};
  for (auto& choice : choices_by_importance<bfloat16>(shape, none, a.length, config)) {
    if (!choice.settings.rule(shape.head_dim).compresses) menu.settings.push_back(std::move(choice.settings));
  }
  menu.bounded = menu.settings.size();
  for (const std::size_t value_bits : {4U, 8U}) {
    menu.settings.push_back(LowBitFormat::of_bounded(shape, value_bits, config.residual).head<bfloat16>());
  }
  menu.lost = menu.settings.size();
  menu.settings.push_back(budget_of(a, a.budget, model.rotary));
  for (std::size_t rows = a.min_rows; rows < a.length; rows *= 2) {
    if (rows != a.budget) menu.settings.push_back(budget_of(a, rows, model.rotary));
  }
  return menu;
}

// A text whose rows are dropped, and a question about it with the answer.
SplitText asked(const TextModel& model, const std::string& plain, const SharesArguments& a,
                std::size_t number) {
  const RetrievalText drawn =
      draw_text_in_tokens(model, plain, a.length, {.questions = 1, .seed = a.seed, .number = number});
  const EncodedText encoded{model, drawn};
  SplitText split{encoded.body, encoded.questions.front().question()};
  const std::vector<int>& answer = encoded.questions.front().answer();
  split.later.insert(split.later.end(), answer.begin(), answer.end());
  return split;
}

SplitText continued(const TextModel& model, const std::string& plain, const SharesArguments& a,
                    std::size_t number) {
  std::vector<int> tokens = draw_plain_tokens(model, plain, a.length, {.seed = a.seed, .number = number});
  const auto middle = tokens.end() - static_cast<std::ptrdiff_t>(std::min(a.tokens, tokens.size() - 1));
  return {{tokens.begin(), middle}, {middle, tokens.end()}};
}

std::vector<SplitText> draw_texts(const TextModel& model, const SharesArguments& a) {
  const std::string plain = part_of(text_named(a.text), Split::validation);
  std::vector<SplitText> texts;
  for (std::size_t i = 0; i < a.texts; ++i) {
    const bool ask = a.later == "question" || (a.later == "both" && i % 2 == 0);
    texts.push_back(ask ? asked(model, plain, a, i) : continued(model, plain, a, i));
  }
  return texts;
}

struct SharesFound {
  SharesMenu menu;
  std::vector<SettingShares> shares;
  io::DamageTable<bfloat16> table;
};

// Numbers of files have no digits that are rounding errors of the attention itself.
HeadTable<double> short_mean(const SampledShares& samples) {
  HeadTable<double> means = mean_of(samples);
  for (double& one : means.values()) one = shortened(one);
  return means;
}

SampledShares short_samples(SampledShares samples) {
  for (std::vector<double>& own : samples.values()) {
    for (double& one : own) one = shortened(one);
  }
  return samples;
}

SharesFound find(const SharesArguments& a, const TextModel& model) {
  SharesFound found{.menu = menu_of(a, model.config()), .shares = {}, .table = {}};
  const std::vector<SplitText> texts = draw_texts(model, a);
  const SharesConfig config{.epsilon = static_cast<float>(a.epsilon)};
  const ModelShape shape = model.config().shape();
  Progress progress{!a.json};
  const Stopwatch took;
  found.shares = measure_shares(model, found.menu.settings, texts, config, [&](double share) {
    progress.update(
        share, fmt::format("{} settings of {} heads", found.menu.settings.size(), shape.kv_head_count()));
  });
  progress.note(fmt::format("  measured in {}", duration(took.seconds())));
  found.table = {shape, a.length, {}, a.epsilon};
  for (std::size_t i = 0; i < found.shares.size(); ++i) {
    const SettingShares& own = found.shares[i];
    HeadChoice<bfloat16> choice{found.menu.settings[i], short_mean(own.error)};
    if (!own.rows_read.values().front().empty()) choice.rows_read = short_mean(own.rows_read);
    found.table.choices.push_back(std::move(choice));
  }
  return found;
}

void write(const SharesArguments& a, const SharesFound& found) {
  const std::filesystem::path folder{a.out};
  write_result((folder / "rows_read.json").string(),
               io::format_head_samples(short_samples(found.shares[found.menu.bounded].rows_read)));
  if (!found.menu.lost) return;
  write_result((folder / "damage.json").string(), io::format_damage(found.table));
  write_result((folder / "lost.json").string(),
               io::format_head_samples(short_samples(found.shares[*found.menu.lost].lost)));
}

io::OrderedJson by_layer(const HeadTable<double>& table) {
  io::OrderedJson rows = io::OrderedJson::array();
  for (std::size_t layer = 0; layer < table.layers(); ++layer) {
    const auto row = table.layer(layer);
    rows.push_back(std::vector<double>(row.begin(), row.end()));
  }
  return rows;
}

double mean(const HeadTable<double>& table) {
  double sum = 0;
  for (const double one : table.values()) sum += one;
  return sum / static_cast<double>(table.values().size());
}

void print_json(const SharesArguments& a, const SharesFound& found) {
  const SettingShares& bounded = found.shares[found.menu.bounded];
  io::OrderedJson json = {{"method", "shares"},
                          {"model", model_name(a.model)},
                          {"text", a.text},
                          {"split", "validation"},
                          {"texts", a.texts},
                          {"length", a.length},
                          {"later", a.later},
                          {"seed", a.seed},
                          {"epsilon", a.epsilon},
                          {"rows_read", by_layer(mean_of(bounded.rows_read))},
                          {"unread", by_layer(mean_of(bounded.unread))},
                          {"settings", io::OrderedJson::array()}};
  if (found.menu.lost) {
    json["scorer"] = a.scorer;
    json["budget"] = a.budget;
    json["lost"] = by_layer(mean_of(found.shares[*found.menu.lost].lost));
  }
  for (std::size_t i = 0; i < found.shares.size(); ++i) {
    const SettingShares& own = found.shares[i];
    io::OrderedJson line = {{"setting", describe(found.menu.settings[i])},
                            {"damage", mean(mean_of(own.error))}};
    if (!own.lost.values().front().empty()) line["lost"] = mean(mean_of(own.lost));
    if (!own.rows_read.values().front().empty()) line["rows_read"] = mean(mean_of(own.rows_read));
    json["settings"].push_back(std::move(line));
  }
  fmt::print("{}\n", as_line(json));
}

// "layer 3 head 1".
std::string place(std::size_t head, std::size_t kv_heads) {
  return fmt::format("layer {} head {}", head / kv_heads, head % kv_heads);
}

std::string report(const SharesFound& found, const ModelShape& shape) {
  Table lines;
  lines.add_column("setting of a head", "", Align::left);
  lines.add_column("bytes");
  lines.add_column("rows read");
  lines.add_column("lost", "mean");
  lines.add_column("damage", "mean");
  lines.add_column("greatest");
  lines.add_column("by head", "", Align::left);
  for (std::size_t i = 0; i < found.shares.size(); ++i) {
    const SettingShares& own = found.shares[i];
    const HeadDamage& damage = found.table.choices[i].damage;
    const auto most = std::ranges::max_element(damage.values());
    const bool has_lost = !own.lost.values().front().empty();
    const bool has_read = !own.rows_read.values().front().empty();
    const HeadPlan<bfloat16> one{ModelShape{1, 1, 1, shape.head_dim}, found.menu.settings[i]};
    lines.add_row({describe(found.menu.settings[i]),
                   thousands(one.memory(found.table.context, {}, true).heads),
                   has_read ? percent(mean(mean_of(own.rows_read))) : "",
                   has_lost ? percent(mean(mean_of(own.lost))) : "", fmt::format("{:.4f}", mean(damage)),
                   fmt::format("{:.4f}", *most),
                   place(static_cast<std::size_t>(most - damage.values().begin()), shape.kv_heads)});
  }
  return lines.text(wants_colour(stdout));
}

std::string range(const HeadTable<double>& table) {
  const auto [least, most] = std::ranges::minmax_element(table.values());
  const auto at = [&](auto one) {
    return place(static_cast<std::size_t>(one - table.values().begin()), table.heads());
  };
  return fmt::format("{} to {} ({}, {}), {} on average", percent(*least), percent(*most), at(least), at(most),
                     percent(mean(table)));
}

void run(const SharesArguments& a) {
  set_threads(a.threads);
  require(a.budget < a.length, "identify_heads shares: a budget of ", a.budget, " rows drops none of ",
          a.length, " tokens; give fewer --budget or a longer --length");
  const auto model = TextModel::load(a.model);
  a.context.check(model.config(), a.length);
  const SharesFound found = find(a, model);
  write(a, found);
  if (a.json) return print_json(a, found);
  fmt::print(
      "{} texts of {} tokens\n\n{}\n"
      "rows read  at epsilon {:g}: {} of the rows in halves\n",
      a.texts, thousands(a.length), report(found, model.config().shape()), a.epsilon,
      range(mean_of(found.shares[found.menu.bounded].rows_read)));
  if (found.menu.lost) {
    fmt::print("lost       with {} rows kept ({}): {} of a later query's attention\n", thousands(a.budget),
               a.scorer, range(mean_of(found.shares[*found.menu.lost].lost)));
  }
  fmt::print("\n{} holds {}.\n", a.out,
             found.menu.lost ? "rows_read.json, lost.json and damage.json" : "rows_read.json");
}

}  // namespace

void add_shares(CLI::App& app, std::function<void()>& work) {
  CLI::App* command = app.add_subcommand(
      "shares",
      "What a read with a bound reads of each head, and what dropping rows without the question loses");
  const auto a = std::make_shared<SharesArguments>();
  command->footer(shares_footer);
  command->add_option("--model", a->model, "Hugging Face folder of the model, or a GGUF file")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--out", a->out, "Folder that the files go to")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--text", a->text, "Which text, as in evaluate; its first 30 % are used")
      ->check(CLI::IsMember(std::vector<std::string>(text_names.begin(), text_names.end())))
      ->type_name("TEXT")
      ->capture_default_str();
  command
      ->add_option("--rows-read", a->epsilon,
                   "The bound: the share of a query's attention that may stay unread")
      ->check(number_from(0, 1))
      ->type_name("EPSILON")
      ->capture_default_str();
  command->add_option("--scorer", a->scorer, "What ranks the rows of budgets, without a question")
      ->check(CLI::IsMember({"keydiff", "expected", "keynorm"}))
      ->type_name("WHICH")
      ->capture_default_str();
  command->add_option("--menu", a->menu, "What is measured: all settings, or only what a bound reads")
      ->check(CLI::IsMember({"all", "bound"}))
      ->type_name("WHICH")
      ->capture_default_str();
  command
      ->add_option("--later", a->later,
                   "What comes after rows were dropped: a question, the text, or in turn")
      ->check(CLI::IsMember({"question", "text", "both"}))
      ->type_name("WHAT")
      ->capture_default_str();
  add_count(*command, "--length", a->length, "Tokens of a text, with what comes later", 512, 1'000'000);
  add_count(*command, "--texts", a->texts, "Texts", 1, 10'000);
  add_count(*command, "--tokens", a->tokens, "Tokens with which a text goes on", 1, 256);
  add_count(*command, "--budget", a->budget, "Rows of the budget whose loss goes to lost.json", 1, 1'000'000);
  add_count(*command, "--min-rows", a->min_rows, "Rows of the smallest window and budget", 17, 65'536);
  command->add_option("--seed", a->seed, "Other texts and questions")
      ->check(any_whole_number())
      ->type_name("N")
      ->capture_default_str();
  add_count(*command, "--threads", a->threads, "Threads; 0: all that OpenMP offers", 0, most_threads);
  a->context.add_to(*command);
  command->add_flag("--json", a->json, "Print settings and shares as JSON");
  command->callback([a, &work] { work = [a] { run(*a); }; });
}

}  // namespace kvpolicy::tools
