// SPDX-License-Identifier: Apache-2.0
#include <evaluate/task_lines.hpp>

#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/retrieval_text.hpp>
#include <kvpolicy/core/error.hpp>

#include "byte_model.hpp"
#include "support/source_dir.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

Task choice_task(const TextModel& model) {
  Task task;
  task.text.body = "Birds sing.";
  task.body = model.encode(task.text.body);
  const PromptForm form{model, false};
  task.language = {
      form.ask(task.text.body, {.text = "\nA trout is a kind of",
                                .lead_in = "",
                                .answers = {" fish"},
                                .choices = {" fish", " bird"},
                                .max_tokens = 9}),
      form.ask(
          task.text.body,
          {.text = "\nWhat sings?", .lead_in = "What sings is", .answers = {"birds"}, .max_tokens = 12})};
  return task;
}

}  // namespace

TEST_CASE("a task as JSON holds its texts and the tokens that this model reads") {
  for (const bool words : {false, true}) {
    const TextModel model = words ? random_word_model() : random_text_model();
    const auto json = task_as_json(model, {Suite::keys, 64, 5, 2}, choice_task(model));
    CHECK(json["suite"] == "keys");
    CHECK(json["tokens"] == 64);
    CHECK(json["seed"] == 5);
    CHECK(json["number"] == 2);
    CHECK(json["ends"] == model.ends());
    CHECK(json["body"]["text"] == "Birds sing.");
    CHECK(json["body"]["tokens"] == model.encode("Birds sing."));
    REQUIRE(json["questions"].size() == 2);
    const auto& choice = json["questions"][0];
    CHECK(model.decode(choice["tokens"].get<std::vector<int>>()) == "\nA trout is a kind of");
    CHECK(choice["choices"][1]["text"] == " bird");
    CHECK(model.decode(choice["choices"][1]["tokens"].get<std::vector<int>>()) == " bird");
    const auto& open = json["questions"][1];
    CHECK(model.decode(open["tokens"].get<std::vector<int>>()) == "\nWhat sings? What sings is");
    CHECK(open["text"] == "\nWhat sings? What sings is");
    CHECK(open["rule"] == "contains");
    CHECK(open["answers"] == std::vector<std::string>{"birds"});
    CHECK(open["choices"].empty());
    CHECK(open["max_tokens"] == 12);
  }
}

TEST_CASE("the answers of questions about facts begin what the model writes") {
  const auto model = random_text_model();
  const auto tasks =
      draw_tasks(model, Suite::keys, {.length = 1500, .questions = 2, .per_text = 2}, 1, evaluation_text());
  const auto json = task_as_json(model, {Suite::keys, 1500, 1, 0}, tasks.at(0));
  REQUIRE(json["questions"].size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& question = json["questions"][i];
    CHECK(question["rule"] == "begins");
    CHECK(question["text"] == tasks[0].text.questions[i].text);
    CHECK(question["answers"] == std::vector<std::string>{tasks[0].text.questions[i].answer});
    CHECK(question["max_tokens"] >= tasks[0].text.questions[i].answer.size());
  }
}

TEST_CASE("texts that ask nothing are no tasks for others") {
  const auto model = random_text_model();
  Task task;
  task.follows = {1};
  CHECK_THROWS_WITH_AS(static_cast<void>(task_as_json(model, {Suite::perplexity, 64, 1, 0}, task)),
                       doctest::Contains("perplexity asks no questions"), ConfigError);
}

// bench/peers scores by the same cases (tests/docs/peers_test.py).
TEST_CASE("the rule that scores answers") {
  std::ifstream file{testing::source_dir() + "/tests/tools/data/scored_answers.json"};
  const auto cases = nlohmann::json::parse(file);
  REQUIRE(cases.size() > 5);
  for (const auto& item : cases) {
    LanguageQuestion question;
    question.answers = item["answers"].get<std::vector<std::string>>();
    CHECK_MESSAGE(score(question, item["output"].get<std::string>()) == item["found"].get<double>(),
                  item.dump());
  }
}
