// SPDX-License-Identifier: Apache-2.0
#include <common/retrieval_text.hpp>

#include <cmath>
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

// The text without the sentences "The key of ...... is 12345. " and "...... is older than .......
// ".
std::string without_facts(std::string text) {
  for (std::size_t at = 0; (at = text.find("The key of ", at)) != std::string::npos;) {
    text.erase(at, 28);
  }
  for (std::size_t at = 0; (at = text.find(" is older than ", at)) != std::string::npos;) {
    text.erase(at - 6, 29);
  }
  return text;
}

}  // namespace

TEST_CASE("text, one question and its answer have the requested length") {
  const std::string plain = held_out_text();
  for (const std::size_t length : {640UL, 1024UL, 8192UL}) {
    for (const bool lead_in : {false, true}) {
      const auto text =
          draw_text(plain, {.length = length, .questions = 5, .lead_in = lead_in, .seed = 3, .number = 2});
      for (const Question& question : text.questions) {
        CHECK(text.body.size() + question.text.size() + question.answer.size() == length);
      }
    }
  }
}

TEST_CASE("a question asks for a fact that is hidden once, at the stated distance") {
  const std::string plain = held_out_text();
  const auto text = draw_text(plain, {.length = 4096, .questions = 32, .seed = 1});
  CHECK(text.facts == 32);
  REQUIRE(text.questions.size() == 32);
  for (const Question& question : text.questions) {
    const std::string name = question.answer.substr(11, 6);
    CHECK(question.text == "\nWhat is the key of " + name + "? ");
    CHECK(count(text.body, question.answer + ' ') == 1);
    CHECK(count(text.body, name) == 1);
    CHECK(text.body.find(question.answer) + 28 + question.distance == text.body.size());
  }
  CHECK(plain.find(without_facts(text.body)) != std::string::npos);
}

TEST_CASE("a two-step question names a pair of which the older one has the key") {
  const std::string plain = held_out_text();
  const auto text = draw_text(plain, {.length = 2048, .questions = 9, .two_step = true, .seed = 1});
  REQUIRE(text.questions.size() == questions_per_text(2048, true));
  for (const Question& question : text.questions) {
    const std::string elder = question.answer.substr(11, 6);
    const std::size_t pair = question.text.find(" of ", 20) + 4;
    const std::string first = question.text.substr(pair, 6);
    const std::string second = question.text.substr(pair + 11, 6);
    CHECK((first == elder) != (second == elder));
    CHECK(count(text.body, elder + " is older than " + (first == elder ? second : first)) == 1);
    CHECK(count(text.body, question.answer) == 1);
  }
  CHECK(plain.find(without_facts(text.body)) != std::string::npos);
}

TEST_CASE("a seed and a number give one text, others another") {
  const std::string plain = held_out_text();
  const auto draw = [&](std::uint64_t seed, std::uint64_t number) {
    return draw_text(plain, {.length = 1024, .questions = 1, .seed = seed, .number = number});
  };
  CHECK(draw(5, 0).body == draw(5, 0).body);
  CHECK(draw(5, 0).body != draw(5, 1).body);
  CHECK(draw(5, 0).body != draw(6, 0).body);
}

TEST_CASE("a fact that is asked for is not always first if sentences meet") {
  // Slices without a boundary inside: all facts are at one position, in random order.
  std::string plain;
  for (int i = 0; i < 8; ++i) plain += std::string(1500, 'x') + ". ";
  std::size_t first = 0;
  for (std::uint64_t number = 0; number < 200; ++number) {
    const auto text = draw_text(plain, {.length = 512, .questions = 1, .number = number});
    first += text.body.find(text.questions[0].answer) < 28 ? 1 : 0;
  }
  CHECK(first > 20);
  CHECK(first < 90);  // 4 facts: 50 expected
}

TEST_CASE("lengths that cannot be are refused") {
  const std::string plain = held_out_text();
  CHECK_THROWS_AS(static_cast<void>(draw_text(plain, {.length = 100})), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(draw_text(plain, {.length = plain.size()})), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(draw_text(plain, {.lead_in = true, .two_step = true})), ConfigError);
  CHECK_NOTHROW(static_cast<void>(draw_text(plain, {.length = longest_text(plain)})));
}

TEST_CASE("heads are found and judged on texts that have nothing in common") {
  const std::string all = held_out_text();
  const std::string first = identification_text();
  const std::string rest = evaluation_text();
  CHECK(first + rest == all);
  CHECK(first.size() >= all.size() * 3 / 10);
  CHECK(first.size() < all.size() * 3 / 10 + 500);
  CHECK(first.back() == ' ');  // whole sentences
  CHECK_NOTHROW(static_cast<void>(draw_text(first, {.length = 16384})));
}

TEST_CASE("facts are hidden at the requested depths") {
  const std::string plain = held_out_text();
  for (const std::size_t length : {1024UL, 4096UL}) {
    const std::vector<double> depths{0.0, 0.05, 0.35, 0.5, 0.95, 1.0};
    const auto text = draw_text(plain, {.length = length, .questions = 6, .seed = 4, .depths = depths});
    REQUIRE(text.questions.size() == depths.size());
    CHECK(text.facts == depths.size());
    const std::string prose = without_facts(text.body);
    for (std::size_t i = 0; i < depths.size(); ++i) {
      // How much prose comes before the fact; a boundary is always near.
      const std::string fact = text.questions[i].answer + ' ';
      REQUIRE(count(text.body, fact) == 1);
      const std::string before = without_facts(text.body.substr(0, text.body.find(fact)));
      const double depth = static_cast<double>(before.size()) / static_cast<double>(prose.size());
      CHECK(std::abs(depth - depths[i]) * static_cast<double>(prose.size()) < 150);
    }
  }
  const auto deep = [&](std::vector<double> depths, bool two_step) {
    return draw_text(plain, {.length = 1024, .two_step = two_step, .depths = std::move(depths)});
  };
  CHECK_THROWS_AS(deep({1.5}, false), ConfigError);
  CHECK_THROWS_AS(deep({-0.1}, false), ConfigError);
  CHECK_THROWS_AS(deep({0.5}, true), ConfigError);
  CHECK_THROWS_AS(deep(std::vector<double>(33, 0.5), false), ConfigError);
}

TEST_CASE("the other answer of a two-step question is the younger one's key") {
  const auto text = draw_text(held_out_text(), {.length = 2048, .questions = 4, .two_step = true, .seed = 7});
  REQUIRE(text.questions.size() == 4);
  for (const Question& question : text.questions) {
    const std::string elder = question.answer.substr(11, 6);
    const std::string younger = question.other.substr(11, 6);
    CHECK(count(text.body, elder + " is older than " + younger + ". ") == 1);
    CHECK(count(text.body, question.other + ' ') == 1);
    CHECK(question.text.find(younger) != std::string::npos);
  }
}

TEST_CASE("a plain text is a slice that begins after a sentence") {
  const std::string plain = held_out_text();
  const auto text = draw_plain_text(plain, {.length = 3000, .seed = 1, .number = 2});
  CHECK(text.body.size() == 3000);
  CHECK(text.questions.empty());
  const std::size_t at = plain.find(text.body);
  REQUIRE(at != std::string::npos);
  CHECK(std::string{".:;?!"}.find(plain[at - 2]) != std::string::npos);
  CHECK_THROWS_AS(static_cast<void>(draw_plain_text(plain, {.length = plain.size()})), ConfigError);
}

TEST_CASE("facts about words are hidden once, and the last word answers") {
  const std::string plain = held_out_text();
  for (const bool lead_in : {false, true}) {
    const auto text = draw_text(
        plain, {.length = 4096, .questions = 32, .kind = FactKind::words, .lead_in = lead_in, .seed = 4});
    CHECK(text.facts == 12);
    REQUIRE(text.questions.size() == 12);
    std::set<std::string> asked;
    for (const Question& question : text.questions) {
      asked.insert(question.text);
      const std::size_t mark = question.text.find("? ");
      REQUIRE(mark != std::string::npos);
      const std::string fact = question.text.substr(mark + 2) + question.answer + ". ";
      CHECK(count(text.body, fact) == 1);
      CHECK(text.body.find(fact) + fact.size() == text.body.size() - question.distance);
      CHECK((question.answer.find(' ') == std::string::npos) == lead_in);
    }
    CHECK(asked.size() == 12);
  }
  CHECK(draw_text(plain, {.length = 640, .questions = 9, .kind = FactKind::words}).facts == 5);
  CHECK_THROWS_WITH_AS(static_cast<void>(draw_text(plain, {.kind = FactKind::words, .two_step = true})),
                       doctest::Contains("about keys"), ConfigError);
}
