// SPDX-License-Identifier: Apache-2.0
#include <common/texts.hpp>

#include <filesystem>
#include <string>

#include <doctest/doctest.h>

#include <common/files.hpp>
#include <kvpolicy/core/error.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

TEST_CASE("the parts of a text share no byte and begin where a sentence or a line does") {
  for (const std::string_view name : text_names) {
    CAPTURE(name);
    if (name != "kjv" && !std::filesystem::exists(repository_path("texts/" + std::string{name} + ".txt"))) {
      MESSAGE(name << " is not tested: ./scripts/fetch-texts brings it");
      continue;
    }
    const std::string text = text_named(name);
    const std::string validation = part_of(text, Split::validation);
    const std::string test = part_of(text, Split::test);
    CHECK(validation + test == text);
    CHECK(part_of(text, Split::whole) == text);
    const double share = static_cast<double>(validation.size()) / static_cast<double>(text.size());
    CHECK(share >= 0.3 - 1e-4);
    CHECK(share < 0.31);
    CHECK((validation.ends_with('\n') || validation.ends_with(' ')));
    if (name != "kjv") CHECK(test.size() >= 300'000);
  }
}

TEST_CASE("short texts are split too") {
  CHECK(part_of("", Split::validation).empty());
  CHECK(part_of("", Split::test).empty());
  CHECK(part_of("no end", Split::validation) == "no end");
  CHECK(part_of("One. Two. Three. Four.", Split::validation) == "One. Two. ");
  CHECK(part_of("one\ntwo\nthree\nfour\n", Split::test) == "three\nfour\n");
}

TEST_CASE("a text that is not there is refused by name") {
  CHECK_THROWS_WITH_AS((void)text_named("nowels"),
                       "there is no text 'nowels'; there are kjv, novels, lexicon, manual and code",
                       ConfigError);
}
