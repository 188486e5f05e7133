// SPDX-License-Identifier: Apache-2.0
//
// Choices between endings. A body shows four finished sentences of the family; each question begins
// another one.
#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include "../common/words.hpp"
#include "families.hpp"
#include "haystack.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::size_t examples_shown = 4;
constexpr std::size_t choices_offered = 4;

// A sentence without its end, and the ends that it may have.
struct Item {
  std::string beginning;
  std::vector<std::string> ends;  // the right one first
};

std::string_view article_of(std::string_view word) {
  return std::string_view{"aeiou"}.find(word.front()) == std::string_view::npos ? "a " : "an ";
}

// `right` and others of `all`.
std::vector<std::string> ends_from(std::string_view right, std::vector<std::string_view> all,
                                   Random& random) {
  random.shuffle(all);
  std::vector<std::string> ends{std::string{right}};
  for (const std::string_view one : all) {
    if (one != right && ends.size() < choices_offered) ends.emplace_back(one);
  }
  return ends;
}

std::vector<Item> items_of_kind(Random& random) {
  std::vector<std::string_view> names;
  for (const WordKind& kind : word_kinds()) names.push_back(kind.name);
  std::vector<Item> items;
  for (const WordKind& kind : word_kinds()) {
    for (const std::string_view word : words_in(kind.words)) {
      const bool mass = kind.name == "colour" || kind.name == "metal";
      std::string beginning{mass ? "" : article_of(word)};
      beginning.append(word).append(" is a kind of");
      beginning.front() = static_cast<char>(beginning.front() - 'a' + 'A');
      items.push_back({std::move(beginning), ends_from(kind.name, names, random)});
    }
  }
  return items;
}

std::vector<Item> items_of_pairs(std::span<const WordPair> pairs, std::string_view before, Random& random) {
  std::vector<std::string_view> seconds;
  for (const WordPair& pair : pairs) seconds.push_back(pair.second);
  std::vector<Item> items;
  for (const WordPair& pair : pairs) {
    std::string beginning{before};
    beginning.append(pair.first).append(" is");
    items.push_back({std::move(beginning), ends_from(pair.second, seconds, random)});
  }
  return items;
}

std::vector<Item> items_of_numbers(Random& random) {
  std::vector<Item> items;
  while (items.size() < 200) {
    const std::size_t first = 10 + random.below(90);
    const std::size_t second = 10 + random.below(90);
    if (first == second) continue;
    items.push_back(
        {"Of " + std::to_string(first) + " and " + std::to_string(second) + ", the larger number is",
         {std::to_string(std::max(first, second)), std::to_string(std::min(first, second))}});
  }
  return items;
}

std::vector<Item> items_of(TaskFamily family, Random& random) {
  switch (family) {
    case TaskFamily::choice_kind: return items_of_kind(random);
    case TaskFamily::choice_capital: return items_of_pairs(capitals(), "The capital of ", random);
    case TaskFamily::choice_opposite: return items_of_pairs(opposites(), "The opposite of ", random);
    default: return items_of_numbers(random);
  }
}

LanguageQuestion offer(std::string text, std::vector<std::string> ends, Random& random) {
  LanguageQuestion question;
  question.text = std::move(text);
  question.answers = {ends.front()};
  random.shuffle(ends);
  question.choices = std::move(ends);
  return question;
}

// A sentence or line of usual length, the first that begins after `at` in the text, as [begin, end)
// in `sentences()`.
std::size_t usual_sentence(const Haystack& haystack, std::size_t at) {
  const std::vector<std::size_t>& starts = haystack.sentences();
  for (std::size_t i = 1; i + 1 < starts.size(); ++i) {
    const std::size_t bytes = starts[i + 1] - starts[i];
    if (starts[i] > at && bytes >= 40 && bytes <= 160 && haystack.text()[starts[i]] != ' ') return i;
  }
  throw ConfigError{"the prose has no sentence of 40 to 160 bytes for thousands of bytes"};
}

std::string sentence_of(const Haystack& haystack, std::size_t i) {
  const std::size_t begin = haystack.sentences()[i];
  return without_end_space(
      std::string_view{haystack.text()}.substr(begin, haystack.sentences()[i + 1] - begin));
}

LanguageTask draw_ending(const TaskSource& source) {
  const Haystack haystack{source.prose, source.config.length, source.random};
  const std::string_view text = haystack.text();
  const std::size_t right = usual_sentence(haystack, text.size() * 3 / 4);
  // What stands before the ending is the body but for its last sentence: that is the question, so
  // that there is something to read after the body.
  const std::size_t asks = haystack.sentences()[right - 1];
  const std::size_t ends = haystack.sentences()[right];
  const std::string separator{text[ends - 1]};
  std::vector<std::string> choices{separator + sentence_of(haystack, right)};
  while (choices.size() < choices_offered) {
    const Haystack other{source.prose, 400, source.random};
    std::string one = separator + sentence_of(other, usual_sentence(other, 0));
    if (std::ranges::find(choices, one) == choices.end()) choices.push_back(std::move(one));
  }
  LanguageTask task;
  const std::string before_question{asks == 0 ? ' ' : text[asks - 1]};
  task.questions.push_back(offer(before_question + without_end_space(text.substr(asks, ends - asks)),
                                 std::move(choices), source.random));
  const std::string_view context = text.substr(0, asks);
  std::vector<std::size_t> words;  // where they begin, from the last one on
  for (std::size_t at = asks; at > 0; --at) {
    if (at < asks && (at == 1 || context[at - 1] == ' ' || context[at - 1] == '\n')) words.push_back(at);
  }
  task.body = fit_body(source.config, source.count, task.questions, 1, words.size(), [&](std::size_t parts) {
    return without_end_space(context.substr(words[parts - 1]));
  });
  return task;
}

}  // namespace

LanguageTask draw_choices(const TaskSource& source) {
  if (source.config.family == TaskFamily::choice_ending) return draw_ending(source);
  // All tasks of a seed share one order of items, of which each asks for its own.
  Random order{source.config.seed, static_cast<std::uint64_t>(source.config.family), 0};
  std::vector<Item> items = items_of(source.config.family, order);
  order.shuffle(items);
  const std::size_t questions = std::min(source.config.questions, items.size() - examples_shown);
  LanguageTask task;
  const auto finished = [](const Item& item) { return item.beginning + " " + item.ends.front() + "."; };
  for (std::size_t i = 0; i < examples_shown; ++i) {
    task.body.append(i == 0 ? "" : "\n").append(finished(items[i]));
  }
  const std::size_t asked = items.size() - examples_shown;
  for (std::size_t i = 0; i < questions; ++i) {
    Item& item = items[examples_shown + (source.config.number * questions + i) % asked];
    for (std::string& end : item.ends) end.insert(0, " ");
    task.questions.push_back(offer("\n" + item.beginning, item.ends, source.random));
  }
  reserve_answers(task.questions, source.count);
  return task;
}

}  // namespace kvpolicy::tools
