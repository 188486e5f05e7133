// SPDX-License-Identifier: Apache-2.0
#include <evaluate/language_suite.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <evaluate/evaluation.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

constexpr SuiteConfig three_questions{.length = 4000, .questions = 3, .per_text = 2, .depths = 2};

Suite suite_of(TaskFamily family) {
  return static_cast<Suite>(first_language_suite + static_cast<std::size_t>(family));
}

// Minus the logarithm of the probability of `ending` after `text`, both read by a cache of their
// own.
double nats_of(const TextModel& model, const ExamPlan& plan, const std::string& text,
               const std::string& ending) {
  const auto cache = make_sequence(model.llama(), plan.plan);
  std::vector<float> logits = cache->prefill(bytes_of(text));
  double nats = 0;
  for (const int token : bytes_of(ending)) {
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    nats += std::log(sum) - static_cast<double>(logits[static_cast<std::size_t>(token)]);
    logits = cache->decode(token);
  }
  return nats;
}

}  // namespace

TEST_CASE("suites in plain English have at least as many questions as requested, in so many tokens") {
  const std::string plain = evaluation_text();
  for (const bool words : {false, true}) {
    const TextModel model = words ? random_word_model() : random_text_model();
    for (std::size_t i = 0; i < task_family_names.size(); ++i) {
      const Suite suite = suite_of(static_cast<TaskFamily>(i));
      CAPTURE(name_of(suite));
      CHECK(name_of(suite) == task_family_names[i]);
      CHECK(asks(suite));
      std::size_t questions = 0;
      for (const Task& task : draw_tasks(model, suite, three_questions, 5, plain)) {
        CHECK(task.body == model.encode(task.text.body));
        CHECK(task.text.questions.empty());
        questions += task.language.size();
        for (const auto& [question, text, tokens] : task.language) {
          CHECK(text == question.prompt());
          CHECK(tokens == model.encode_after(task.text.body, text));
          CHECK(task.body.size() + tokens.size() + question.max_tokens <= three_questions.length);
        }
        CHECK(rows_before_answer(model, task) == task.body.size() + task.language[0].tokens.size());
      }
      CHECK(questions >= 3);
      CHECK(questions <= 4);
    }
  }
  CHECK(!language_family(Suite::agreement));
  CHECK(language_family(suite_of(TaskFamily::vt)) == TaskFamily::vt);
}

TEST_CASE("texts with fewer pass keys than there are depths take the depths in turn") {
  const auto model = random_text_model();
  const Suite suite = suite_of(TaskFamily::niah_depths);
  const auto depths_of = [&](std::size_t per_text) {
    std::vector<std::vector<int>> depths;
    for (const Task& task :
         draw_tasks(model, suite, {.length = 4000, .questions = 8, .per_text = per_text, .depths = 4}, 1,
                    evaluation_text())) {
      // Each answer stands in the text once, and no other pass key does.
      std::size_t keys = 0;
      for (std::size_t at = 0; (at = task.text.body.find("pass key of", at)) != std::string::npos; ++at) {
        ++keys;
      }
      CHECK(keys == task.language.size());
      depths.emplace_back();
      for (const LanguagePrompt& prompt : task.language) {
        // The depths are 5, 35, 65 and 95 %, up to the boundaries of words.
        depths.back().push_back(static_cast<int>(std::lround((prompt.question.depth - 0.05) / 0.3)));
      }
    }
    return depths;
  };
  using Depths = std::vector<std::vector<int>>;
  const Depths one{{0}, {1}, {2}, {3}, {0}, {1}, {2}, {3}};
  CHECK(depths_of(1) == one);
  const Depths three{{0, 1, 2}, {0, 1, 3}, {0, 2, 3}};
  CHECK(depths_of(3) == three);
  const Depths all{{0, 1, 2, 3}, {0, 1, 2, 3}};
  CHECK(depths_of(4) == all);
  CHECK(depths_of(9) == all);
}

TEST_CASE("an answer counts where it stands in the text of greedy decoding") {
  const auto model = random_text_model();
  const ExamPlan plan = make_exam_plan("full", model.config().shape(), "");
  auto tasks = draw_tasks(model, suite_of(TaskFamily::niah_depths), three_questions, 1, evaluation_text());
  REQUIRE(tasks.size() == 2);
  Task& task = tasks[0];
  REQUIRE(task.language.size() == 2);
  std::vector<std::string> said;
  for (const auto& [question, text, read] : task.language) {
    const auto cache = make_sequence(model.llama(), plan.plan);
    std::vector<float> logits = cache->prefill(bytes_of(task.text.body + text));
    std::vector<int> tokens;
    for (std::size_t i = 0; i < question.max_tokens; ++i) {
      tokens.push_back(static_cast<int>(std::ranges::max_element(logits) - logits.begin()));
      logits = cache->decode(tokens.back());
    }
    said.push_back(model.decode(tokens));
  }
  task.language[0].question.answers = {said[0].substr(0, said[0].size() / 2)};
  task.language[1].question.answers = {"not what it says", said[1]};
  const std::array<const ExamPlan*, 1> plans{&plan};
  Outcome outcome = perform(model, task, plans, three_questions, false)[0];
  CHECK(outcome.marks == "10");
  CHECK(outcome.measures.at("found") == std::vector<double>{0.5});
  CHECK(outcome.questions_per_text == std::vector<std::size_t>{2});
  CHECK(outcome.kv_bytes.size() == 2);
  outcome.add(perform(model, tasks[1], plans, three_questions, false)[0]);
  CHECK(outcome.questions_per_text == std::vector<std::size_t>{2, 2});
  Point point;
  point.suite = suite_of(TaskFamily::niah_depths);
  point.outcome = outcome;
  const auto json = as_json(point);
  CHECK(json["suite"] == "niah_depths");
  CHECK(json["questions_per_text"] == std::vector<int>{2, 2});
}

TEST_CASE("of the choices, the likeliest per byte counts") {
  const auto model = random_text_model();
  const ExamPlan plan = make_exam_plan("full", model.config().shape(), "");
  const std::array<const ExamPlan*, 1> plans{&plan};
  SuiteConfig config = three_questions;
  config.questions = config.per_text = 6;
  auto tasks = draw_tasks(model, suite_of(TaskFamily::choice_capital), config, 1, evaluation_text());
  REQUIRE(tasks.size() == 1);
  std::string marks;
  for (const auto& [question, text, tokens] : tasks[0].language) {
    std::string best;
    double least = 0;
    for (const std::string& choice : question.choices) {
      const double nats =
          nats_of(model, plan, tasks[0].text.body + text, choice) / static_cast<double>(choice.size());
      if (best.empty() || nats < least) {
        best = choice;
        least = nats;
      }
    }
    marks += best == question.answers[0] ? '1' : '0';
  }
  CHECK(perform(model, tasks[0], plans, config, false)[0].marks == marks);
  for (auto& [question, text, tokens] : tasks[0].language) {
    question.answers = {question.choices[2]};
  }
  CHECK(perform(model, tasks[0], plans, config, false)[0].marks != "111111");
}
