// SPDX-License-Identifier: Apache-2.0
//
// Finds needles again by plain searches in the text of the prompt.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

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

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
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
        const auto sample =
            draw_needle(random_text_model(), plain,
                        {.length = length, .depth = depth, .reasoning = reasoning, .seed = 7});
        sample.check();
        const std::string prompt = text_of(sample.prompt);
        const std::string answer = text_of(sample.answer);
        CHECK(prompt.size() + answer.size() <= length);
        CHECK(prompt.substr(sample.needle, sample.needle_tokens) == answer);
        const std::size_t question = prompt.rfind("\nWhat is the key of ");
        REQUIRE(question != std::string::npos);
        CHECK(prompt.find(answer) == sample.needle);  // occurs once, and in the text
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

TEST_CASE("a byte model's needles are those that its committed scores were found with") {
  const std::string plain = identification_text();
  std::uint64_t hash = 0xcbf29ce484222325U;
  std::size_t needles = 0;
  for (const bool reasoning : {false, true}) {
    const auto sample =
        draw_needle(random_text_model(), plain,
                    {.length = 1024, .depth = 0.35, .reasoning = reasoning, .seed = 2, .number = 9});
    for (const int token : sample.prompt) hash = (hash ^ static_cast<unsigned>(token)) * 0x100000001b3U;
    needles += sample.needle;
  }
  CHECK(hash == 0xd66bf010a64f2c1aU);
  CHECK(needles == 603);
}

TEST_CASE("a model with a tokenizer is asked for a number in prose, as near to the depth as asked for") {
  const std::string plain = identification_text();
  const TextModel model = random_word_model();
  for (const bool reasoning : {false, true}) {
    std::set<std::string> keys;
    for (const std::size_t length : {700, 1501}) {
      for (const double depth : {0.15, 0.5, 0.95}) {
        CAPTURE(reasoning);
        CAPTURE(length);
        CAPTURE(depth);
        const NeedleConfig config{
            .length = length, .depth = depth, .reasoning = reasoning, .seed = 7, .number = keys.size()};
        const auto sample = draw_needle(model, plain, config);
        sample.check();
        CHECK(sample.prompt.size() + sample.answer.size() <= length);
        const auto needle = sample.prompt.begin() + static_cast<std::ptrdiff_t>(sample.needle);
        const std::vector<int> range(needle, needle + static_cast<std::ptrdiff_t>(sample.needle_tokens));
        const std::string key = model.decode(range);
        CHECK(key.size() == 5);
        CHECK(key.find_first_not_of("0123456789") == std::string::npos);
        CHECK(model.decode(sample.answer) == ' ' + key);
        keys.insert(key);

        const std::string prompt = model.decode(sample.prompt);
        CHECK(count(prompt, key) == 1);
        const std::size_t question = prompt.rfind("\nWhat is the pass key of the ");
        REQUIRE(question != std::string::npos);
        const double at = static_cast<double>(prompt.find(key));
        CHECK(std::abs(at / static_cast<double>(question) - depth) <= 0.05 + 1e-9);

        const std::string body = prompt.substr(0, question);
        const std::string asked = prompt.substr(question + 29);
        const std::size_t skipped = reasoning ? 13 : 0;  // "owner of the "
        const std::string thing = asked.substr(skipped, asked.find('?') - skipped);
        CHECK(asked.ends_with((reasoning ? " The pass key of the owner of the " : " The pass key of the ") +
                              thing + " is"));
        if (!reasoning) {
          CHECK(count(body, "The pass key of the " + thing + " is " + key + ".") == 1);
          CHECK(count(body, "The pass key of ") == 1);
          continue;
        }
        const std::string owned = "The owner of the " + thing + " is ";
        REQUIRE(count(body, owned) == 1);
        const std::size_t name = body.find(owned) + owned.size();
        const std::string owner = body.substr(name, body.find('.', name) - name);
        CHECK(body.substr(name).starts_with(owner + ". The pass key of " + owner + " is " + key + "."));
        CHECK(count(body, "The owner of the ") == 2);  // the wrong answer
        CHECK(count(body, "The pass key of ") == 2);
        CHECK(count(body, owner) == 2);

        const auto again = draw_needle(model, plain, config);
        CHECK(again.prompt == sample.prompt);
        CHECK(again.needle == sample.needle);
      }
    }
    CHECK(keys.size() == 6);
    const auto drawn = [&](std::uint64_t seed, std::uint64_t number) {
      return draw_needle(model, plain,
                         {.length = 700, .reasoning = reasoning, .seed = seed, .number = number})
          .prompt;
    };
    CHECK(std::set{drawn(1, 0), drawn(1, 1), drawn(2, 0)}.size() == 3);
  }
  CHECK_THROWS_AS((void)draw_needle(model, plain, {.length = 50}), ConfigError);
  CHECK_THROWS_AS((void)draw_needle(model, plain, {.length = 700, .tolerance = -1.0}), ConfigError);
}

TEST_CASE("the first number that a model says is its answer") {
  const std::array<TextModel, 2> models{random_text_model(), random_word_model()};
  for (const TextModel& model : models) {
    const auto tokens = [&](const char* text) { return model.encode_after({}, text); };
    const auto judge = says_key(model, {.prompt = {}, .answer = tokens("The key of Bamelo is 48213.")}).judge;
    for (const char* open : {" ", " 4821", " the same as that of"})
      CHECK(judge(tokens(open)) == std::nullopt);
    for (const char* right : {" 48213", "48213.", " that of Kitoru: 48213"})
      CHECK(judge(tokens(right)) == true);
    for (const char* wrong : {" 48214", " 4821.", " 8213", " 12345, no, 48213"})
      CHECK(judge(tokens(wrong)) == false);
    if (model.ends().empty()) continue;
    std::vector<int> ended = tokens(" 4821");
    ended.push_back(model.ends().front());
    CHECK(judge(ended) == false);
  }
}
