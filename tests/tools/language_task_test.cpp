// SPDX-License-Identifier: Apache-2.0
#include <tasks/language_task.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/retrieval_text.hpp>
#include <kvpolicy/core/error.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

constexpr auto families = [] {
  std::array<TaskFamily, task_family_names.size()> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<TaskFamily>(i);
  return all;
}();

// A stand-in for a tokenizer: digits and punctuation one by one, letters by fives.
std::size_t count_tokens(std::string_view text) {
  std::size_t tokens = 0;
  std::size_t letters = 0;
  for (const char one : text) {
    const auto byte = static_cast<unsigned char>(one);
    if (std::isalpha(byte) != 0) {
      if (letters++ % 5 == 0) ++tokens;
      continue;
    }
    letters = 0;
    if (std::isspace(byte) == 0) ++tokens;
  }
  return tokens;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// What follows `before` in the text, up to a character of `ends`.
std::string after(const std::string& text, const std::string& before, const char* ends = " .,\n") {
  const std::size_t at = text.find(before);
  REQUIRE(at != std::string::npos);
  const std::size_t begin = at + before.size();
  return text.substr(begin, text.find_first_of(ends, begin) - begin);
}

std::string all_of(const LanguageTask& task) {
  std::ostringstream text;
  text << task.body;
  for (const LanguageQuestion& question : task.questions) {
    text << '|' << question.text << '|' << question.lead_in << '|' << question.max_tokens;
    for (const std::string& answer : question.answers) text << '|' << answer;
    for (const std::string& choice : question.choices) text << '|' << choice;
  }
  return text.str();
}

const std::string& prose() {
  static const std::string text = evaluation_text();
  return text;
}

LanguageTask draw(const LanguageTaskConfig& config) {
  return draw_language_task(config, prose(), count_tokens);
}

LanguageTask draw(TaskFamily family, std::size_t length = 1024, std::uint64_t number = 0) {
  return draw({.family = family, .length = length, .number = number});
}

}  // namespace

TEST_CASE("a family, a length, a seed and a number give one task") {
  for (const TaskFamily family : families) {
    CAPTURE(name_of(family));
    std::set<std::string> different;
    for (const std::uint64_t seed : {1U, 2U}) {
      for (const std::uint64_t number : {0U, 1U, 7U}) {
        const LanguageTaskConfig config{.family = family, .seed = seed, .number = number};
        const std::string text = all_of(draw(config));
        CHECK(text == all_of(draw(config)));
        different.insert(text);
      }
    }
    CHECK(different.size() == 6);
  }
  // The same numbers on every machine.
  CHECK(draw(TaskFamily::niah_single_2).questions.front().answers.front() == "4854346");
}

TEST_CASE("a task has at most the requested tokens and at least 95 % of them") {
  for (const TaskFamily family : families) {
    const bool is_short = is_choice(family) && family != TaskFamily::choice_ending;
    for (const std::size_t length : {1021UL, 2048UL, 4099UL}) {
      for (const std::size_t overhead : {0UL, 37UL}) {
        const LanguageTaskConfig config{
            .family = family, .length = length, .overhead = overhead, .questions = 3, .number = length};
        const LanguageTask task = draw(config);
        CAPTURE(name_of(family));
        std::size_t longest = 0;
        for (const LanguageQuestion& question : task.questions) {
          std::size_t answer = 0;
          for (const std::string& one : question.answers) answer += count_tokens(one);
          CHECK(answer <= question.max_tokens);
          longest = std::max(
              longest, count_tokens(question.text) + count_tokens(question.lead_in) + question.max_tokens);
        }
        const std::size_t tokens = overhead + count_tokens(task.body) + longest;
        CHECK(tokens <= length);
        CHECK(tokens == length_of(task, config, count_tokens));
        // A line of UUIDs is longer than a twentieth of the shortest text.
        const std::size_t line = family == TaskFamily::niah_multikey_3 ? 90 : 0;
        if (!is_short) CHECK(tokens + std::max(length / 20, line) >= length);
      }
    }
  }
}

TEST_CASE("a needle stands once in the text, in a sentence about what is asked for") {
  using enum TaskFamily;
  for (const TaskFamily family : {niah_depths, niah_single_1, niah_single_2, niah_single_3, niah_multikey_1,
                                  niah_multikey_2, niah_multikey_3, niah_multivalue, niah_multiquery}) {
    CAPTURE(name_of(family));
    for (std::uint64_t number = 0; number < 5; ++number) {
      const LanguageTask task =
          draw({.family = family, .length = 1500, .questions = 3, .depths = {0.1, 0.5}, .number = number});
      for (const LanguageQuestion& question : task.questions) {
        CHECK(question.answers.size() == (family == niah_multivalue || family == niah_multiquery ? 4 : 1));
        CHECK(std::set<std::string>{question.answers.begin(), question.answers.end()}.size() ==
              question.answers.size());
        std::size_t first = task.body.size();
        for (const std::string& answer : question.answers) {
          REQUIRE(count(task.body, answer) == 1);
          CHECK(count(question.prompt(), answer) == 0);
          const std::size_t at = task.body.find(answer);
          first = std::min(first, at);
          const std::size_t of = task.body.rfind(" of the ", at) + 8;
          const std::string thing = task.body.substr(of, at - 4 - of);
          CHECK(task.body.substr(at - 4, 4) == " is ");
          CHECK(count(question.text, thing) == 1);
          CHECK(count(task.body, thing) == (family == niah_multivalue ? 4 : 1));
        }
        CHECK(question.depth ==
              doctest::Approx(static_cast<double>(first) / static_cast<double>(task.body.size())));
      }
      const bool several =
          family == niah_multikey_1 || family == niah_multikey_2 || family == niah_multikey_3;
      CHECK(task.questions.size() == (several ? 3 : family == niah_depths ? 2 : 1));
    }
  }
}

TEST_CASE("pass keys stand at their depths") {
  const std::vector<double> depths{0, 0.2, 0.5, 0.8, 1};
  for (std::uint64_t number = 0; number < 20; ++number) {
    const LanguageTask task = draw({.length = 4096, .depths = depths, .number = number});
    REQUIRE(task.questions.size() == depths.size());
    for (std::size_t i = 0; i < depths.size(); ++i) {
      const auto at = static_cast<double>(task.body.find(task.questions[i].answers.front()));
      CHECK(std::abs(at / static_cast<double>(task.body.size()) - depths[i]) < 0.03);
    }
  }
}

TEST_CASE("variables have the value that they reach") {
  for (std::uint64_t number = 0; number < 10; ++number) {
    const LanguageTask task = draw(TaskFamily::vt, 1024, number);
    const LanguageQuestion& question = task.questions.front();
    // Assignments are read in their order, as a program would run them.
    std::map<std::string, std::string> values;
    std::istringstream words{task.body};
    for (std::string word; words >> word;) {
      if (word != "VAR") continue;
      std::string name;
      std::string value;
      words >> name >> value >> value;
      if (value == "VAR") {
        words >> value;
        value = values.at(value.substr(0, 5));
      } else {
        value.pop_back();
      }
      values[name] = value;
    }
    CHECK(values.size() == 10);
    const std::string asked = after(question.text, "the value ");
    std::set<std::string> right;
    for (const auto& [name, value] : values) {
      if (value == asked) right.insert(name);
    }
    CHECK(right == std::set<std::string>{question.answers.begin(), question.answers.end()});
  }
}

TEST_CASE("the words asked for are the most frequent ones, by a margin") {
  for (const TaskFamily family : {TaskFamily::cwe, TaskFamily::fwe}) {
    for (const std::size_t length : {1024UL, 5000UL}) {
      CAPTURE(name_of(family));
      const LanguageTask task = draw(family, length);
      std::map<std::string, std::size_t> counts;
      std::istringstream words{task.body.substr(task.body.rfind('\n'))};
      for (std::string word; words >> word;) {
        if (std::isalpha(static_cast<unsigned char>(word.front())) != 0) ++counts[word];
      }
      const std::vector<std::string>& answers = task.questions.front().answers;
      CHECK(answers.size() == (family == TaskFamily::cwe ? 10 : 3));
      std::size_t fewest = length;
      for (const std::string& answer : answers) {
        REQUIRE(counts.contains(answer));
        fewest = std::min(fewest, counts[answer]);
        counts.erase(answer);
      }
      REQUIRE(!counts.empty());
      for (const auto& [word, times] : counts) CHECK(times * 4 <= fewest * 3);
      if (family == TaskFamily::cwe) CHECK(fewest == (length < 4096 ? 6 : 30));
    }
  }
}

TEST_CASE("documents answer in one step or in two") {
  for (std::uint64_t number = 0; number < 10; ++number) {
    for (const TaskFamily family : {TaskFamily::qa_1, TaskFamily::qa_2}) {
      const LanguageTask task = draw({.family = family, .questions = 2, .number = number});
      REQUIRE(task.questions.size() == 2);
      for (const LanguageQuestion& question : task.questions) {
        const bool two = family == TaskFamily::qa_2;
        const std::string person = two ? question.text.substr(37, 13) : question.text.substr(19, 13);
        CHECK(count(task.body, person) == 1);
        const std::string town = after(task.body, person + " was born in the town of ");
        CHECK(count(task.body, town) == 2);
        const std::string land = after(task.body, town + " is a town in the province of ");
        CHECK(count(task.body, land) == 1);
        CHECK(question.answers == std::vector<std::string>{two ? land : town});
      }
    }
  }
}

TEST_CASE("one of the choices is right") {
  using enum TaskFamily;
  for (const TaskFamily family :
       {choice_kind, choice_capital, choice_opposite, choice_larger, choice_ending}) {
    CAPTURE(name_of(family));
    std::set<std::string> asked;
    for (std::uint64_t number = 0; number < 4; ++number) {
      const LanguageTask task = draw({.family = family, .questions = 10, .number = number});
      CHECK(task.questions.size() == (family == choice_ending ? 1 : 10));
      for (const LanguageQuestion& question : task.questions) {
        const std::set<std::string> choices{question.choices.begin(), question.choices.end()};
        CHECK(choices.size() == (family == choice_larger ? 2 : 4));
        CHECK(choices.size() == question.choices.size());
        REQUIRE(question.answers.size() == 1);
        CHECK(choices.contains(question.answers.front()));
        CHECK(count(task.body, question.text) == 0);
        asked.insert(question.text);
        if (family == choice_larger) {
          const int first = std::stoi(question.choices[0]);
          const int second = std::stoi(question.choices[1]);
          const int least = std::min(first, second);
          const int most = std::max(first, second);
          CHECK(std::stoi(question.answers.front()) == most);
          CHECK(count(question.text, std::to_string(least)) > 0);
        }
        for (const std::string& choice : question.choices) {
          const bool follows = count(prose(), question.text + choice) > 0;
          if (family == choice_ending) CHECK(follows == (choice == question.answers.front()));
        }
      }
      if (family == choice_ending) CHECK(count(prose(), task.body + task.questions.front().text) == 1);
    }
    // No question comes twice; two of the numbers may be the same.
    CHECK(asked.size() >= (family == choice_ending ? 4 : family == choice_larger ? 39 : 40));
  }
}

TEST_CASE("the right choice is at no preferred position") {
  std::array<std::size_t, 4> found{};
  for (std::uint64_t number = 0; number < 10; ++number) {
    for (const LanguageQuestion& question :
         draw({.family = TaskFamily::choice_kind, .questions = 12, .number = number}).questions) {
      const auto at = std::ranges::find(question.choices, question.answers.front());
      ++found[static_cast<std::size_t>(at - question.choices.begin())];
    }
  }
  for (const std::size_t times : found) CHECK(times > 15);
}

TEST_CASE("an output scores the share of answers in it") {
  const LanguageQuestion question{.answers = {"Alpha", "12345"}};
  CHECK(score(question, "They are ALPHA and 123456.") == 1);
  CHECK(score(question, "alph 12345") == 0.5);
  CHECK(score(question, "") == 0);
  CHECK(score(question, "1234 5 alph a") == 0);
}

TEST_CASE("what cannot be drawn is refused") {
  CHECK_THROWS_AS(draw({.questions = 0}), ConfigError);
  CHECK_THROWS_AS(draw({.depths = {}}), ConfigError);
  CHECK_THROWS_AS(draw({.depths = {1.5}}), ConfigError);
  CHECK_THROWS_AS(draw({.depths = {0.5, 0.2}}), ConfigError);
  CHECK_THROWS_AS(draw({.depths = {std::nan("")}}), ConfigError);
  for (const TaskFamily family : families) {
    CAPTURE(name_of(family));
    if (is_choice(family) && family != TaskFamily::choice_ending) continue;
    CHECK_THROWS_AS(draw(family, 0), ConfigError);
    CHECK_THROWS_AS(draw(family, 20), ConfigError);
  }
  // There are about 15,000 tokens of prose.
  CHECK_THROWS_WITH_AS(draw(TaskFamily::niah_depths, 60'000),
                       doctest::Contains("is longer than there is text for"), ConfigError);
  const LanguageTaskConfig config{.family = TaskFamily::niah_single_2};
  CHECK_THROWS_AS((void)draw_language_task(config, "", count_tokens), ConfigError);
  CHECK_THROWS_AS((void)draw_language_task({.family = TaskFamily::cwe}, "few words", count_tokens),
                  ConfigError);
  CHECK_THROWS_AS((void)draw_language_task({.family = TaskFamily::choice_ending}, "few words", count_tokens),
                  ConfigError);
}
