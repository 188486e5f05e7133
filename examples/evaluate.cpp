// SPDX-License-Identifier: Apache-2.0
//
// Measures what a model can still do under each of many plans: over suites of tasks, methods,
// budgets and seeds. The same command always draws the same tasks, and a result file that exists
// already is continued.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include "common/context_limit.hpp"
#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/progress.hpp"
#include "common/run_tool.hpp"
#include "common/stopwatch.hpp"
#include "common/terminal.hpp"
#include "common/text_model.hpp"
#include "common/texts.hpp"
#include "evaluate/equal_bytes.hpp"
#include "evaluate/evaluation.hpp"
#include "evaluate/evaluation_table.hpp"
#include "evaluate/task_lines.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  std::vector<Suite> suites{Suite::keys};
  std::vector<std::string> plans{"full", "sink_recent", "duo", "int8", "int4"};
  std::vector<std::string> bytes;
  std::vector<std::size_t> lengths{1024, 2048, 4096};
  std::vector<std::uint64_t> seeds{1, 2, 3};
  SuiteConfig config;
  std::string prefill = "shared";
  std::string compress = "question";
  std::string text = "kjv";
  std::string split = "test";
  std::size_t threads = 0;
  std::string out;
  std::string write_tasks;
  bool said = false;
  bool resume = false;
  ContextLimit context;
  bool json = false;
};

constexpr const char* description =
    R"(Measures what a model can still do under each of many plans for its KV cache.

Suites (--suite, one or more):
  keys         many facts hidden in a text, "The key of Bamelo is 48213. "; questions ask for them.
               An answer is right if the text of greedy decoding begins with the expected one
  passkey      the same with facts at even depths, a question for each: a grid of length and depth
  reasoning    "the key of the older of A and B": two facts lead to the answer. The shipped model
               guesses between the two names, so the table counts finding either one's key, too
  perplexity   surprise at the continuation of a text, in nats and bits per byte and nats per token
  agreement    distance from the full cache on answers and on continued texts: the share of tokens
               with the same likeliest next token, and the KL divergence of the distributions

Suites in plain English, for pretrained models; they have the shapes of RULER (arXiv:2404.06654), whose
names they bear, in words of our own. An answer counts where it stands in the text of greedy decoding:
  niah_depths  five digits at each of several depths of a text: a grid of length and depth. With
               --per-text below --depths, a text has so many, and the texts take the depths in turn
  niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery: numbers and codes in a text
  vt           variable tracking          cwe, fwe   words that a list repeats most often
  qa_1, qa_2   facts that take one document or two of many short ones
  choice_kind, choice_capital, choice_opposite, choice_larger: short sentences and their likeliest
               ending (--lengths does not matter); choice_ending: which sentence follows a text

Lengths are in tokens of the model; to one that reads bytes, a token is a byte. Bits per byte compare
models with different tokenizers. A question and its answer are encoded together, after the text.

Every plan gets the same tasks. A text is read once, with full attention, and each plan that keeps
all of it during the prompt gets a fork (--prefill own: each plan reads the text itself); plans with
streaming heads always read it themselves.

Texts (--text) are kjv, the part of the King James Bible that the shipped model was not trained on, or
what ./scripts/fetch-texts brings: novels, lexicon, manual and code. Each has two splits: the first
30 % of it, on which heads are identified and settings are chosen (--split validation), and the rest,
which nothing was chosen on (--split test, the default).)";

std::string footer() {
  return std::string{"Plans (--plans, one or more):\n"} + plan_help() +
         R"(  fastgen:0.95                     for each head the fewest rows that get so much of the attention of the
                                   prompt's end, chosen after the prompt (FastGen); fastgen:0.95,0.1,0.2
                                   also sets the shares of latest and of most attended rows. Settings
                                   that the paper does not have: sinks=4, first rows that the local
                                   choice keeps; window=8, latest queries that decide (the paper: all)

Budgets: with --bytes 1/4, methods stand in --plans without their numbers ("headkv",
"headkv:kernel=29,beta=2"), and get the ones with which they keep a quarter of the full cache's bytes
at each length, counted in rows of KV heads: "h2o" becomes h2o:249 at 1,024 tokens (27 are the
answer's), "duo" the lowest sparsity that fits; a method that cannot keep so little is left out of that
budget. Plans with settings of their own
("int4", "full", "headkv:64") are measured as they are, once.

Examples:
  evaluate --suite passkey --plans full duo streaming_llm h2o --bytes 1/2 1/4 --out grid.json
  evaluate --plans full int8 int4 int2 kivi2 --suite keys perplexity --lengths 2048
  evaluate --plans headkv:128 headkv:128,kernel=29,beta=2 --split validation   chooses a setting
  evaluate --plans full duo:0.25 duo:0.5 duo:0.75 --seeds 1 2 3 4 5
  evaluate --plans full duo:0.5 --out grid2.json --resume     measures only what grid2.json lacks
  evaluate --suite keys --lengths 2048 --write-tasks keys.jsonl       the questions, for other programs)";
}

std::string joined(const std::vector<Suite>& suites) {
  std::vector<std::string> names;
  for (const Suite suite : suites) names.emplace_back(name_of(suite));
  return spaced(names);
}

// The command line, quoted so that it can be typed again.
std::string command_of(const Arguments& arguments) {
  const SuiteConfig& config = arguments.config;
  return fmt::format(
      "evaluate --suite {} --plans {}{} --lengths {} --seeds {} --questions {} --per-text {} "
      "--depths {} --windows {} --score {} --compress {} --prefill {}{}{}{}{}",
      joined(arguments.suites), spaced(arguments.plans),
      arguments.bytes.empty() ? "" : " --bytes " + spaced(arguments.bytes), spaced(arguments.lengths),
      spaced(arguments.seeds), config.questions, config.per_text, config.depths, config.windows,
      config.scored, arguments.compress, arguments.prefill, config.lead_in ? " --lead-in" : "",
      config.chat ? " --chat" : "", arguments.said ? " --said" : "",
      (arguments.text == "kjv" ? "" : " --text " + arguments.text) +
          (arguments.split == "test" ? "" : " --split " + arguments.split));
}

Split split_of(const std::string& name) {
  return name == "test" ? Split::test : name == "validation" ? Split::validation : Split::whole;
}

// Whether a plan's name leaves the method's setting to the byte budget.
bool takes_budget(const std::string& plan, const ByteBudget& budget) {
  if (method_of(plan) != plan) return false;
  try {
    static_cast<void>(at_equal_bytes(plan, {.share = 1, .length = budget.length, .shape = budget.shape}));
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

// The plans for one text length. With --bytes these are all methods, once for each budget that they
// can meet; otherwise the plans as named. `rows` is what a head that keeps every row holds when an
// answer begins. `left_out` gets a line for each plan that cannot meet its budget.
std::vector<Entry> entries_at(const Arguments& arguments, std::size_t rows, const ModelShape& shape,
                              std::set<std::string>& left_out) {
  std::vector<Entry> entries;
  const auto add = [&](const std::string& method, double share, const std::string& plan) {
    entries.push_back(
        {method, share, make_exam_plan(plan, shape, arguments.model, arguments.config.compress)});
    require(!entries.back().plan.speculation, "--plans ", plan, ": guesses change no answer; measure full");
  };
  for (const std::string& plan : arguments.plans) {
    ByteBudget budget{.length = rows, .shape = shape};
    if (arguments.bytes.empty() || !takes_budget(plan, budget)) {
      add(method_of(plan), 0, plan);
      continue;
    }
    if (plan.starts_with("duo")) {  // its streaming heads keep what its pattern says
      budget.share = 1;
      const ExamPlan whole = make_exam_plan(at_equal_bytes(plan, budget), shape, arguments.model);
      budget.sinks = whole.settings.at("sinks").get<std::size_t>();
      budget.recent = whole.settings.at("recent").get<std::size_t>();
    }
    for (const std::string& share : arguments.bytes) {
      budget.share = parse_share(share);
      std::string setting;
      try {
        setting = at_equal_bytes(plan, budget);
      } catch (const ConfigError& why) {
        left_out.insert(why.what());
        continue;
      }
      add(plan, budget.share, setting);
    }
  }
  require(!entries.empty(),
          "there is nothing to measure: ", left_out.empty() ? "--plans is empty" : *left_out.begin());
  return entries;
}

class Run {
 public:
  explicit Run(Arguments arguments)
      : arguments_{std::move(arguments)},
        model_{TextModel::load(arguments_.model)},
        plain_{part_of(text_named(arguments_.text), split_of(arguments_.split))},
        settings_(settings_of(arguments_.config, arguments_.model)) {  // with braces this would be
                                                                       // a JSON array
    settings_["split"] = arguments_.split;
    if (arguments_.text != "kjv") settings_["text"] = arguments_.text;
    if (arguments_.resume) known_ = points_of(arguments_.out, settings_);
  }

  void measure_all() {
    plan_work();
    for (Group& group : groups_) {
      const std::string doing = fmt::format("{} at {}", name_of(group.suite), thousands(group.length));
      const Stopwatch took;
      std::size_t plans = 0;
      for (std::size_t s = 0; s < arguments_.seeds.size(); ++s) {
        if (group.unmeasured[s].empty()) continue;
        plans = std::max(plans, group.unmeasured[s].size());
        auto points = measure(model_, group.suite, config_at(group.length), {arguments_.seeds[s]},
                              group.unmeasured[s], plain_, [&](double units) {
                                done_ += units;
                                progress_.update(done_ / total_, doing);
                              });
        for (Point& point : points) {
          if (!arguments_.said) point.outcome.said.clear();
          known_.push_back(as_json(point));
        }
        // Writes the file after each seed, so that the results of a run that is stopped are not
        // lost.
        if (!arguments_.out.empty()) write_result(arguments_.out, file(results_and_rest()));
      }
      if (plans > 0) {
        progress_.note(fmt::format("  {:<10} {:>6} tokens, {:>3} plans   {}", name_of(group.suite),
                                   thousands(group.length), plans, duration(took.seconds())));
      }
      for (const Point& point : group.wanted) {
        results_.push_back(*find_point(known_, point));
      }
    }
    progress_.clear();
    if (!arguments_.out.empty()) write_result(arguments_.out, file(results_));
  }

  // Writes the tasks instead of measuring, for other programs (task_lines.hpp).
  void write_tasks() const {
    std::string lines;
    for (const Suite suite : arguments_.suites) {
      for (const std::size_t length : arguments_.lengths) {
        for (const std::uint64_t seed : arguments_.seeds) {
          TaskName name{suite, length, seed};
          for (const Task& task : draw_tasks(model_, suite, config_at(length), seed, plain_)) {
            lines += as_line(task_as_json(model_, name, task)) + '\n';
            ++name.number;
          }
        }
      }
    }
    write_result(arguments_.write_tasks, lines);
  }

  void print() const {
    if (arguments_.json) {
      fmt::print("{}", file(results_));
    } else {
      fmt::print("{}", evaluation_tables(results_));
    }
  }

 private:
  struct Group {
    Suite suite = Suite::keys;
    std::size_t length = 0;
    std::vector<std::vector<Entry>> unmeasured;  // for each seed
    std::vector<Point> wanted;                   // still without outcomes, in the order of the file
  };

  [[nodiscard]] SuiteConfig config_at(std::size_t length) const {
    SuiteConfig config = arguments_.config;
    config.length = length;
    return config;
  }

  // Draws all tasks and makes every plan once in advance, so that errors show before the work
  // begins.
  void plan_work() {
    std::set<std::string> left_out;
    for (const Suite suite : arguments_.suites) {
      for (const std::size_t length : arguments_.lengths) {
        const std::size_t seeds = arguments_.seeds.size();
        Group group{suite, length, std::vector<std::vector<Entry>>(seeds), {}};
        std::vector<std::vector<Task>> tasks;
        for (const std::uint64_t seed : arguments_.seeds) {
          tasks.push_back(draw_tasks(model_, suite, config_at(length), seed, plain_));
        }
        const std::size_t rows = rows_before_answer(model_, tasks.at(0).at(0));
        arguments_.context.check(model_.config(), rows + tasks.at(0).at(0).follows.size());
        for (const Entry& entry : entries_at(arguments_, rows, model_.config().shape(), left_out)) {
          for (std::size_t s = 0; s < seeds; ++s) {
            group.wanted.push_back({suite,
                                    length,
                                    arguments_.seeds[s],
                                    entry.plan.name,
                                    entry.method,
                                    entry.share,
                                    entry.plan.settings,
                                    {}});
            const bool missing = find_point(known_, group.wanted.back()) == nullptr;
            if (missing) group.unmeasured[s].push_back(entry);
          }
        }
        for (std::size_t s = 0; s < seeds; ++s) {
          if (group.unmeasured[s].empty()) continue;
          for (const Task& task : tasks[s]) total_ += cost(task, group.unmeasured[s].size());
        }
        groups_.push_back(std::move(group));
      }
    }
    for (const std::string& why : left_out) progress_.note("  left out: " + why);
  }

  // Keeps results of an earlier run in the file until the later groups take them over.
  [[nodiscard]] std::vector<nlohmann::ordered_json> results_and_rest() const {
    std::vector<nlohmann::ordered_json> all = results_;
    for (const auto& point : known_) {
      if (std::ranges::find(results_, point) == results_.end()) all.push_back(point);
    }
    return all;
  }

  [[nodiscard]] std::string file(const std::vector<nlohmann::ordered_json>& points) const {
    return file_of(command_of(arguments_), settings_, points);
  }

  Arguments arguments_;
  TextModel model_;
  std::string plain_;
  nlohmann::json settings_;
  std::vector<Group> groups_;
  std::vector<nlohmann::ordered_json> known_;    // measured earlier or in this run
  std::vector<nlohmann::ordered_json> results_;  // the results that were asked for, in order
  double total_ = 0;
  double done_ = 0;
  Progress progress_;
};

void run(Arguments arguments) {
  require_model_folder(arguments.model);
  require(!arguments.resume || !arguments.out.empty(), "--resume needs the file: --out PATH");
  set_threads(arguments.threads);
  arguments.config.prefill = arguments.prefill == "own" ? Prefill::own : Prefill::shared;
  arguments.config.compress = arguments.compress == "text" ? Compress::after_text : Compress::after_question;
  const bool only_tasks = !arguments.write_tasks.empty();
  Run work{std::move(arguments)};
  if (only_tasks) return work.write_tasks();
  work.measure_all();
  work.print();
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "evaluate"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  const auto count = [&](const char* name, std::size_t& value, std::size_t most, const char* what) {
    app.add_option(name, value, what)->check(whole_number(1, most))->type_name("N")->capture_default_str();
  };
  std::map<std::string, Suite> suites;
  for (std::size_t i = 0; i < std::size(suite_names); ++i) {
    suites.emplace(suite_names[i], static_cast<Suite>(i));
  }
  app.add_option("--suite", arguments.suites, "What is measured, see above")
      ->transform(CLI::Transformer(suites).description(""))
      ->type_name("SUITE...")
      ->default_str("keys");
  app.add_option("--model", arguments.model, "Hugging Face folder of the model")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--plans", arguments.plans, "Plans or methods to measure, see below")
      ->type_name("PLAN...")
      ->default_str(spaced(arguments.plans));
  app.add_option("--bytes", arguments.bytes, "Budgets, as shares of the full cache's bytes")
      ->type_name("SHARE...");
  app.add_option("--lengths", arguments.lengths, "Tokens of text, question and answer together")
      ->check(whole_number(1, 1'000'000))
      ->type_name("N...")
      ->default_str(spaced(arguments.lengths));
  app.add_option("--seeds", arguments.seeds, "Each seed draws other texts and questions")
      ->check(any_whole_number())
      ->type_name("N...")
      ->default_str(spaced(arguments.seeds));
  count("--questions", arguments.config.questions, 1'000'000, "Questions at each length and seed");
  count("--per-text", arguments.config.per_text, 32, "Questions that share a text, at most");
  count("--depths", arguments.config.depths, 32, "passkey: depths, all in each text; niah_depths: see above");
  count("--windows", arguments.config.windows, 100'000, "Continued texts at each length and seed");
  count("--score", arguments.config.scored, 1'000'000, "Tokens of each continuation");
  app.add_flag("--lead-in", arguments.config.lead_in,
               "Put the opening of the answer after the question and ask only for its digits");
  app.add_flag(
      "--chat", arguments.config.chat,
      "Suites in plain English, for models tuned on conversations: the text and the question are the "
      "user's message, and the answer is the assistant's");
  app.add_option("--compress", arguments.compress,
                 "When budget plans drop rows: after the question, or after the text")
      ->check(CLI::IsMember({"question", "text"}))
      ->type_name("WHEN")
      ->capture_default_str();
  app.add_option("--prefill", arguments.prefill, "Who reads a text: shared or own, see above")
      ->check(CLI::IsMember({"shared", "own"}))
      ->type_name("WHO")
      ->capture_default_str();
  app.add_option("--text", arguments.text, "Which text, see above")
      ->check(CLI::IsMember(std::vector<std::string>{text_names.begin(), text_names.end()}))
      ->type_name("TEXT")
      ->capture_default_str();
  app.add_option("--split", arguments.split,
                 "Texts that settings are chosen on, texts that they are evaluated on, or all, which "
                 "allows longer texts")
      ->check(CLI::IsMember({"validation", "test", "all"}))
      ->type_name("WHICH")
      ->capture_default_str();
  app.add_option("--threads", arguments.threads, "Threads; 0: all that OpenMP offers")
      ->check(whole_number(0, most_threads))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--out", arguments.out, "Also write JSON to this file, point by point")->type_name("PATH");
  app.add_option("--write-tasks", arguments.write_tasks,
                 "Measure nothing: write the questions to this file, one text on each line of JSON, so that "
                 "other programs can be asked them (bench/peers)")
      ->type_name("PATH");
  app.add_flag("--said", arguments.said, "Also record the tokens of every answer");
  app.add_flag("--resume", arguments.resume,
               "Skip what --out has already, if it was measured with the same settings");
  arguments.context.add_to(app);
  app.add_flag("--json", arguments.json, "Print JSON instead of Markdown");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
