// SPDX-License-Identifier: Apache-2.0
//
// Shows plans, computes their memory for a model, and converts published patterns and scores to
// plan files and back. No weights are loaded, because a plan and a shape determine what a cache
// will cost.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <kvpolicy/format.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/plan_json.hpp>

#include "common/error_text.hpp"
#include "common/json_line.hpp"
#include "common/model_sizes.hpp"
#include "common/pattern_folder.hpp"
#include "common/plan_name.hpp"
#include "common/run_tool.hpp"
#include "common/say.hpp"
#include "common/table.hpp"
#include "common/terminal.hpp"
#include "generate/plan_conversion.hpp"
#include "generate/plan_searched.hpp"
#include "generate/plan_shards.hpp"
#include "generate/plan_view.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;
namespace fs = std::filesystem;
using Plan = HeadPlan<bfloat16>;
using io::OrderedJson;

struct Arguments {
  PlanArguments plan;
  std::string shape;
  std::string weights;
  std::string dtype = "bf16";
  std::size_t context = 131072;
  std::string memory = "80GB";
  std::size_t page_rows = 64;
  SearchArguments search;
  bool published = false;
  ShardArguments shards;
  std::string output;
  bool json = false;

  [[nodiscard]] CacheOptions options() const { return {.page_rows = page_rows}; }
};

constexpr const char* examples = R"(Examples:
  # which heads of a published DuoAttention pattern keep the whole text, at half of them
  plan show attn_patterns/Llama-3-8B-Instruct-Gradient-1048k --sparsity 0.5

  # how many rows HeadKV gives each head of a model with 8 KV heads
  plan budgets Meta-Llama-3-8B-Instruct_retrieval_heads.json --kv-heads 8 --capacity 128

  # what a cache takes at 128 Ki tokens, policy by policy, and how many tokens fit into 40 GB; layers
  # with windows or without a cache are counted as such
  plan memory --shape llama-3-8b --plan int4 --context 131072
  plan max-context --memory 40GB --shape llama-3-8b --plan sink_recent:128,256
  plan memory --shape gpt-oss-20b --plan full

  # the plan with the least damage in an eighth of the bytes, over all policies and precisions
  plan search --weights reference_model/weights/keyfinder --context 4096 --bytes 1/8 plan.json

  # the same for what a step of decoding reads, by what `identify_heads shares` measured
  plan search --weights DIR --damage shares/damage.json --context 4096 --bytes-read 1/4 plan.json

  # which rank of eight holds which heads, so that all take equally long
  plan shards --ranks 8 --shape llama-3-8b --plan duo@PATTERN_FOLDER:0.5 --context 131072
  plan shards --ranks 8 --shape llama-3-8b --plan duo+int4@PATTERN_FOLDER:0.5 --costs COSTS.json

  # a published pattern as a plan file, and back
  plan convert PATTERN_FOLDER duo.json --shape llama-3-8b --sparsity 0.5
  plan convert duo.json NEW_FOLDER

'plan COMMAND --help' says more about each.)";

// ---- where a plan and its shape come from

// The shape that a file implies. What the file leaves open (head_dim, say) does not show in a
// picture.
std::optional<ModelShape> implied_shape(const std::string& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  if (is_pattern_path(path)) {
    const HeadGates gates = io::load_duo_pattern(pattern_folder(path)).gates;
    return ModelShape{gates.layers(), gates.heads(), gates.heads(), 128};
  }
  const std::string text = io::read_text_file(path);
  const io::Json json = io::parse_json(text, path);
  if (json.is_object() && json.contains("format")) return io::parse_plan<bfloat16>(text, path).shape();
  const HeadScores scores = io::parse_head_scores(text, path);
  return ModelShape{scores.layers(), scores.heads(), scores.heads(), 128};
}

bool is_plan_file(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored) || is_pattern_path(path)) return false;
  const io::Json json = io::parse_json(io::read_text_file(path), path);
  return json.is_object() && json.contains("format");
}

ModelShape shape_of(const Arguments& a) {
  require_plan_source(a.plan.plan);
  if (!a.shape.empty()) return parse_shape(a.shape);
  if (is_plan_file(a.plan.plan)) return *implied_shape(a.plan.plan);
  require(!a.weights.empty(),
          "--shape is needed: a model's name, layers,q_heads,kv_heads,head_dim "
          "or a model folder; only a plan file has one of its own. Known:\n",
          known_shapes());
  return parse_shape(a.weights);
}

Plan plan_of(const Arguments& a, OrderedJson* settings = nullptr) {
  return make_plan<bfloat16>(a.plan, shape_of(a), a.weights, settings);
}

// ---- show

void show(const Arguments& a) {
  Arguments own = a;
  std::string note;
  if (own.shape.empty() && own.weights.empty()) {
    if (const auto implied = implied_shape(own.plan.plan)) {
      if (!is_plan_file(own.plan.plan)) {
        own.shape = fmt::format("{},{},{},{}", implied->layers, implied->q_heads, implied->kv_heads,
                                implied->head_dim);
        note = is_pattern_path(own.plan.plan)
                   ? "a pattern has no query heads, for which its KV heads are taken; --shape says otherwise"
                   : "each query head is taken for a KV head; --shape says otherwise";
      }
    }
  }
  OrderedJson settings;
  const Plan plan = plan_of(own, &settings);
  const ModelShape& shape = plan.shape();
  const std::string text = io::format_plan(plan);
  if (a.json) {
    fmt::print("{}", text);
    if (!note.empty()) say("note: " + note);
    return;
  }
  const std::string heads =
      shape.per_layer.empty()
          ? fmt::format("{} layers, {} KV heads each", shape.layers, shape.kv_heads)
          : fmt::format("{} layers, {} KV heads in all", shape.layers, shape.kv_head_count());
  fmt::print("{}: {}\n\n{}", own.plan.plan, heads, plan_map(plan, wants_colour(stdout)));
  if (!settings.empty()) fmt::print("\nsettings: {}\n", shown_settings(settings));
  if (!note.empty()) fmt::print("\nnote: {}\n", note);
  const std::string tie = tie_text(settings);
  if (!tie.empty()) fmt::print("\nnote: {}\n", tie);
}

// ---- budgets

void budgets(const Arguments& a, std::size_t kv_heads) {
  const HeadScores scores = io::load_head_scores(a.plan.plan);
  const HeadKvBudgetConfig config = a.plan.headkv.budgets();
  if (!a.shape.empty()) {
    kv_heads = same_heads(parse_shape(a.shape), "plan budgets").kv_heads;
  }
  const HeadBudgets made = named_by(a.plan.plan, [&] {
    return a.published ? published_headkv_budgets(scores, config)
                       : headkv_budgets(scores, kv_heads == 0 ? scores.heads() : kv_heads, config);
  });
  std::size_t sum = 0;
  for (const std::size_t budget : made.values()) sum += budget;
  const auto [least, most] = std::ranges::minmax(made.values());
  if (a.json) {
    OrderedJson json = {{"capacity", config.capacity},
                        {"window", config.observation_window},
                        {"beta", config.beta},
                        {"published", a.published},
                        {"sum", sum},
                        {"min", least},
                        {"max", most},
                        {"budgets", OrderedJson::array()}};
    for (std::size_t layer = 0; layer < made.layers(); ++layer) {
      const auto row = made.layer(layer);
      json["budgets"].push_back(std::vector<std::size_t>(row.begin(), row.end()));
    }
    fmt::print("{}\n", as_line(json));
    return;
  }
  const std::size_t width = std::max<std::size_t>(thousands(most).size(), 2);
  for (std::size_t layer = 0; layer < made.layers(); ++layer) {
    fmt::print("  layer{:>4} ", layer);
    for (const std::size_t budget : made.layer(layer)) fmt::print(" {:>{}}", thousands(budget), width);
    fmt::print("\n");
  }
  fmt::print("\n  {} rows for {} {} heads besides the window of {}: {} to {}, {:.2f} on average\n",
             thousands(sum), thousands(made.values().size()), a.published ? "query" : "KV",
             config.observation_window, thousands(least), thousands(most),
             static_cast<double>(sum) / static_cast<double>(made.values().size()));
}

// ---- memory, max-context

// Calls f(plan, full): the plan in the element type asked for, and one that keeps every row.
template <class F>
void with_dtype(const Arguments& a, OrderedJson& settings, F f) {
  const Plan plan = plan_of(a, &settings);
  if (a.dtype == "f32") {
    // A plan file does not name the element type, so writing and parsing converts the plan.
    return f(io::parse_plan<float>(io::format_plan(plan)), HeadPlan<float>{plan.shape()});
  }
  f(plan, Plan{plan.shape()});
}

void memory(const Arguments& a) {
  OrderedJson settings;
  with_dtype(a, settings, [&]<class P>(const P& plan, const P& full) {
    const auto shares = policy_shares(plan, a.context, a.options());
    const MemoryEstimate estimate = plan.memory(a.context, a.options(), true);
    const std::size_t before = plan.memory(a.context, a.options()).total();
    const std::size_t total = estimate.total();
    const std::size_t whole = full.memory(a.context, a.options()).total();
    const double smaller = static_cast<double>(whole) / static_cast<double>(total);
    const UnusedBudgets unused = unused_budgets(plan, a.context);
    const std::string note = latent_note(plan.shape());
    if (a.json) {
      OrderedJson json = {{"plan", a.plan.plan},
                          {"settings", settings},
                          {"context", a.context},
                          {"dtype", a.dtype},
                          {"bytes", total},
                          {"bytes_before_compress", before},
                          {"bytes_full", whole},
                          {"times_smaller", smaller},
                          {"tail", estimate.tail},
                          {"queries", estimate.queries},
                          {"unused_budget_rows", unused.rows},
                          {"policies", OrderedJson::array()}};
      for (const auto& share : shares) {
        json["policies"].push_back({{"policy", share.name}, {"heads", share.heads}, {"bytes", share.bytes}});
      }
      if (!note.empty()) json["note"] = note;
      fmt::print("{}\n", as_line(json));
      return;
    }
    Table table;
    table.add_column("what", "", Align::left);
    table.add_column("heads");
    table.add_column("bytes");
    table.add_column("per head");
    const auto text = [](std::size_t bytes) { return fmt::format("{}", Bytes{bytes}); };
    for (const auto& share : shares) {
      table.add_row({share.name, thousands(share.heads), text(share.bytes), text(share.bytes / share.heads)});
    }
    if (estimate.queries > 0) table.add_row({"queries kept", "", text(estimate.queries), ""});
    table.add_row({"tail", "", text(estimate.tail), ""});
    table.add_row({"all", thousands(plan.shape().kv_head_count()), text(total), ""});
    fmt::print("{} at {} tokens, {}\n\n{}\n", a.plan.plan, thousands(a.context), a.dtype,
               table.text(wants_colour(stdout)));
    fmt::print("a full cache takes {}: {:.2f}x smaller\n", Bytes{whole}, smaller);
    if (before != total) {
      fmt::print("before its heads are compressed this one takes {}\n", Bytes{before});
    }
    if (unused.heads > 0) fmt::print("{}\n", shown_unused(unused, a.context));
    if (!note.empty()) fmt::print("{}\n", note);
    if (!settings.empty()) fmt::print("settings: {}\n", shown_settings(settings));
  });
}

void max_context(const Arguments& a) {
  const std::size_t bytes = parse_bytes(a.memory);
  OrderedJson settings;
  with_dtype(a, settings, [&]<class P>(const P& plan, const P& full) {
    const auto own = plan.max_context(bytes, a.options());
    const auto whole = full.max_context(bytes, a.options());
    constexpr std::size_t endless = std::size_t{1} << 38;
    const bool unlimited = own.value_or(0) >= endless;
    const std::string note = latent_note(plan.shape());
    if (a.json) {
      OrderedJson json = {
          {"plan", a.plan.plan}, {"settings", settings}, {"memory", bytes}, {"dtype", a.dtype}};
      json["tokens"] = unlimited ? OrderedJson{} : OrderedJson(own.value_or(0));
      json["unlimited"] = unlimited;
      json["tokens_full"] = whole.value_or(0);
      if (!note.empty()) json["note"] = note;
      fmt::print("{}\n", as_line(json));
      return;
    }
    const std::string tokens =
        unlimited ? "text of any length" : fmt::format("{} tokens", thousands(own.value_or(0)));
    fmt::print("{} fits {} into {}; a full cache {} tokens", a.plan.plan, tokens, Bytes{bytes},
               thousands(whole.value_or(0)));
    if (own && whole && !unlimited) {
      fmt::print(": {:.2f}x", static_cast<double>(*own) / static_cast<double>(*whole));
    }
    fmt::print("\n");
    if (needs_of(plan).compress) {
      fmt::print("heads with a budget count as compressed: the prompt itself needs more\n");
    }
    if (!note.empty()) fmt::print("{}\n", note);
  });
}

// ---- search

void search(const Arguments& a) {
  const SearchedPlan found{a.search, a.context, a.options()};
  if (a.json) {
    fmt::print("{}\n", as_line(found.json()));
    return;
  }
  fmt::print("{}", found.text(wants_colour(stdout)));
}

// ---- shards

void shards(const Arguments& a) {
  OrderedJson settings;
  const Plan plan = plan_of(a, &settings);
  const PlanShards found{plan, a.context, a.options(), a.shards};
  if (a.json) {
    OrderedJson json = {{"plan", a.plan.plan}, {"settings", settings}};
    json.update(found.json());
    fmt::print("{}\n", as_line(json));
    return;
  }
  fmt::print("{} {}", a.plan.plan, found.text(wants_colour(stdout)));
}

// ---- convert

void convert(const Arguments& a) {
  const fs::path output{a.output};
  if (!is_plan_file(a.plan.plan)) {
    io::save_plan(output, plan_of(a));
    fmt::print("wrote the plan {}\n", a.output);
    return;
  }
  const Plan plan = plan_of(a);
  if (output.extension() != ".json") {
    const io::DuoPattern pattern = pattern_of(plan);
    io::save_duo_pattern(output, pattern);
    const double kept = static_cast<double>(std::ranges::count(pattern.gates.values(), 1.0)) /
                        static_cast<double>(pattern.gates.values().size());
    fmt::print("wrote the pattern {}; read it with --sparsity {}\n", a.output, 1.0 - kept);
    return;
  }
  HeadKvConfig config;
  io::save_head_scores(output, scores_of(plan, config));
  fmt::print("wrote the head scores {}; read them with --capacity {} --window {} --beta 1\n", a.output,
             config.capacity, config.observation_window);
}

// ---- the command line

// Longer than any text, and small enough that byte counts do not overflow.
constexpr std::uint64_t most_tokens = std::uint64_t{1} << 40;

// A page size that CacheOptions accepts.
CLI::Validator page_size() {
  return CLI::IsMember({16, 32, 64, 128, 256, 512, 1024, 2048, 4096}).description("");
}

void add_shape(CLI::App& app, Arguments& a) {
  app.add_option("--shape", a.shape,
                 "The model: a known name, layers,q_heads,kv_heads,head_dim, or "
                 "its folder")
      ->type_name("SHAPE");
  app.add_option("--weights", a.weights,
                 "Model folder with the gates and scores that names such as "
                 "duo:0.5 need (and the shape, without --shape)")
      ->type_name("DIR");
}

void add_source(CLI::App& app, Arguments& a) {
  app.add_option("PLAN", a.plan.plan, "What --plan takes: a name, file or folder")->required();
}

CLI::App* add_command(CLI::App& app, const char* name, const char* about, Arguments& a) {
  CLI::App* command = app.add_subcommand(name, about);
  command->add_flag("--json", a.json, "Print JSON");
  return command;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments a;
  std::size_t kv_heads = 0;
  CLI::App app{"Shows, sizes and converts plans: what each KV head of a model keeps.", "plan"};
  app.footer(examples);
  app.require_subcommand(1);
  const std::string forms = fmt::format("A plan is one of\n{}", plan_help());
  const std::string models = fmt::format("{}\nKnown shapes\n{}", forms, known_shapes());

  CLI::App* show_command = add_command(app, "show", "Draws which head keeps what", a);
  add_source(*show_command, a);
  add_shape(*show_command, a);
  add_plan_options(*show_command, a.plan);
  show_command->remove_option(show_command->get_option("--plan"));
  show_command->footer(forms);

  CLI::App* budgets_command = add_command(app, "budgets", "Rows per head from HeadKV head scores", a);
  budgets_command->add_option("SCORES", a.plan.plan, "Head scores, as HeadKV publishes them")
      ->required()
      ->type_name("FILE");
  budgets_command
      ->add_option("--capacity", a.plan.headkv.capacity, "Rows per head on average, window included")
      ->check(whole_number(1, most_tokens))
      ->capture_default_str();
  budgets_command->add_option("--window", a.plan.headkv.observation_window, "Latest rows, always kept")
      ->check(whole_number(0, most_tokens))
      ->capture_default_str();
  budgets_command->add_option("--beta", a.plan.headkv.beta, "1 / beta of the rows go by score")
      ->check(number_from(1, 1e9))
      ->capture_default_str();
  budgets_command
      ->add_option("--score-power", a.plan.headkv.score_power,
                   "KV heads' scores, the means of their query heads', are raised to this power")
      ->check(number_from(0, 100))
      ->capture_default_str();
  auto* kv_option =
      budgets_command
          ->add_option("--kv-heads", kv_heads, "KV heads of a layer (default: as many as query heads)")
          ->check(whole_number(1, 1 << 20));
  auto* shape_option = budgets_command->add_option("--shape", a.shape, "Or the model, by name")
                           ->type_name("SHAPE")
                           ->excludes(kv_option);
  budgets_command
      ->add_flag("--published", a.published,
                 "The published integers, per query head, which sum to nearly the same")
      ->excludes(kv_option)
      ->excludes(shape_option);

  CLI::App* memory_command = add_command(app, "memory", "Bytes of a cache, policy by policy", a);
  CLI::App* context_command = add_command(app, "max-context", "The longest text that fits into memory", a);
  for (CLI::App* command : {memory_command, context_command}) {
    add_shape(*command, a);
    add_plan_options(*command, a.plan);
    command->add_option("--dtype", a.dtype, "Element type of exact rows")
        ->check(CLI::IsMember({"bf16", "f16", "f32"}))
        ->capture_default_str();
    command->add_option("--page-rows", a.page_rows, "Rows of a page")
        ->check(page_size())
        ->capture_default_str();
    command->footer(models);
  }
  const auto add_context = [&](CLI::App& command) {
    command.add_option("--context", a.context, "Tokens in the cache")
        ->check(whole_number(1, most_tokens))
        ->capture_default_str();
  };
  add_context(*memory_command);
  context_command->add_option("--memory", a.memory, "Memory for the cache: 80GB, 24GiB, …")
      ->capture_default_str();

  CLI::App* search_command =
      add_command(app, "search", "The plan with the least damage within bytes held, bytes read, or both", a);
  a.search.add_to(*search_command);
  add_context(*search_command);

  CLI::App* shards_command =
      add_command(app, "shards", "Which rank holds which heads, so that none waits for another", a);
  add_shape(*shards_command, a);
  add_plan_options(*shards_command, a.plan);
  add_context(*shards_command);
  a.shards.add_to(*shards_command);
  shards_command->footer(models +
                         "\nCosts are the bytes of rows that a step of decoding reads, or with --costs the "
                         "times that an engine took "
                         "over\nheads of each kind (`shards_bench costs --json FILE` measures a processor; "
                         "docs/formats.md has the "
                         "format,\nfor engines of your own). Times of ranks are predicted from them, not "
                         "measured: they leave out "
                         "weights and\neverything else that a layer does.");

  CLI::App* convert_command =
      add_command(app, "convert",
                  "Converts any plan to a plan file, or a plan file to a pattern folder or head scores", a);
  add_source(*convert_command, a);
  convert_command
      ->add_option("OUTPUT", a.output, "From a plan file: NAME.json for head scores, else a pattern folder")
      ->required();
  add_shape(*convert_command, a);
  add_plan_options(*convert_command, a.plan);
  convert_command->remove_option(convert_command->get_option("--plan"));
  convert_command->footer(models);

  return run_tool(app, argc, argv, [&] {
    if (*show_command) show(a);
    if (*budgets_command) budgets(a, kv_heads);
    if (*memory_command) memory(a);
    if (*context_command) max_context(a);
    if (*search_command) search(a);
    if (*shards_command) shards(a);
    if (*convert_command) convert(a);
  });
}
