// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include <doctest/doctest.h>

#include <kvpolicy/io/damage_json.hpp>

#include "says.hpp"

using namespace kvpolicy;
using namespace kvpolicy::io;

namespace {

using Table = DamageTable<bfloat16>;

Table sample() {
  using Window = SinkRecentCache<DenseStorage<bfloat16>>::Config;
  using Codes = QuantizedResidualCache<bfloat16>::Config;
  return {{2, 4, 2, 64},
          1536,
          {{Window{.sinks = 4, .recent = 99}, HeadDamage{2, 2, {0.125, 1e-7, 3.0, 0.0}}},
           {Codes{.storage = {.bits = 2, .residual = 8}}, HeadDamage{2, 2, 0.5}}}};
}

std::string with(std::string_view old, std::string_view changed) {
  std::string text = format_damage(sample());
  const std::size_t at = text.find(old);
  REQUIRE(at != std::string::npos);
  return text.replace(at, old.size(), changed);
}

}  // namespace

TEST_CASE("a table of damages is read back as it was written") {
  const Table table = sample();
  const Table read = parse_damage<bfloat16>(format_damage(table));
  CHECK(read.shape == table.shape);
  CHECK(read.context == 1536);
  REQUIRE(read.choices.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(read.choices[i].settings == table.choices[i].settings);
    CHECK(read.choices[i].damage == table.choices[i].damage);
  }
}

TEST_CASE("a damaged table is refused by name") {
  const auto refused = [](const std::string& text, const char* why) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS((void)parse_damage<bfloat16>(text, "d.json"), doctest::Contains(why), FormatError);
  };
  refused(with("kvpolicy damage", "kvpolicy plan"), "kvpolicy damage");
  refused(with("\"version\": 1", "\"version\": 2"), "version");
  refused(with("0.125", "-0.125"), "must be 0 or positive");
  refused(with("0.125", "\"much\""), "must be 0 or positive");
  refused(with("[0.125,1e-07]", "[0.125]"), "2 KV heads");
  refused(with("\"context\"", "\"contexts\""), "context");
  refused(with("sink_recent", "sinks_only"), "policy is 'sinks_only', must be");
  refused(with("\"bits\":2", "\"bits\":7"), "choices[1]");
  refused("{}", "format");
  refused("[]", "object");
}

TEST_CASE("a number that is not finite is not written") {
  Table table = sample();
  table.choices[0].damage(0, 0) = std::nan("");
  CHECK_THROWS_AS((void)format_damage(table), ConfigError);
}
