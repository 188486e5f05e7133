// SPDX-License-Identifier: Apache-2.0
#include <identify/passkey_text.hpp>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/retrieval_text.hpp>
#include <kvpolicy/core/error.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::string bytes_of(const reference::LabelledText& text) {
  std::string bytes;
  for (const int token : text.tokens) bytes += static_cast<char>(token);
  return bytes;
}

}  // namespace

TEST_CASE("digits: each is hidden once, asked for once, and answered correctly") {
  const std::string plain = identification_text();
  for (const std::size_t number : {0UL, 1UL, 77UL}) {
    const auto text = passkey_text(random_text_model(), plain, {.context = 2048, .seed = 4}, number);
    CHECK_NOTHROW(text.check());
    const std::string bytes = bytes_of(text);
    REQUIRE(text.passkeys.size() == 10);
    std::set<std::string> asked;
    for (const reference::Passkey& key : text.passkeys) {
      REQUIRE(key.tokens == 5);
      const std::string digits = bytes.substr(key.hidden, 5);
      CHECK(bytes.substr(key.answer, 5) == digits);
      const std::string fact = bytes.substr(key.hidden - 21, 28);
      const std::string name = fact.substr(11, 6);
      CHECK(fact == "The key of " + name + " is " + digits + ". ");
      CHECK(bytes.substr(key.answer - 49, 55) ==
            "\nWhat is the key of " + name + "? The key of " + name + " is " + digits + ".");
      asked.insert(name);
    }
    CHECK(asked.size() == 10);
  }
}

TEST_CASE("labels are the questions and answers, to the end") {
  const auto text = passkey_text(random_text_model(), identification_text(), {.context = 1024}, 3);
  const std::string bytes = bytes_of(text);
  CHECK(text.labels.size() == 10 * 55);
  CHECK(text.labels.back() == bytes.size() - 1);
  CHECK(text.labels.front() == bytes.find("\nWhat is the key of"));
  for (std::size_t i = 1; i < text.labels.size(); ++i) {
    CHECK(text.labels[i] == text.labels[i - 1] + 1);
  }
}

TEST_CASE("a round of numbers takes every length once, and the longest is the context") {
  const std::string plain = identification_text();
  const PasskeyTextConfig config{.context = 1500, .lengths = 20, .passkeys = 4, .seed = 2};
  std::vector<std::size_t> sizes;
  for (std::size_t number = 0; number < 40; ++number) {
    sizes.push_back(passkey_text(random_text_model(), plain, config, number).tokens.size());
  }
  std::vector<std::size_t> first(sizes.begin(), sizes.begin() + 20);
  std::vector<std::size_t> second(sizes.begin() + 20, sizes.end());
  CHECK(first != second);  // another order
  std::ranges::sort(first);
  std::ranges::sort(second);
  CHECK(first == second);
  CHECK(first.back() == 1500);
  CHECK(std::ranges::adjacent_find(first) == first.end());
}

TEST_CASE("depths are as requested") {
  const std::string plain(20'000, 'x');  // one sentence, so positions are not moved to its beginning
  std::size_t first = 0;
  std::size_t last = 0;
  for (std::size_t number = 0; number < 50; ++number) {
    const auto text =
        passkey_text(random_text_model(), plain,
                     {.context = 9000, .lengths = 1, .passkeys = 10, .kind = PasskeyKind::words}, number);
    const std::string bytes = bytes_of(text);
    std::size_t earlier = 0;
    for (const reference::Passkey& key : text.passkeys) {
      CHECK(key.hidden > earlier);
      earlier = key.hidden;
    }
    const std::size_t haystack = static_cast<std::size_t>(std::ranges::count(bytes, 'x'));
    const std::size_t before = bytes.find("\n\nRemeber");
    CHECK(before >= haystack * 4 / 100);  // the words contain a few x
    const std::string body = bytes.substr(0, text.labels.front());
    CHECK(body.size() - body.rfind("\n\n") >= haystack * 4 / 100);
    first += before < haystack / 10 ? 1 : 0;
    last += body.size() - body.rfind("\n\n") < haystack / 8 ? 1 : 0;
  }
  CHECK(first > 5);  // in about 2 of 5 texts the first key is in the first tenth
  CHECK(last > 5);
}

TEST_CASE("words: the published sentences in their order") {
  const auto text = passkey_text(random_text_model(), identification_text(),
                                 {.context = 9000, .passkeys = 10, .kind = PasskeyKind::words}, 0);
  CHECK_NOTHROW(text.check());
  const std::string bytes = bytes_of(text);
  for (std::size_t i = 0; i < 10; ++i) {
    const reference::Passkey& key = text.passkeys[i];
    const std::string words = bytes.substr(key.hidden, key.tokens);
    CHECK(bytes.substr(key.answer, key.tokens) == words);
    CHECK(std::ranges::count(words, ' ') == 31);
    if (i > 0) CHECK(key.answer > text.passkeys[i - 1].answer);
  }
  CHECK(bytes.find("it's the tenth passkey to the vault: ") != std::string::npos);
  CHECK(bytes.find("what is the first passkey to the vault?\nPasskey: ") == text.labels.front() + 34);
}

TEST_CASE("plain text is a slice, and every byte that can be predicted counts") {
  const std::string plain = identification_text();
  const auto text = plain_text(random_text_model(), plain, {.context = 1024}, 5);
  CHECK(plain.find(bytes_of(text)) != std::string::npos);
  CHECK(text.labels.size() == text.tokens.size() - 1);
  CHECK(text.labels.front() == 1);
  CHECK(text.passkeys.empty());
}

TEST_CASE("a seed and a number give one text, others another") {
  const std::string plain = identification_text();
  const auto draw = [&](std::uint64_t seed, std::size_t number) {
    return passkey_text(random_text_model(), plain, {.context = 1200, .seed = seed}, number).tokens;
  };
  CHECK(draw(1, 2) == draw(1, 2));
  CHECK(draw(1, 2) != draw(1, 3));
  CHECK(draw(1, 2) != draw(2, 2));
}

TEST_CASE("texts that are impossible are refused") {
  const std::string plain = identification_text();
  const auto draw = [&](PasskeyTextConfig config) {
    static_cast<void>(passkey_text(random_text_model(), plain, config, 0));
  };
  CHECK_THROWS_AS(draw({.context = 900}), ConfigError);
  CHECK_THROWS_AS(draw({.context = 100'000, .lengths = 1}), ConfigError);
  CHECK_THROWS_AS(draw({.passkeys = 0}), ConfigError);
  CHECK_THROWS_AS(draw({.passkeys = 10, .depths = 9}), ConfigError);
  CHECK_THROWS_AS(draw({.lengths = 0}), ConfigError);
  CHECK_THROWS_AS(draw({.context = 20'000, .passkeys = 21, .kind = PasskeyKind::words}), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(plain_text(random_text_model(), plain, {.context = 200}, 0)),
                  ConfigError);
}
