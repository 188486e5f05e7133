// SPDX-License-Identifier: Apache-2.0
#include "needles.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include "../common/asked_question.hpp"
#include "../common/key_format.hpp"
#include "../common/random.hpp"
#include "../common/retrieval_text.hpp"
#include "../common/words.hpp"
#include "../tasks/haystack.hpp"
#include "../tasks/language_task.hpp"

namespace kvpolicy::tools {

namespace {

[[noreturn]] void fail_to_draw(const NeedleConfig& config) {
  throw ConfigError(message("no text of ", config.length, " tokens has a fact within ", config.tolerance,
                            " of depth ", config.depth));
}

// `body` has the right answer in the bytes from `first` on, as many as `bytes`.
reference::NeedleSample sample_of(const TextModel& model, const std::string& body, std::size_t first,
                                  std::size_t bytes, const std::vector<int>& question,
                                  std::vector<int> answer) {
  reference::NeedleSample sample{.prompt = model.encode(body), .answer = std::move(answer)};
  sample.needle = model.tokens_before(sample.prompt, body, first);
  sample.needle_tokens = model.tokens_before(sample.prompt, body, first + bytes) - sample.needle;
  sample.prompt.insert(sample.prompt.end(), question.begin(), question.end());
  return sample;
}

reference::NeedleSample draw_trained_needle(const TextModel& model, std::string_view plain,
                                            const NeedleConfig& config) {
  constexpr std::uint64_t draws = 10'000;
  for (std::uint64_t draw = 0; draw < draws; ++draw) {
    const RetrievalText text =
        draw_text_in_tokens(model, plain, config.length,
                            {.questions = questions_per_text(config.length, config.reasoning),
                             .two_step = config.reasoning,
                             .seed = config.seed,
                             .number = config.number * draws + draw});
    const Question* nearest = nullptr;
    double off = config.tolerance;
    for (const Question& question : text.questions) {
      const double depth =
          1.0 - static_cast<double>(question.distance) / static_cast<double>(text.body.size());
      if (std::abs(depth - config.depth) <= off) {
        nearest = &question;
        off = std::abs(depth - config.depth);
      }
    }
    if (nearest == nullptr) continue;
    // A fact is its answer and a space.
    const std::size_t first = text.body.size() - nearest->distance - 1 - nearest->answer.size();
    const AskedQuestion asked{model, text.body, *nearest};
    return sample_of(model, text.body, first, nearest->answer.size(), asked.question(), asked.answer());
  }
  fail_to_draw(config);
}

// Two things have an owner each, who has a pass key. Without the fact that names its owner, nothing
// says which of the two pass keys belongs to a thing.
LanguageTask draw_owners(const LanguageTaskConfig& config, std::string_view prose, const CountTokens& count) {
  Random random{config.seed, config.length, config.number};
  const std::vector<std::string> things = draw_things(random, 2);
  const std::vector<std::string> owners = draw_names(random, 2);
  std::vector<std::string> keys;
  std::vector<Needle> needles;
  while (keys.size() < 2) {
    const std::string key = draw_digits(random, 5);
    if (std::ranges::count(keys, key) > 0 || prose.find(key) != std::string_view::npos) continue;
    const std::size_t i = keys.size();
    keys.push_back(key);
    needles.push_back({"The owner of the " + things[i] + " is " + owners[i] + ". The pass key of " +
                           owners[i] + " is " + key + '.',
                       i == 0 ? config.depths.front() : draw_depth(random)});
  }
  LanguageTask task;
  task.questions.push_back({.text = "\nWhat is the pass key of the owner of the " + things[0] + '?',
                            .lead_in = "The pass key of the owner of the " + things[0] + " is",
                            .answers = {keys[0]}});
  const Haystack haystack{prose, config.length, random};
  task.body = fit_body(config, count, task.questions, needles.size(), haystack.words(),
                       [&](std::size_t words) { return haystack.with(words, needles); });
  task.questions.front().depth =
      static_cast<double>(task.body.find(keys[0])) / static_cast<double>(task.body.size());
  return task;
}

reference::NeedleSample draw_worded_needle(const TextModel& model, std::string_view plain,
                                           const NeedleConfig& config) {
  constexpr std::uint64_t draws = 100;
  const CountTokens count = [&](std::string_view text) { return model.encode_after({}, text).size(); };
  for (std::uint64_t draw = 0; draw < draws; ++draw) {
    const LanguageTaskConfig drawing{.family = TaskFamily::niah_depths,
                                     .length = config.length,
                                     .overhead = model.encode("").size(),
                                     .depths = {config.depth},
                                     .seed = config.seed,
                                     .number = config.number * draws + draw};
    const LanguageTask task =
        config.reasoning ? draw_owners(drawing, plain, count) : draw_language_task(drawing, plain, count);
    const LanguageQuestion& question = task.questions.front();
    if (std::abs(question.depth - config.depth) > config.tolerance) continue;
    const std::string& key = question.answers.front();
    return sample_of(model, task.body, task.body.find(key), key.size(),
                     model.encode_after(task.body, question.prompt()),
                     model.encode_after(task.body + question.prompt(), ' ' + key));
  }
  fail_to_draw(config);
}

}  // namespace

reference::NeedleSample draw_needle(const TextModel& model, std::string_view plain,
                                    const NeedleConfig& config) {
  return model.config().vocabulary == 256 ? draw_trained_needle(model, plain, config)
                                          : draw_worded_needle(model, plain, config);
}

reference::AnswerCheck says_key(const TextModel& model, const reference::NeedleSample& sample) {
  constexpr const char* digits = "0123456789";
  const std::string answer = model.decode(sample.answer);  // "The key of Bamelo is 48213."
  const std::size_t first = answer.find_first_of(digits);
  const std::size_t last = answer.find_last_of(digits);
  require(first != std::string::npos, "says_key: the answer '", answer, "' has no digits");
  return {.judge = [&model, key = answer.substr(first, last + 1 - first)](
                       std::span<const int> said) -> std::optional<bool> {
    const auto end = std::ranges::find_if(said, [&](int token) { return model.is_end(token); });
    const std::string text = model.decode({said.begin(), end});
    const std::size_t begin = std::min(text.find_first_of(digits), text.size());
    const std::size_t past = std::min(text.find_first_not_of(digits, begin), text.size());
    const std::string_view number = std::string_view{text}.substr(begin, past - begin);
    if (number.starts_with(key)) return true;
    const bool goes_on = end == said.end() && past == text.size() && key.starts_with(number);
    return goes_on ? std::nullopt : std::optional{false};
  }};
}

}  // namespace kvpolicy::tools
