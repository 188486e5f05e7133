// SPDX-License-Identifier: Apache-2.0
#include <generate/token_strip.hpp>

#include <vector>

#include <doctest/doctest.h>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {
const auto bytes = reference::Tokenizer::bytes();
}  // namespace

TEST_CASE("marks are below their tokens") {
  const TokenStrip strip{{"target", "selected", "draft"}, bytes, false};
  CHECK(strip.legend() == "proposed by  . draft  s selected  T target");
  const std::vector<NewToken> tokens{{'a', 2}, {'b', 1}, {' ', 0}, {'c', 2}};
  CHECK(strip.marked(tokens) == "ab c\n.sT.\n");
  CHECK(strip.marked(tokens, 3) == "ab \n.sT\nc\n.\n");
  CHECK(strip.marked({}) == "");
}

TEST_CASE("bytes that are no characters take a column too") {
  const TokenStrip strip{{"target", "draft"}, bytes, false};
  const std::vector<NewToken> tokens{{'a', 0}, {'\n', 1}, {200, 0}, {7, 1}};
  CHECK(strip.marked(tokens) == "a \nT.\n..\nT.\n");
}

TEST_CASE("the mark of a longer token is below its first column") {
  const TextModel words = random_word_model();
  const TokenStrip strip{{"target", "draft"}, words.tokenizer(), false};
  std::vector<NewToken> tokens;
  for (const int token : words.encode("the \u00fc the")) tokens.push_back({token, 1});
  // "th", "e", a space with the first byte of "\u00fc", its second byte, " the".
  REQUIRE(tokens.size() == 5);
  CHECK(strip.marked(tokens) == "the .. the\n. .. ..   \n");
}

TEST_CASE("on a terminal a token has a colour, and control characters are not printed") {
  const TokenStrip strip{{"target", "selected", "draft"}, bytes, true};
  CHECK(strip.coloured({'x', 0}) == "\033[1;35mx\033[0m");
  CHECK(strip.coloured({'x', 1}) == "\033[33mx\033[0m");
  CHECK(strip.coloured({'x', 2}) == "\033[36mx\033[0m");
  CHECK(strip.coloured({27, 2}) == "\033[36m?\033[0m");
  CHECK(strip.coloured({'\n', 2}) == "\033[36m\n\033[0m");
  const TokenStrip two{{"target", "draft"}, bytes, true};
  CHECK(two.coloured({'x', 1}) == "\033[36mx\033[0m");
}
