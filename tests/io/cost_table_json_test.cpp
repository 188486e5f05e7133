// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/io/cost_table_json.hpp>

using namespace kvpolicy;
using namespace kvpolicy::io;

namespace {

constexpr std::string_view sample = R"({"format": "kvpolicy costs", "version": 1, "head_dim": 64,
  "bandwidth": 2e10, "machine": {"cpu": "any"},
  "curves": [{"setting": {"policy": "full"}, "queries": 4,
              "measured": [{"rows": 100, "seconds": 1e-6, "p10": 9e-7, "p90": 2e-6}, {"rows": 300, "seconds": 5e-6}]},
             {"setting": {"policy": "full", "storage": {"type": "residual_per_token", "bits": 8}}, "queries": 4,
              "measured": [{"rows": 100, "seconds": 7e-7}]}]})";

std::string with(std::string_view old, std::string_view changed) {
  std::string text{sample};
  const std::size_t at = text.find(old);
  REQUIRE(at != std::string::npos);
  return text.replace(at, old.size(), changed);
}

}  // namespace

TEST_CASE("a file of costs is read") {
  const auto costs = parse_costs<bfloat16>(sample);
  CHECK(costs.bandwidth == 2e10);
  CHECK(costs.table.head_dim() == 64);
  CHECK(costs.table.value_dim() == 64);
  REQUIRE(costs.table.curves().size() == 2);
  CHECK(costs.table.curves()[0].queries == 4);
  CHECK(costs.table.curves()[0].measured == std::vector<MeasuredCost>{{100, 1e-6}, {300, 5e-6}});
  CHECK(costs.table.curves()[1].settings.rule(64).key_encoding == Encoding::uint8);
  const HeadPlan<bfloat16> plan{ModelShape{1, 4, 1, 64}};
  CHECK(seconds_read(plan, 200, costs.table)[0][0] == doctest::Approx(3e-6));
  CHECK(parse_costs<bfloat16>(with("\"bandwidth\": 2e10,", "")).bandwidth == 0);
  CHECK(parse_costs<bfloat16>(with("\"head_dim\": 64,", "\"head_dim\": 64, \"value_dim\": 32,"))
            .table.value_dim() == 32);
}

TEST_CASE("a damaged file of costs is refused by name: where, what it is, what would fit") {
  const auto refused = [](const std::string& text, const char* why) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS((void)parse_costs<bfloat16>(text, "c.json"), doctest::Contains(why), FormatError);
  };
  refused(with("kvpolicy costs", "kvpolicy plan"),
          "c.json, format: is 'kvpolicy plan', must be 'kvpolicy costs'");
  refused(with("\"version\": 1", "\"version\": 2"), "c.json, version: is 2, this program reads version 1");
  refused(with("\"head_dim\": 64", "\"head_dim\": 63"), "c.json, head_dim");
  refused(with("2e10", "-1"), "c.json, bandwidth: is -1, must be 0 or positive");
  refused(with("2e10", "\"fast\""), "c.json, bandwidth: must be a number");
  refused(with("\"curves\"", "\"curve\""), "curve");
  refused(with("\"queries\": 4", "\"queries\": -4"),
          "c.json, curves[0], queries: must be a whole number, is -4");
  refused(with("\"queries\": 4", "\"queries\": 0"), "0 query heads, must be at least 1");
  refused(with("\"rows\": 300", "\"rows\": 90"),
          "c.json: CostTable: curve 0 has 90 rows after 100; rows must ascend");
  refused(with("\"rows\": 300", "\"rows\": 1.5"),
          "c.json, curves[0], measured[1], rows: must be a whole number, is 1.5");
  refused(with("\"rows\": 300, ", ""), "measured[1]: the key 'rows' is missing");
  refused(with("5e-6", "-5e-6"), "c.json, curves[0], measured[1], seconds: is -5e-06, must be 0 or positive");
  refused(with("5e-6", "0"), "300 rows take 0 seconds, must be from 1e-12 to 1e6");
  refused(with("5e-6", "\"slow\""), "measured[1], seconds: must be a number, is the string 'slow'");
  refused(with("5e-6", "5e-6, \"note\": 1"), "unknown key 'note'");
  refused(with(", \"seconds\": 5e-6", ""), "the key 'seconds' is missing");
  refused(with("\"p90\": 2e-6", "\"p90\": -1"), "p90: is -1");
  refused(with("\"bits\": 8", "\"bits\": 7"), "curves[1]");
  refused(with(R"({"policy": "full"})", R"({"policy": "whole"})"), "policy is 'whole', must be");
  refused(with(R"("storage": {"type": "residual_per_token", "bits": 8})", R"("storage": {"type": "dense"})"),
          "curves 0 and 1 are both of exact rows, 4 query heads");
  refused(R"({"format": "kvpolicy costs", "version": 1, "head_dim": 64, "curves": []})",
          "must be an array of at least one curve");
  refused("{}", "the key 'format' is missing");
  refused("[]", "must be an object");
}
