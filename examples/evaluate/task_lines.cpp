// SPDX-License-Identifier: Apache-2.0
#include "task_lines.hpp"

#include <string>
#include <utility>

#include <kvpolicy/core/error.hpp>

#include "../common/asked_question.hpp"

namespace kvpolicy::tools {
namespace {

using Json = nlohmann::ordered_json;

Json as_json(const TextModel& model, const std::string& body, const LanguagePrompt& prompt) {
  const LanguageQuestion& question = prompt.question;
  Json choices = Json::array();
  for (const std::string& choice : question.choices) {
    choices.push_back({{"text", choice}, {"tokens", model.encode_after(body + prompt.text, choice)}});
  }
  return {{"text", prompt.text},    {"tokens", prompt.tokens},           {"answers", question.answers},
          {"rule", "contains"},     {"max_tokens", question.max_tokens}, {"choices", std::move(choices)},
          {"depth", question.depth}};
}

Json as_json(const TextModel& model, const std::string& body, const Question& question) {
  const AskedQuestion asked{model, body, question};
  // An answer may be spelled with more tokens than the right one has, at most one for each byte.
  std::string answer = model.decode(asked.answer());
  const std::size_t bytes = answer.size();
  return {{"text", model.decode(asked.question())},
          {"tokens", asked.question()},
          {"answers", {std::move(answer)}},
          {"rule", "begins"},
          {"max_tokens", bytes},
          {"choices", Json::array()}};
}

}  // namespace

Json task_as_json(const TextModel& model, const TaskName& name, const Task& task) {
  Json questions = Json::array();
  for (const LanguagePrompt& prompt : task.language) {
    questions.push_back(as_json(model, task.text.body, prompt));
  }
  for (const Question& question : task.text.questions) {
    questions.push_back(as_json(model, task.text.body, question));
  }
  require(!questions.empty(), "--write-tasks: the suite ", name_of(name.suite),
          " asks no questions; other suites do");
  return {{"suite", name_of(name.suite)},
          {"tokens", name.length},
          {"seed", name.seed},
          {"number", name.number},
          {"ends", model.ends()},
          {"body", {{"text", task.text.body}, {"tokens", task.body}}},
          {"questions", std::move(questions)}};
}

}  // namespace kvpolicy::tools
