// SPDX-License-Identifier: Apache-2.0
#include "language_suite.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include <reference_model/sampler.hpp>

#include "../common/distribution.hpp"

namespace kvpolicy::tools {
namespace {

// The logarithm of an ending's probability, by byte, so that long ones are not at a disadvantage.
double likelihood(const TextModel& model, const std::string& ending, std::string_view before,
                  const Sequence& asked, std::vector<float> logits, const Reading& reading) {
  const std::unique_ptr<Sequence> cache = asked.fork();
  const std::vector<int> tokens = model.encode_after(before, ending);
  double nats = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) logits = cache->decode(tokens[i - 1], reading);
    nats += surprise(logits, static_cast<std::size_t>(tokens[i]));
  }
  return -nats / static_cast<double>(ending.size());
}

double choose(const TextModel& model, const LanguageQuestion& question, std::string_view before,
              const Sequence& asked, const std::vector<float>& logits, const Reading& reading) {
  double best = -std::numeric_limits<double>::infinity();
  const std::string* chosen = nullptr;
  for (const std::string& ending : question.choices) {
    const double own = likelihood(model, ending, before, asked, logits, reading);
    if (own > best) {
      best = own;
      chosen = &ending;
    }
  }
  return chosen != nullptr && *chosen == question.answers.front() ? 1 : 0;
}

// The depths of the pass keys in a text. A model may know one pass key and confuse ten, so a text
// with fewer questions than there are depths gets fewer pass keys, and the texts take the depths in
// turn.
std::vector<double> depths_of_text(const SuiteConfig& config, std::size_t number) {
  const std::vector<double> all = even_depths(config.depths);
  std::vector<double> own;
  for (std::size_t i = 0; i < std::min(config.per_text, all.size()); ++i) {
    own.push_back(all[(number * config.per_text + i) % all.size()]);
  }
  std::ranges::sort(own);
  return own;
}

}  // namespace

std::vector<Task> draw_language_tasks(const TextModel& model, TaskFamily family, const SuiteConfig& config,
                                      std::uint64_t seed, std::string_view plain) {
  const CountTokens count = [&](std::string_view text) {
    return model.tokenizer().encode(text, {.add_special = false}).size();
  };
  const PromptForm form{model, config.chat};
  LanguageTaskConfig drawing{
      .family = family, .length = config.length, .overhead = form.overhead(), .seed = seed};
  std::vector<Task> tasks;
  for (std::size_t left = config.questions; left > 0;) {
    drawing.questions = std::min(left, config.per_text);
    drawing.number = tasks.size();
    drawing.depths = depths_of_text(config, drawing.number);
    LanguageTask drawn = draw_language_task(drawing, plain, count);
    left -= std::min(left, drawn.questions.size());
    Task task;
    for (LanguageQuestion& question : drawn.questions) {
      task.language.push_back(form.ask(drawn.body, std::move(question)));
    }
    task.text.body = form.text(drawn.body);
    task.body = form.tokens(drawn.body);
    tasks.push_back(std::move(task));
  }
  return tasks;
}

LanguageAnswer answer_question(const TextModel& model, const LanguageQuestion& question,
                               std::string_view before, Sequence& cache, std::vector<float> logits,
                               const Reading& reading) {
  if (!question.choices.empty()) {
    return {choose(model, question, before, cache, logits, reading)};
  }
  LanguageAnswer answer;
  std::vector<int>& said = answer.said;
  // A model that has said everything that was asked for need not go on.
  while (answer.found < 1 && said.size() < question.max_tokens) {
    if (!said.empty()) logits = cache.decode(said.back(), reading);
    said.push_back(reference::likeliest(logits));
    if (model.is_end(said.back())) break;
    answer.found = score(question, model.decode(said));
  }
  return answer;
}

}  // namespace kvpolicy::tools
