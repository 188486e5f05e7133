// SPDX-License-Identifier: Apache-2.0
//
// JSON that is refused: the work that takes and the length of the message.
#include <cstddef>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <kvpolicy/io/json_text.hpp>

#include "says.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

std::string refusal(std::string_view text, const io::JsonLimits& limits = {},
                    std::string_view origin = "x.json") {
  try {
    (void)io::parse_json(text, origin, limits);
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

std::string repeated(std::string_view part, std::size_t count) {
  std::string text;
  text.reserve(part.size() * count);
  for (std::size_t i = 0; i < count; ++i) text += part;
  return text;
}

/// Counts how often the parser asks for its position, because each answer reads all of the text before.
struct CountedIterator {
  std::size_t& asked;
  std::string operator()(std::string_view text, std::size_t offset) const {
    ++asked;
    return io::place_in_text(text, offset);
  }
};

}  // namespace

TEST_CASE("the parser asks for its position once, and only for a text that is refused") {
  const std::string arrays = "[" + repeated("[],", 1000) + "[]]";
  std::string keys = "{";
  for (int i = 0; i < 1000; ++i) keys += "\"" + std::to_string(i) + "\": [{}], ";
  keys += "\"last\": 0}";
  for (const std::string& text : {arrays, keys}) {
    std::size_t asked = 0;
    CHECK_FALSE(io::detail::parse_json<io::Json>(text, "x.json", {}, CountedIterator{asked}).empty());
    CHECK(asked == 0);
    for (const std::string& broken :
         {text.substr(0, text.size() - 1), text + "x", text.substr(0, text.size() - 1) + ",\"0\": 1e999}"}) {
      asked = 0;
      CHECK_THROWS_AS((void)io::detail::parse_json<io::Json>(broken, "x.json", {}, CountedIterator{asked}),
                      FormatError);
      CHECK(asked == 1);
    }
  }
}

TEST_CASE("a message quotes only a little of a long text") {
  const std::string digits(100'000, '7');
  for (const std::string& text :
       {digits + "e99999", digits + "x", "\"" + digits + "\n\"", "[" + digits, "{\"" + digits + "\" 1}",
        "{\"" + digits + "\": 1, \"" + digits + "\": 2}", "nul" + digits}) {
    const std::string said = refusal(text);
    CAPTURE(text.substr(0, 20));
    CHECK(said.starts_with("x.json: line "));
    CHECK(said.size() < 400);
  }
  CHECK(refusal("[1, 2") == Says{"expected"});  // a short text is quoted whole
}

TEST_CASE("quotes are cut between characters and have no control bytes") {
  CHECK(io::in_quotes("short") == "'short'");
  const std::string exact(60, 'a');
  CHECK(io::in_quotes(exact) == "'" + exact + "'");
  CHECK(io::in_quotes(exact + "b") == "'" + exact + "…'");
  for (const std::string character : {"é", "€", "😀"}) {
    for (std::size_t before = 56; before < 60; ++before) {
      const std::string head(before, 'a');
      const bool whole = before + character.size() <= 60;
      CAPTURE(character);
      CAPTURE(before);
      CHECK(io::in_quotes(head + character + "bbbb") ==
            "'" + head + (whole ? character + std::string(60 - before - character.size(), 'b') : "") +
                (before + character.size() + 4 > 60 ? "…'" : "'"));
    }
  }
  CHECK(io::in_quotes("a\tb\x1b[1m\x7f") == "'a?b?[1m?'");
  CHECK(io::in_quotes(std::string(100, '\x80')) == "'…'");  // no character begins anywhere
}

TEST_CASE("more values than a text may have are refused at the first one too many") {
  const io::JsonLimits limits{.deepest = 16, .most_values = 4};
  CHECK(refusal("[1, 2, 3]", limits).empty());
  CHECK(refusal("[1, 2, 3, 4]", limits) ==
        Says{"x.json: line 1, column 13: has more than 4 values and keys"});
  CHECK(refusal("[[], {}, []]", limits).empty());
  CHECK(refusal("[[], {}, [], []]", limits) == Says{"more than 4 values"});
  CHECK(refusal(R"({"a": 1})", limits).empty());
  CHECK(refusal(R"({"a": 1, "b": []})", limits) == Says{"more than 4 values"});
  CHECK(refusal(R"([{"a": 1, "b": 2}])", limits) == Says{"more than 4 values"});
}

TEST_CASE(
    "an object of more keys, and values of more memory, than there may be are refused at the first too "
    "many") {
  const auto keys = [](std::size_t count) {
    std::string text = "{\"k0\": 0";
    for (std::size_t i = 1; i < count; ++i) text += ", \"k" + std::to_string(i) + "\": 0";
    return text + "}";
  };
  const io::JsonLimits few{.most_keys = 3};
  CHECK(refusal(keys(3), few).empty());
  CHECK(refusal(keys(4), few) == Says{"an object has more than 3 keys"});
  CHECK(refusal("[" + keys(3) + ", " + keys(3) + "]", few).empty());
  const io::JsonLimits small{.most_bytes = 100'000};
  CHECK(refusal("\"" + repeated("a", 90'000) + "\"", small).empty());
  CHECK(refusal("\"" + repeated("a", 100'001) + "\"", small) ==
        Says{"take more than 100000 bytes of memory"});
  // Short texts of much memory.
  CHECK(refusal("[" + repeated("{},", 5000) + "{}]", small) == Says{"bytes of memory"});
  CHECK(refusal("[" + repeated("[],", 5000) + "[]]", small) == Says{"bytes of memory"});
  CHECK(refusal("[" + repeated("0,", 10'000) + "0]", small) == Says{"bytes of memory"});
  CHECK(refusal(keys(3000), small) == Says{"bytes of memory"});
  CHECK(refusal("[" + repeated("0,", 1000) + "0]", small).empty());
}

TEST_CASE("reading takes as long as the text is: not as its square where objects lie in a long array") {
  // A second search of the array for each of them would take an hour.
  const std::string objects = "[" + repeated("{},", 600'000) + R"({"a": {}})" + "]";
  CHECK(io::parse_json(objects, "x.json").size() == 600'001);
  io::JsonLimits limits;
  CHECK(io::parse_ordered_json(objects, "x.json", limits).size() == 600'001);
}

TEST_CASE("an ordered reader keeps the keys as they came, within the same limits") {
  io::JsonLimits limits;
  const auto json =
      io::parse_ordered_json(R"({"z": 1, "a": {"y": [], "b": null}, "m": "x"})", "x.json", limits);
  CHECK(json.dump() == R"({"z":1,"a":{"y":[],"b":null},"m":"x"})");
  CHECK(io::shown(json.at("m")) == "the string 'x'");
  for (const char* bad : {"", "{", R"({"a": 1, "a": 2})", "[[[1]]]", "\"\xff\"", "[1e999]"}) {
    CAPTURE(bad);
    io::JsonLimits two{.deepest = 2};
    CHECK_THROWS_AS((void)io::parse_ordered_json(bad, "x.json", two), FormatError);
  }
  // Several texts share what there is.
  limits = {.most_values = 10};
  CHECK(io::parse_ordered_json("[1, 2, 3]", "x.json", limits).size() == 3);
  CHECK(limits.most_values == 6);
  CHECK(limits.most_bytes < io::JsonLimits{}.most_bytes);
  CHECK_THROWS_AS((void)io::parse_ordered_json("[1, 2, 3, 4, 5, 6]", "x.json", limits), FormatError);
  CHECK(limits.most_values == 6);
  CHECK(io::parse_ordered_json("[1, 2, 3, 4, 5]", "x.json", limits).size() == 5);
  CHECK(limits.most_values == 0);
}

TEST_CASE("a text of the largest size and the shortest values is refused after a part of it") {
  constexpr std::size_t most = io::JsonLimits{}.most_values;
  CHECK(most * sizeof(io::Json) <= std::size_t{64} << 20);
  const std::string text = "[" + repeated("0,", 2 * most) + "0]";
  CHECK(refusal(text) == Says{"line 1, column 8388610: has more than 4194304 values and keys"});
}

TEST_CASE("the error for a table of gates that is read as JSON says where it belongs") {
  const std::string gates = "0.98\t0.03\n1.00\t0.47\n";
  CHECK(refusal(gates, {}, "duo/full_attention_heads.tsv") ==
        Says{"a .tsv of gates belongs to a DuoAttention pattern: give the folder that it is in"});
  CHECK(refusal(gates) == Says{"x.json: line 2, column 1: "});
  CHECK_FALSE(refusal(gates) == Says{".tsv"});
}
