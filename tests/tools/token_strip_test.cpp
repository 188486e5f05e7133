// SPDX-License-Identifier: Apache-2.0
#include <common/token_strip.hpp>

#include <vector>

#include <doctest/doctest.h>

using namespace kvpolicy;
using namespace kvpolicy::tools;

TEST_CASE("marks are below their tokens") {
  const TokenStrip strip{{"target", "selected", "draft"}, true, false};
  CHECK(strip.legend() == "proposed by  . draft  s selected  T target");
  const std::vector<NewToken> tokens{{'a', 2}, {'b', 1}, {' ', 0}, {'c', 2}};
  CHECK(strip.marked(tokens) == "ab c\n.sT.\n");
  CHECK(strip.marked(tokens, 3) == "ab \n.sT\nc\n.\n");
  CHECK(strip.marked({}) == "");
}

TEST_CASE("bytes that are no characters take a column too") {
  const TokenStrip strip{{"target", "draft"}, true, false};
  const std::vector<NewToken> tokens{{'a', 0}, {'\n', 1}, {200, 0}, {7, 1}};
  CHECK(strip.marked(tokens) == "a \nT.\n..\nT.\n");
}

TEST_CASE("tokens that are no bytes are shown as numbers") {
  const TokenStrip strip{{"target", "draft"}, false, false};
  const std::vector<NewToken> tokens{{128000, 0}, {7, 1}, {41, 1}};
  CHECK(strip.marked(tokens) == "128000 7 41 \nT      . .  \n");
  CHECK(strip.marked(tokens, 9) == "128000 7 \nT      . \n41 \n.  \n");
  CHECK(strip.coloured({41, 1}) == "41 ");
}

TEST_CASE("on a terminal a token has a colour, and control characters are not printed") {
  const TokenStrip strip{{"target", "selected", "draft"}, true, true};
  CHECK(strip.coloured({'x', 0}) == "\033[1;35mx\033[0m");
  CHECK(strip.coloured({'x', 1}) == "\033[33mx\033[0m");
  CHECK(strip.coloured({'x', 2}) == "\033[36mx\033[0m");
  CHECK(strip.coloured({27, 2}) == "\033[36m?\033[0m");
  CHECK(strip.coloured({'\n', 2}) == "\033[36m\n\033[0m");
  const TokenStrip two{{"target", "draft"}, true, true};
  CHECK(two.coloured({'x', 1}) == "\033[36mx\033[0m");
}
