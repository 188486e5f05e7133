// SPDX-License-Identifier: Apache-2.0
//
// Templates print what Jinja prints (make_goldens.py), fail where it fails, and are bounded in what they do.
#include <algorithm>
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/jinja/json_value.hpp>
#include <reference_model/jinja/template.hpp>

#include "support/source_dir.hpp"

namespace {

using namespace kvpolicy;
using reference::ByteRange;
using reference::jinja::RenderOptions;
using reference::jinja::Template;
using reference::jinja::Text;
using reference::jinja::Value;
using Names = std::map<std::string, Value, std::less<>>;

Names names_of(const nlohmann::ordered_json& json) {
  Names names;
  for (const auto& [name, value] : json.items()) names.emplace(name, reference::jinja::value_of(value));
  return names;
}

/// make_goldens.py's.
std::tm now() {
  std::tm time{};
  time.tm_year = 126;
  time.tm_mon = 2;
  time.tm_mday = 4;
  time.tm_hour = 5;
  time.tm_min = 6;
  time.tm_sec = 7;
  std::tm day = time;
  day.tm_isdst = -1;
  std::mktime(&day);  // for the days of the week and the year
  time.tm_wday = day.tm_wday;
  time.tm_yday = day.tm_yday;
  return time;
}

std::string rendered(std::string_view source, const Names& names = {}) {
  return Template{source}.render(names).text;
}

TEST_CASE("templates print what Jinja prints") {
  const auto goldens = nlohmann::ordered_json::parse(
      io::read_text_file(testing::source_dir() + "/tests/jinja/goldens/constructs.json"));
  const Names names = names_of(goldens["names"]);
  std::size_t printed = 0;
  for (const auto& one : goldens["cases"]) {
    const auto source = one["template"].get<std::string>();
    CAPTURE(source);
    if (one.contains("broken")) {
      CHECK_THROWS_AS(Template{source}, FormatError);
      continue;
    }
    const Template read{source};
    if (one.contains("error")) {
      CHECK_THROWS_AS(static_cast<void>(read.render(names, {.now = now()})), ConfigError);
      continue;
    }
    CHECK(read.render(names, {.now = now()}).text == one["text"].get<std::string>());
    ++printed;
  }
  CHECK(printed > 35);
}

TEST_CASE("a text remembers what of it was given") {
  const Names names{{"a", Value{Text{"  <b> c\n", true}}}, {"n", Value{Text{"né", true}}}};
  const auto given = [&](std::string_view source) {
    const Text text = Template{source}.render(names);
    std::vector<std::string> parts;
    for (const ByteRange range : text.given)
      parts.push_back(text.text.substr(range.begin, range.end - range.begin));
    return parts;
  };
  using Parts = std::vector<std::string>;
  CHECK(given("x{{ a }}y") == Parts{"  <b> c\n"});
  CHECK(given("{{ 'x' + a|trim + n ~ 'é' }}") == Parts{"<b> cné"});
  CHECK(given("{{ a.split('b') | join('|') }}") == Parts{"  <", "> c\n"});
  CHECK(given("{{ a.replace('b', 'X') }}") == Parts{"  <", "> c\n"});
  CHECK(given("{{ a[3:5] }}{{ n[1] }}") == Parts{"b>é"});
  CHECK(given("{{ [a]|tojson }}") == Parts{"  <b> c\\n"});
  CHECK(given("{{ {'k': n}|tojson }}") == Parts{"né"});
  CHECK(given("{{ [n] }}{{ a|length }}{{ 'n' }}") == Parts{"né"});
  CHECK(given("{% set t %}[{{ n }}]{% endset %}{{ t|replace('[', '') }}") == Parts{"né"});
  CHECK(given("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(n) }}") == Parts{"né"});
  CHECK(given("{{ a|upper|trim }}") == Parts{"<B> C"});
  CHECK(given("{{ a * 2 }}").size() == 1);
  CHECK(given("{% for c in n %}{{ c }}.{% endfor %}") == Parts{"n", "é"});
  CHECK(given("{{ '%s!' % n }}{{ '{}?'.format(n) }}") == Parts{"né", "né"});
}

TEST_CASE("what is not carried out is refused by name") {
  const auto refused = [](std::string_view source, const char* name) {
    CAPTURE(source);
    CHECK_THROWS_WITH_AS(static_cast<void>(rendered(source)), doctest::Contains(name), FormatError);
  };
  for (const char* name : {"urlize", "batch", "xmlattr", "from_json", "no.such"})
    refused("{{ 'x'|" + std::string{name} + " }}", name);
  for (const char* name : {"escaped", "filter", "no_such"})
    refused("{{ 'x' is " + std::string{name} + " }}", name);
  refused("{{ 'x'.zfill(3) }}", "zfill");
  refused("{{ cycler(1) }}", "cycler");
  refused("{% include 'x' %}", "include");
  refused("{% block x %}{% endblock %}", "block");
  refused("{{ ('a'|safe).strip() }}", "safe");
  refused("{{ '%5.2f' % 3 }}", "%s");
  CHECK_THROWS_WITH_AS(static_cast<void>(rendered("{{ 'é'|upper }}")), doctest::Contains("upper"),
                       ConfigError);
  CHECK_THROWS_WITH_AS(static_cast<void>(rendered("{{ raise_exception('no <tools>') }}")),
                       doctest::Contains("no <tools>"), ConfigError);
}

TEST_CASE("errors name the line") {
  CHECK_THROWS_WITH_AS(Template{"a\nb\n{% if %}"}, doctest::Contains("line 3"), FormatError);
  CHECK_THROWS_WITH_AS(Template{"{{ 'a\nb' }}\n{{ x"}, doctest::Contains("line 3"), FormatError);
  CHECK_THROWS_WITH_AS(Template{"{# \n #}{% frobnicate %}"}, doctest::Contains("frobnicate"), FormatError);
}

TEST_CASE("strftime_now is defined where there is a clock") {
  const std::string source =
      "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}";
  CHECK(rendered(source) == "26 Jul 2024");
  CHECK(Template{source}.render({}, {.now = now()}).text == "04 Mar 2026");
}

TEST_CASE("a template from outside is bounded") {
  const auto refused = [](const std::string& source) {
    CAPTURE(source.substr(0, 100));
    const Names names{{"s", Value{std::string(1000, 'x')}}};
    CHECK_THROWS_AS(static_cast<void>(Template{source}.render(names, {.now = {}, .steps = 1'000'000})),
                    Error);
  };
  const auto repeated = [](std::string_view part, std::size_t times) {
    std::string all;
    for (std::size_t i = 0; i < times; ++i) all += part;
    return all;
  };
  constexpr std::size_t deep = 100'000;
  // Nested deeper than a stack.
  for (const char* open : {"(", "[", "{'a':", "not ", "-", "x[", "f(", "1 if 1 else ", "x|default("}) {
    refused("{{ " + repeated(open, deep));
    refused("{{ " + repeated(open, deep) + "1" + repeated(")", deep) + " }}");
  }
  refused(repeated("{% if 1 %}", deep));
  refused(repeated("{% for x in y %}", deep));
  refused("{{ 1" + repeated(" + 1", deep) + " }}");
  refused("{{ x" + repeated(".a", deep) + " }}");
  refused("{{ x" + repeated("|trim", deep) + " }}");
  refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
  refused("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}");
  refused("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}");
  refused(
      "{% set n = namespace(x=[]) %}{% for i in range(1000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}");
  // Long, or large.
  refused(repeated("{% for i in range(99999) %}", 3) + "x" + repeated("{% endfor %}", 3));
  refused("{{ 'x' * 1000000000000 }}");
  refused("{{ [s] * 10000000000 }}");
  refused("{% set n = namespace(x=s) %}{% for i in range(100) %}{% set n.x = n.x + n.x %}{% endfor %}");
  refused(
      "{% set n = namespace(x=s) %}{% for i in range(100) %}{% set n.x = n.x.replace('x', 'xx') %}{% endfor "
      "%}");
  refused("{% set n = namespace(x=[1]) %}{% for i in range(100) %}{% set n.x = n.x + n.x %}{% endfor %}");
  refused(
      "{% set n = namespace(x=[s]) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ "
      "n.x|tojson }}");
  refused("{% set a = [s] * 100000 %}{{ a|tojson }}");
  refused("{{ range(1000000) }}");
  refused("{{ 9223372036854775807 + 1 }}");
  refused("{{ -9223372036854775807 - 2 }}");
  refused("{{ 2 ** 64 }}");
  refused("{{ 99999999999999999999 }}");
  refused("{{ s|indent(1000000000) }}");
  refused("\xff{{ x }}");
}

TEST_CASE("texts that are no templates are only texts") {
  for (const char* text : {"", "a", "{", "}", "%}", "}}", "a { b } c", "{ {", "é"})
    CHECK(rendered(text) == text);
  CHECK(rendered("a\n") == "a");
  CHECK(rendered("a\r\nb\rc\n\n") == "a\nb\nc\n");
}

TEST_CASE("JSON beyond a template's values is refused") {
  std::string deep(1000, '[');
  deep += std::string(1000, ']');
  CHECK_THROWS_AS(static_cast<void>(reference::jinja::value_of(nlohmann::ordered_json::parse(deep))),
                  ConfigError);
  CHECK_THROWS_AS(
      static_cast<void>(reference::jinja::value_of(nlohmann::ordered_json(18446744073709551615ULL))),
      ConfigError);
}

}  // namespace
