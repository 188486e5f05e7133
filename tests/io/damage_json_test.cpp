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
  return {
      {2, 4, 2, 64},
      1536,
      {{Window{.sinks = 4, .recent = 99}, HeadDamage{2, 2, {0.125, 1e-7, 3.0, 0.0}}},
       {Codes{.storage = {.bits = 2, .residual = 8}}, HeadDamage{2, 2, 0.5}, {2, 2, {0.75, 0.0, 1.0, 0.1}}}},
      0.0625};
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
    CHECK(read.choices[i].rows_read == table.choices[i].rows_read);
  }
  CHECK(read.epsilon == 0.0625);
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
  refused(with("0.75", "1.75"),
          "the rows_read of layer 0, head 0 is 1.75, must be 0 or positive, and at most 1");
  refused(with("0.75", "-0.75"), "must be 0 or positive");
  refused(with("[0.75,0.0]", "[0.75]"), "2 KV heads");
  refused(with("\"epsilon\": 0.0625,", ""), "add 'epsilon'");
  refused(with("0.0625", "2"), "must be a share of the attention, 0 to 1, is 2");
  refused(with("0.0625", "null"), "must be a share of the attention");
  refused("{}", "format");
  refused("[]", "object");
}

TEST_CASE("a number that is not finite is not written") {
  Table table = sample();
  table.choices[0].damage(0, 0) = std::nan("");
  CHECK_THROWS_AS((void)format_damage(table), ConfigError);
}

TEST_CASE("shares of rows read are not written without the bound, or beyond it") {
  Table table = sample();
  table.epsilon = {};
  CHECK_THROWS_WITH_AS((void)format_damage(table), doctest::Contains("no epsilon"), ConfigError);
  for (const double wrong : {-0.5, 1.5, std::nan("")}) {
    table.epsilon = wrong;
    CHECK_THROWS_WITH_AS((void)format_damage(table), doctest::Contains("epsilon is"), ConfigError);
  }
  table.epsilon = 0.0;
  table.choices[1].rows_read(1, 1) = std::nan("");
  CHECK_THROWS_AS((void)format_damage(table), ConfigError);
  table.choices[1].rows_read = {1, 2, 0.5};
  CHECK_THROWS_AS((void)format_damage(table), ConfigError);
}
