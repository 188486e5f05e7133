// SPDX-License-Identifier: Apache-2.0
//
// Finds needles again by plain searches in the text of the prompt.
#include <cmath>
#include <cstddef>
#include <set>
#include <string>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

#include "common/retrieval_text.hpp"
#include "identify/needles.hpp"

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::string text_of(std::span<const int> tokens) {
  std::string text;
  for (const int token : tokens) text += static_cast<char>(token);
  return text;
}

}  // namespace

TEST_CASE("a needle is at the requested depth, and is what the question asks for") {
  const std::string plain = identification_text();
  for (const bool reasoning : {false, true}) {
    bool older_first = false;
    bool older_second = false;
    for (const std::size_t length : {640, 1024, 4096}) {
      for (const double depth : {0.0, 0.33, 0.5, 1.0}) {
        CAPTURE(reasoning);
        CAPTURE(length);
        CAPTURE(depth);
        const auto sample = draw_needle(random_text_model(), plain, {.length = length, .depth = depth, .reasoning = reasoning, .seed = 7});
        sample.check();
        const std::string prompt = text_of(sample.prompt);
        const std::string answer = text_of(sample.answer);
        CHECK(prompt.size() + answer.size() <= length);
        CHECK(prompt.substr(sample.needle, sample.needle_tokens) == answer);
        const std::size_t question = prompt.rfind("\nWhat is the key of ");
        REQUIRE(question != std::string::npos);
        CHECK(prompt.find(answer) == sample.needle);       // occurs once, and in the text
        CHECK(sample.needle + sample.needle_tokens < question);
        const double end = static_cast<double>(sample.needle + sample.needle_tokens + 1);
        CHECK(std::abs(end / static_cast<double>(question) - depth) <= 0.05 + 1e-9);
        const std::string name = answer.substr(11, 6);
        const std::string asked = prompt.substr(question);
        if (!reasoning) {
          CHECK(asked == "\nWhat is the key of " + name + "? ");
          continue;
        }
        const std::size_t other_at = asked.find(name) == 33 ? 44 : 33;
        (other_at == 44 ? older_first : older_second) = true;
        const std::string other = asked.substr(other_at, 6);
        CHECK(prompt.find(name + " is older than " + other + ". ") < question);
        CHECK(prompt.find("The key of " + other + " is ") < question);  // the wrong answer
      }
    }
    if (reasoning) CHECK((older_first && older_second));
  }
}

TEST_CASE("needles are drawn by seed and number, and refused if there is no room for them") {
  const std::string plain = identification_text();
  const auto prompt = [&](const NeedleConfig& config) {
    return text_of(draw_needle(random_text_model(), plain, config).prompt);
  };
  std::set<std::string> drawn;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    for (std::uint64_t number = 0; number < 3; ++number) {
      const NeedleConfig config{.length = 700, .depth = 0.25, .seed = seed, .number = number};
      drawn.insert(prompt(config));
      CHECK(prompt(config) == prompt(config));
    }
  }
  CHECK(drawn.size() == 9);
  CHECK_THROWS_AS((void)prompt({.length = 50}), ConfigError);
  CHECK_THROWS_AS((void)prompt({.length = 640, .tolerance = -1.0}), ConfigError);
}
