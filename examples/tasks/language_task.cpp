// SPDX-License-Identifier: Apache-2.0
#include "language_task.hpp"

#include <algorithm>
#include <cctype>

#include <kvpolicy/core/error.hpp>

#include "families.hpp"

namespace kvpolicy::tools {

LanguageTask draw_language_task(const LanguageTaskConfig& config, std::string_view prose,
                                const CountTokens& count) {
  require(config.questions > 0, "a task needs a question");
  // Families draw from streams of their own.
  Random random{config.seed,
                config.length * task_family_names.size() + static_cast<std::size_t>(config.family),
                config.number};
  const TaskSource source{config, prose, count, random};
  switch (config.family) {
    case TaskFamily::vt: return draw_variable_chain(source);
    case TaskFamily::cwe: return draw_common_words(source);
    case TaskFamily::fwe: return draw_frequent_words(source);
    case TaskFamily::qa_1:
    case TaskFamily::qa_2: return draw_documents(source);
    default: return is_choice(config.family) ? draw_choices(source) : draw_needles(source);
  }
}

std::size_t length_of(const LanguageTask& task, const LanguageTaskConfig& config, const CountTokens& count) {
  std::size_t tail = 0;
  for (const LanguageQuestion& question : task.questions) {
    tail = std::max(tail, count(question.prompt()) + question.max_tokens);
  }
  return config.overhead + count(task.body) + tail;
}

double score(const LanguageQuestion& question, std::string_view output) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  const auto found = std::ranges::count_if(question.answers, [&](const std::string& answer) {
    return std::search(output.begin(), output.end(), answer.begin(), answer.end(), same) != output.end();
  });
  return static_cast<double>(found) / static_cast<double>(question.answers.size());
}

}  // namespace kvpolicy::tools
