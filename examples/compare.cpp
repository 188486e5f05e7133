// SPDX-License-Identifier: Apache-2.0
//
// Compares several plans on the same texts: what each costs in memory and time, and how many
// answers it still finds.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include "common/asked_question.hpp"
#include "common/context_limit.hpp"
#include "common/device.hpp"
#include "common/exam.hpp"
#include "common/exam_plan.hpp"
#include "common/files.hpp"
#include "common/head_files.hpp"
#include "common/heat_map.hpp"
#include "common/json_line.hpp"
#include "common/pattern_folder.hpp"
#include "common/progress.hpp"
#include "common/retrieval_text.hpp"
#include "common/run_tool.hpp"
#include "common/table.hpp"
#include "common/terminal.hpp"
#include "common/text_model.hpp"
#include "common/texts.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  std::vector<std::string> plans;  // empty: the model's default
  std::size_t tokens = 0;          // likewise
  std::size_t questions = 12;
  std::uint64_t seed = 1;
  std::size_t threads = 0;
  std::string device = "cpu";
  std::string compress = "question";
  std::string hide;  // empty: the model's default
  std::string text = "kjv";
  bool whole_answers = false;
  bool two_step = false;
  ContextLimit context;
  bool json = false;
};

constexpr std::size_t tokens_of_bytes = 8192;

// What it asks a pretrained model. Everything but the budgets, a sixth of the text, is as published.
const std::vector<std::string> plans_of_words{"full",    "sink_recent:64,256", "duo",  "snapkv:512",
                                              "h2o:512", "quest:16,512",       "int4", "duo+int4"};
constexpr std::size_t tokens_of_words = 3072;

constexpr const char* description =
    R"(Compares KV-cache plans on one long text: memory, time, and how many answers are right.

The text is a piece of the King James Bible with facts hidden in it ("The key of Bamelo is 48213.").
A model reads it once under each plan; every question ("What is the key of Bamelo?") goes to a fork
of the cache, so no question sees another. An answer is right if its text begins with the expected one.
Models that read words rather than bytes are asked for words ("The captain has learned to play the trombone.").)";

std::string footer() {
  return fmt::format("Default plans: {}\nand for a model that reads words: {}\n\n", spaced(plans_of_bytes),
                     spaced(plans_of_words)) +
         "Plans (--plans, one or more):\n" + plan_help() +
         R"(  triforce             full attention, by guesses: needs the small model in DIR-draft, and the CPU

Examples:
  compare                                     the demo: the shipped model, eight plans
  compare --plans full duo:0.5 duo:0.75       what more streaming heads cost
  compare --plans full headkv:128 headkv:128,kernel=29,beta=2
                                              HeadKV as published, and for a small model of bytes
  compare --plans full headkv:256 --compress text
                                              a budget that is spent before the question is known
  compare --tokens 2048 --questions 16        a shorter text
  compare --json > result.json                for another program
  compare --model DIR                         another model; duo and headkv look for gates and
                                              scores in DIR/duo and DIR/headkv)";
}

struct Comparison {
  RetrievalText text;
  std::size_t tokens = 0;  // of the text
  std::vector<ExamPlan> plans;
  std::vector<ExamResult> results;  // one for each plan

  // The result that the others are compared with; null if the full plan was not asked for.
  [[nodiscard]] const ExamResult* full() const {
    const auto found = std::ranges::find(results, "full", &ExamResult::plan);
    return found == results.end() ? nullptr : &*found;
  }
  // The first plan that is made from the model's gates; null if there is none.
  [[nodiscard]] const ExamPlan* duo() const {
    const auto found = std::ranges::find_if(plans, [](const ExamPlan& plan) {
      return plan.name.substr(0, plan.name.find_first_of(":+")) == "duo";
    });
    return found == plans.end() ? nullptr : &*found;
  }
};

// A plan's name, padded to the widest one.
std::string padded_name(const Comparison& comparison, std::string name) {
  std::size_t width = 0;
  for (const ExamPlan& plan : comparison.plans) width = std::max(width, plan.name.size());
  name.resize(width + 2, ' ');
  return name;
}

HeadGates gates_of(const std::string& model) {
  return io::load_duo_pattern(pattern_folder(head_file(model, "duo"))).gates;
}

// Fills in what depends on the model and was left open.
void complete(Arguments& arguments, const TextModel& model) {
  const bool reads_words = model.config().vocabulary != 256;
  if (arguments.plans.empty()) arguments.plans = reads_words ? plans_of_words : plans_of_bytes;
  if (arguments.tokens == 0) arguments.tokens = reads_words ? tokens_of_words : tokens_of_bytes;
  if (arguments.hide.empty()) {
    arguments.hide = reads_words && !arguments.two_step ? "words" : "keys";
  }
}

// Makes the texts and the plans, and reports every error before anything is printed.
Comparison prepare(const Arguments& arguments, const TextModel& model, bool plans_chosen) {
  Comparison comparison;
  comparison.text =
      draw_text_in_tokens(model, part_of(text_named(arguments.text), Split::test), arguments.tokens,
                          {.questions = arguments.questions,
                           .kind = arguments.hide == "words" ? FactKind::words : FactKind::keys,
                           .lead_in = !arguments.whole_answers,
                           .two_step = arguments.two_step,
                           .seed = arguments.seed});
  comparison.tokens = model.encode(comparison.text.body).size();
  const Compress compress = arguments.compress == "text" ? Compress::after_text : Compress::after_question;
  for (const std::string& name : arguments.plans) {
    try {
      require<FormatError>(name != "triforce" || arguments.device == "cpu",
                           "its tokens are decoded on the CPU, not on --device ", arguments.device);
      comparison.plans.push_back(make_exam_plan(name, model.config().shape(), arguments.model, compress));
    } catch (const FormatError& missing) {
      // A model without gates and scores can still be compared under the default plans that need
      // neither.
      if (plans_chosen) throw;
      const std::string_view why = missing.what();
      fmt::print(stderr, "compare: without {}: {}\n", name, why.substr(0, why.find(". ")));
    }
  }
  return comparison;
}

// Each plan reads each text once into a cache of its own, because the plan decides what the cache
// keeps. Every question goes to a fork of that cache.
void examine_plans(const TextModel& model, const Device& device, Comparison& comparison) {
  const std::size_t length = comparison.tokens;
  const auto plans = static_cast<double>(comparison.plans.size());
  Progress progress;
  for (const ExamPlan& plan : comparison.plans) {
    const auto before = static_cast<double>(comparison.results.size());
    const auto report = [&](std::size_t done, std::size_t total) {
      const double share = static_cast<double>(done) / static_cast<double>(total);
      const std::string doing =
          done < length ? fmt::format("reads token {} of {}", thousands(done), thousands(length)) : "answers";
      progress.update((before + share) / plans, padded_name(comparison, plan.name) + doing);
    };
    comparison.results.push_back(
        examine(model, plan, {&comparison.text, 1}, report, Threads::one_text, device.make_sequence));
  }
}

nlohmann::json as_json(const Arguments& arguments, const TextModel& model, const Comparison& comparison) {
  const ModelShape shape = model.config().shape();
  nlohmann::json rows = nlohmann::json::array();
  for (std::size_t i = 0; i < comparison.plans.size(); ++i) {
    const ExamResult& result = comparison.results[i];
    std::vector<std::string> answers;
    for (const std::vector<int>& answer : result.answers) answers.push_back(model.decode(answer));
    nlohmann::json row{{"plan", result.plan},
                       {"about", describe(comparison.plans[i])},
                       {"settings", comparison.plans[i].settings},
                       {"kv_bytes", result.bytes},
                       {"kv_bytes_before_compression", result.peak_bytes},
                       {"kv_bytes_read_per_token", result.bytes_read},
                       {"prefill_ms", result.prefill_ms},
                       {"compress_ms", result.compress_ms},
                       {"decode_ms_per_token", result.decode_ms},
                       {"right", result.right_count()},
                       {"questions", result.right.size()},
                       {"answers", answers}};
    if (const ExamResult* full = comparison.full()) {
      row["times_smaller"] = full->bytes / result.bytes;
      row["agreement_with_full"] = agreement(result, *full);
    }
    rows.push_back(std::move(row));
  }
  nlohmann::json questions = nlohmann::json::array();
  for (const Question& question : comparison.text.questions) {
    questions.push_back(
        {{"question", question.text}, {"answer", question.answer}, {"bytes_back", question.distance}});
  }
  nlohmann::json json{{"model", arguments.model},       {"layers", shape.layers},
                      {"q_heads", shape.q_heads},       {"kv_heads", shape.kv_heads},
                      {"head_dim", shape.head_dim},     {"parameters", model.llama().parameters()},
                      {"device", arguments.device},     {"threads", threads()},
                      {"seed", arguments.seed},         {"tokens", comparison.tokens},
                      {"facts", comparison.text.facts}, {"questions", std::move(questions)},
                      {"plans", std::move(rows)}};
  if (arguments.hide == "words") json["hidden"] = arguments.hide;
  if (arguments.text != "kjv") json["text"] = arguments.text;
  if (const ExamPlan* duo = comparison.duo()) {
    const HeadKinds kinds = kinds_of(duo->plan);
    const HeadGates gates = gates_of(arguments.model);
    nlohmann::json heads = nlohmann::json::array();
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        heads.push_back({{"layer", layer},
                         {"head", head},
                         {"gate", gates(layer, head)},
                         {"keeps_all", kinds(layer, head) == HeadKind::retrieval}});
      }
    }
    json["duo_heads"] = std::move(heads);
  }
  return json;
}

void print_table(const Comparison& comparison) {
  Table table;
  table.add_column("plan", "", Align::left);
  table.add_column("KV cache");
  table.add_column("smaller");
  table.add_column("read", "per token");
  table.add_column("prefill", "ms");
  table.add_column("decode", "ms/token");
  table.add_column("answers", "right");
  table.add_column("same tokens", "as full");
  const auto megabytes = [](double bytes) {
    return fmt::format("{:MB}", Bytes{static_cast<std::uint64_t>(bytes)});
  };
  const ExamResult* full = comparison.full();
  for (const ExamResult& result : comparison.results) {
    table.add_row({result.plan, megabytes(result.bytes),
                   full == nullptr ? "-" : fixed(full->bytes / result.bytes, 1) + " x",
                   megabytes(result.bytes_read), fixed(result.prefill_ms, 0), fixed(result.decode_ms, 2),
                   fmt::format("{} of {}", result.right_count(), result.right.size()),
                   full == nullptr ? "-" : percent(agreement(result, *full))});
  }
  fmt::print("\n{}\n", table.text(wants_colour(stdout)));
  for (const ExamPlan& plan : comparison.plans) {
    fmt::print("  {}{}\n", padded_name(comparison, plan.name), describe(plan));
  }
}

// The first questions to which not all plans give the same answer, at most so many; the first of all
// if there are none.
std::vector<std::size_t> telling_questions(const Comparison& comparison, std::size_t most) {
  std::vector<std::size_t> telling;
  for (std::size_t q = 0; q < comparison.text.questions.size() && telling.size() < most; ++q) {
    const auto differs = [&](const ExamResult& r) {
      return r.answers[q] != comparison.results.front().answers[q];
    };
    if (std::ranges::any_of(comparison.results, differs)) telling.push_back(q);
  }
  if (telling.empty()) telling.push_back(0);
  return telling;
}

// The text around a fact that ends at `end`.
std::string around_fact(const std::string& body, std::size_t end) {
  const std::size_t begin = body.find(' ', end - std::min<std::size_t>(end, 110)) + 1;
  return fmt::format("…{}…", body.substr(begin, body.find(' ', end + 40) - begin));
}

// Prints the plans' answers to one question.
void print_answers(const TextModel& model, const Comparison& comparison, std::size_t shown, bool with_fact) {
  const Question& question = comparison.text.questions[shown];
  const bool colour = wants_colour(stdout);
  const std::string& body = comparison.text.body;
  const std::size_t end = body.size() - question.distance;
  const std::size_t tokens_back = model.encode_after(body.substr(0, end), body.substr(end)).size();
  fmt::print("\nOne of the questions, about a fact {} tokens back: {}\n", thousands(tokens_back),
             one_line(question.text.substr(1), 100));
  if (with_fact) fmt::print("  hidden in {}\n", one_line(around_fact(body, end), 180));
  for (const ExamResult& result : comparison.results) {
    const bool right = result.right[shown];
    const char* shade = !colour ? "" : right ? "\033[32m" : "\033[31m";
    const std::string answer = model.decode(result.answers[shown]);
    fmt::print("  {}{}{} {}{}\n", padded_name(comparison, result.plan), shade, right ? "✓" : "✗",
               one_line(std::string_view{answer}.substr(answer.starts_with(' ')), 60),
               colour ? "\033[0m" : "");
  }
}

void print_heat_map(const ExamPlan& duo, const std::string& model, bool trained) {
  fmt::print(
      "\nWhich heads the plan {} lets keep the whole text: [framed].\n"
      "The darker a head, the {}.\n{}",
      duo.name, trained ? "further open training left its gate" : "higher its gate",
      heat_map(gates_of(model), kinds_of(duo.plan), wants_colour(stdout)));
}

std::string shown_parameters(std::size_t parameters) {
  const auto count = static_cast<double>(parameters);
  return count < 1e7 ? fmt::format("{} thousand", fixed(count / 1e3, 0))
                     : fmt::format("{} million", fixed(count / 1e6, 1));
}

void run(Arguments arguments) {
  set_threads(arguments.threads);
  const auto model = TextModel::load(arguments.model);
  const bool plans_chosen = !arguments.plans.empty();
  complete(arguments, model);
  model.require_reads_texts();
  arguments.context.check(model.config(), arguments.tokens);
  const Device device = open_device(arguments.device, model.llama());
  Comparison comparison = prepare(arguments, model, plans_chosen);
  if (!arguments.json) {
    const ModelShape shape = model.config().shape();
    fmt::print(
        "{}: {} layers, {} query and {} KV heads of {} channels, {} parameters; "
        "{}\n"
        "A text of {} tokens with {} facts hidden in it; {} questions, each to a "
        "fork of the read text\n",
        arguments.model, shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim,
        shown_parameters(model.llama().parameters()), device.about, thousands(comparison.tokens),
        comparison.text.facts, comparison.text.questions.size());
    std::fflush(stdout);
  }
  examine_plans(model, device, comparison);
  if (arguments.json) {
    fmt::print("{}\n", as_line(as_json(arguments, model, comparison)));
    return;
  }
  print_table(comparison);
  const bool words = arguments.hide == "words";
  for (const std::size_t shown : telling_questions(comparison, words ? 3 : 1)) {
    print_answers(model, comparison, shown, words);
  }
  if (const ExamPlan* duo = comparison.duo()) print_heat_map(*duo, arguments.model, !words);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "compare"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  app.add_option("--model", arguments.model, "Hugging Face folder of the model")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--plans", arguments.plans, "Plans to compare, see below")->type_name("PLAN...");
  app.add_option("--tokens", arguments.tokens,
                 fmt::format("Tokens of text, a question and its answer included; default: {}, of words {}",
                             tokens_of_bytes, tokens_of_words))
      ->type_name("N")
      ->check(whole_number(1, 1'000'000));
  app.add_option("--hide", arguments.hide,
                 "What is hidden and asked for: keys or words; default: words, if the model reads them")
      ->check(CLI::IsMember({"keys", "words"}))
      ->type_name("WHAT");
  app.add_option("--text", arguments.text, "Where: a text that ships, or one of scripts/fetch-texts")
      ->check(CLI::IsMember(std::vector<std::string>{text_names.begin(), text_names.end()}))
      ->type_name("TEXT")
      ->capture_default_str();
  app.add_option("--questions", arguments.questions,
                 "Questions, at most one per hidden fact (a fact per 128 bytes, 4 to 32)")
      ->type_name("N")
      ->check(whole_number(1, 1000))
      ->capture_default_str();
  app.add_flag("--whole-answers", arguments.whole_answers,
               "Ask for the whole answer: by default its opening, \"The key of Bamelo is \", ends "
               "the question, and only the digits are asked for");
  app.add_flag("--two-step", arguments.two_step,
               "Ask for the key of the older of two names, with --whole-answers");
  app.add_option("--compress", arguments.compress,
                 "When headkv drops rows: after the question, or after the text, before a "
                 "question is known")
      ->check(CLI::IsMember({"question", "text"}))
      ->type_name("WHEN")
      ->capture_default_str();
  app.add_option("--seed", arguments.seed, "Another text and other questions")
      ->type_name("N")
      ->check(any_whole_number())
      ->capture_default_str();
  add_device_option(app, arguments.device);
  app.add_option("--threads", arguments.threads, "Threads; 0: all that OpenMP offers")
      ->type_name("N")
      ->check(whole_number(0, most_threads))
      ->capture_default_str();
  arguments.context.add_to(app);
  app.add_flag("--json", arguments.json, "Print JSON");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
