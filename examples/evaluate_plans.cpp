// SPDX-License-Identifier: Apache-2.0
//
// How many answers each plan gets right, over many fresh questions and several lengths of text.
// Every plan meets the same texts and questions; the same command draws them again.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <reference_model/llama.hpp>

#include "common/exam.hpp"
#include "common/exam_plan.hpp"
#include "common/files.hpp"
#include "common/progress.hpp"
#include "common/retrieval_text.hpp"
#include "common/run_tool.hpp"
#include "common/stopwatch.hpp"
#include "common/table.hpp"
#include "common/terminal.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  std::vector<std::string> plans{"full", "sink_recent", "duo", "int8", "int4"};
  std::vector<std::size_t> lengths{1024, 2048, 4096, 8192};
  std::size_t questions = 500;
  std::size_t per_text = 10;
  std::size_t far = 0;
  std::uint64_t seed = 2026;
  std::size_t threads = 0;
  std::string out;
  std::string compress = "question";
  bool lead_in = false;
  bool two_step = false;
  bool json = false;
};

constexpr const char* description =
    R"(Measures how many of many questions a model answers right under each plan.

Texts, facts and questions are those of `compare`, drawn afresh for every text, on a part of the
King James Bible that the shipped model was not trained on. A text is read once and its questions
go to forks of it. An answer is right if every byte of it is what greedy decoding writes.

Of all questions, those about far facts are counted apart: farther back than layers x window, so
that no chain of sliding windows reaches them.)";

std::string footer() {
  return std::string{"Plans (--plans, one or more):\n"} + plan_help() + R"(
Examples:
  evaluate_plans --out bench/results/plans_keyfinder.json      the table of the README
  evaluate_plans --lengths 2048 --questions 100                a quick look
  evaluate_plans --plans full duo:0.25 duo:0.5 duo:0.75        how many heads can stream
  evaluate_plans --two-step                                    the harder questions)";
}

struct Score {
  std::size_t right = 0;
  std::size_t asked = 0;

  void count(bool is_right) {
    right += is_right ? 1 : 0;
    ++asked;
  }
  [[nodiscard]] double share() const {
    return asked == 0 ? std::nan("") : static_cast<double>(right) / static_cast<double>(asked);
  }
  // Half the width of the 95 % interval (Wilson's), as a share.
  [[nodiscard]] double margin() const {
    const auto n = static_cast<double>(asked);
    const double z = 1.96;
    return z / (1 + z * z / n) * std::sqrt(share() * (1 - share()) / n + z * z / (4 * n * n));
  }
};

struct Cell {
  std::string plan;
  std::size_t length = 0;
  Score all;
  Score far;
  ExamResult exam;
};

// The texts of one length; the last may have fewer questions, so that the count is as asked for.
std::vector<RetrievalText> draw_texts(const Arguments& arguments, const std::string& plain,
                                      std::size_t length) {
  const std::size_t per_text =
      std::min(arguments.per_text, questions_per_text(length, arguments.two_step));
  std::vector<RetrievalText> texts;
  for (std::size_t left = arguments.questions; left > 0;) {
    texts.push_back(draw_text(plain, {.length = length,
                                      .questions = std::min(left, per_text),
                                      .lead_in = arguments.lead_in,
                                      .two_step = arguments.two_step,
                                      .seed = arguments.seed,
                                      .number = texts.size()}));
    left -= texts.back().questions.size();
  }
  return texts;
}

// What reading and answering take, in arbitrary units: linear layers, and attention to the text.
double cost(const std::vector<RetrievalText>& texts) {
  double sum = 0;
  for (const RetrievalText& text : texts) {
    const auto length = static_cast<double>(text.body.size());
    sum += length * (1 + length / 4000);
    sum += static_cast<double>(text.questions.size()) * 200 * (1 + length / 2000);
  }
  return sum;
}

// layers x the longest window of a streaming head of any plan.
std::size_t windows_reach(const std::vector<ExamPlan>& plans) {
  std::size_t recent = 0;
  std::size_t layers = 0;
  for (const ExamPlan& plan : plans) {
    layers = plan.plan.shape().layers;
    plan.plan.for_each_head([&](std::size_t, std::size_t, const auto& config) {
      if constexpr (requires { config.recent; }) recent = std::max(recent, config.recent);
    });
  }
  return layers * (recent > 0 ? recent : 128);
}

nlohmann::json as_json(const Arguments& arguments, const std::vector<Cell>& cells) {
  nlohmann::json results = nlohmann::json::array();
  for (const Cell& cell : cells) {
    nlohmann::json row{{"plan", cell.plan},
                       {"tokens", cell.length},
                       {"questions", cell.all.asked},
                       {"right", cell.all.right},
                       {"far_questions", cell.far.asked},
                       {"far_right", cell.far.right},
                       {"kv_bytes", std::llround(cell.exam.bytes)},
                       {"kv_bytes_read_per_token", std::llround(cell.exam.bytes_read)}};
    results.push_back(std::move(row));
  }
  return {
      {"what", "questions answered exactly, greedily decoded; the same questions for all plans"},
      {"command",
       fmt::format("evaluate_plans --plans {} --lengths {} --questions {} "
                   "--per-text {} --seed {} --compress {}{}{}",
                   spaced(arguments.plans), spaced(arguments.lengths), arguments.questions,
                   arguments.per_text, arguments.seed, arguments.compress,
                   arguments.lead_in ? " --lead-in" : "", arguments.two_step ? " --two-step" : "")},
      {"model", std::filesystem::path{arguments.model}.filename().string()},
      {"far_means_bytes_back", arguments.far},
      {"results", std::move(results)}};
}

std::string markdown(const Arguments& arguments, const std::vector<Cell>& cells,
                     Score Cell::*score) {
  Table table;
  table.add_column("plan", "", Align::left);
  for (const std::size_t length : arguments.lengths) table.add_column(thousands(length));
  table.add_column("KV cache at " + thousands(arguments.lengths.back()));
  for (const std::string& plan : arguments.plans) {
    std::vector<std::string> row{plan};
    std::string bytes;
    for (const Cell& cell : cells) {
      if (cell.plan != plan) continue;
      const Score& own = cell.*score;
      row.push_back(own.asked == 0 ? "-"
                                   : fmt::format("{} ± {}", percent(own.share()),
                                                 fixed(100 * own.margin(), 1)));
      bytes = megabytes(static_cast<std::size_t>(cell.exam.bytes));
    }
    row.push_back(bytes);
    table.add_row(std::move(row));
  }
  return table.markdown();
}

std::vector<Cell> evaluate(const Arguments& arguments, const reference::Llama& model,
                           const std::vector<ExamPlan>& plans) {
  const std::string plain = held_out_text();
  std::vector<std::vector<RetrievalText>> texts;
  double total = 0;
  for (const std::size_t length : arguments.lengths) {
    texts.push_back(draw_texts(arguments, plain, length));
    total += cost(texts.back()) * static_cast<double>(plans.size());
  }
  std::vector<Cell> cells;
  double done = 0;
  Progress progress;
  for (std::size_t l = 0; l < texts.size(); ++l) {
    const double own = cost(texts[l]);
    for (const ExamPlan& plan : plans) {
      const std::string doing = fmt::format("{} at {}", plan.name, thousands(arguments.lengths[l]));
      const Stopwatch took;
      Cell cell{plan.name, arguments.lengths[l], {}, {}, {}};
      cell.exam = examine(
          model, plan, texts[l],
          [&](std::size_t read, std::size_t all) {
            const double share = static_cast<double>(read) / static_cast<double>(all);
            progress.update((done + own * share) / total, doing);
          },
          Threads::texts);
      done += own;
      std::size_t q = 0;
      for (const RetrievalText& text : texts[l]) {
        for (const Question& question : text.questions) {
          cell.all.count(cell.exam.right[q]);
          if (question.distance > arguments.far) cell.far.count(cell.exam.right[q]);
          ++q;
        }
      }
      progress.note(fmt::format("  {:>6} tokens  {:<12} {:>7} right, far facts {:>7}   {}",
                                thousands(cell.length), cell.plan, percent(cell.all.share()),
                                percent(cell.far.share()), duration(took.seconds())));
      cells.push_back(std::move(cell));
      // As it stands, so that a run that is stopped has not been for nothing.
      if (!arguments.out.empty())
        write_result(arguments.out, as_json(arguments, cells).dump(2) + "\n");
    }
  }
  return cells;
}

void run(Arguments arguments) {
  require_model_folder(arguments.model);
  set_threads(arguments.threads);
  const auto model = reference::Llama::load(arguments.model);
  require_bytes(model);
  std::vector<ExamPlan> plans;
  const Compress compress =
      arguments.compress == "text" ? Compress::behind_text : Compress::behind_question;
  for (const std::string& name : arguments.plans) {
    plans.push_back(make_exam_plan(name, model.config().shape(), arguments.model, compress));
  }
  if (arguments.far == 0) arguments.far = windows_reach(plans);
  const std::vector<Cell> cells = evaluate(arguments, model, plans);
  if (arguments.json) {
    fmt::print("{}\n", as_json(arguments, cells).dump());
    return;
  }
  fmt::print(
      "{} questions at each length, right answers with the 95 % margin:\n\n{}\n"
      "Of them, those about facts more than {} tokens back:\n\n{}",
      thousands(arguments.questions), markdown(arguments, cells, &Cell::all),
      thousands(arguments.far), markdown(arguments, cells, &Cell::far));
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "evaluate_plans"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  app.add_option("--model", arguments.model, "Folder of a byte-level model")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--plans", arguments.plans, "Plans to measure, see below")
      ->type_name("PLAN...")
      ->default_str(spaced(arguments.plans));
  app.add_option("--lengths", arguments.lengths, "Bytes of text, question and answer together")
      ->check(whole_number(1, 1'000'000))
      ->type_name("N...")
      ->default_str(spaced(arguments.lengths));
  app.add_option("--questions", arguments.questions, "Questions at each length")
      ->check(whole_number(1, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--per-text", arguments.per_text, "Questions that share a text, at most")
      ->check(whole_number(1, 32))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--far", arguments.far, "How far back far facts lie; 0: layers x window")
      ->check(whole_number(0, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("--lead-in", arguments.lead_in,
               "Put the opening of the answer behind the question and ask for its digits alone");
  app.add_flag("--two-step", arguments.two_step, "Ask for the key of the older of two names");
  app.add_option("--compress", arguments.compress,
                 "When headkv drops rows: behind the question, or behind the text")
      ->check(CLI::IsMember({"question", "text"}))
      ->type_name("WHEN")
      ->capture_default_str();
  app.add_option("--seed", arguments.seed, "Other texts and questions")
      ->check(any_whole_number())
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--threads", arguments.threads, "Threads; 0: all that OpenMP offers")
      ->check(whole_number(0, most_threads))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--out", arguments.out, "Write JSON there, too")->type_name("PATH");
  app.add_flag("--json", arguments.json, "Print JSON instead of Markdown");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
