// SPDX-License-Identifier: Apache-2.0
//
// Costs that were measured: looked up by the format of a head's rows and their number, between measurements on the
// straight line that is computed here by hand.
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/cost_table.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using E = bfloat16;
using Full = FullCache<DenseStorage<E>>::Config;
using Window = SinkRecentCache<DenseStorage<E>>::Config;
using Budget = HeadBudgetCache<DenseStorage<E>>::Config;
using Chunks = ChunkRetrievalCache<DenseStorage<E>>::Config;

const ModelShape shape{1, 8, 4, 64};

HeadSettings<E> int4(std::size_t residual = 128) {
  return LowBitFormat::of_text({4, 4}, shape, residual).head<E>();
}

std::vector<CostCurve<E>> curves() {
  return {{Full{}, 2, {{100, 2e-6}, {200, 3e-6}, {1000, 19e-6}}},
          {int4(), 2, {{100, 1e-6}, {1000, 10e-6}}},
          {Full{}, 4, {{1000, 50e-6}}}};
}

CostTable<E> table() { return {64, 64, curves()}; }

double seconds(const HeadSettings<E>& settings, std::size_t rows, std::size_t queries = 2) {
  return table().seconds(settings.rule(64), rows, queries);
}

}  // namespace

TEST_CASE("seconds lie on the line between measurements; few rows take what the fewest measured took") {
  for (const std::size_t rows : {0U, 1U, 99U, 100U}) CHECK(seconds(Full{}, rows) == 2e-6);
  CHECK(seconds(Full{}, 150) == doctest::Approx(2.5e-6));
  CHECK(seconds(Full{}, 200) == doctest::Approx(3e-6));
  // 16 microseconds in 800 rows.
  CHECK(seconds(Full{}, 201) == doctest::Approx(3.02e-6));
  CHECK(seconds(Full{}, 600) == doctest::Approx(11e-6));
  CHECK(seconds(Full{}, 1000) == doctest::Approx(19e-6));
  CHECK(seconds(int4(), 190) == doctest::Approx(1.9e-6));
  CHECK(seconds(Full{}, 7, 4) == 50e-6);
}

TEST_CASE("what rows there are is no matter, only how many and their format") {
  CHECK(seconds(Window{.sinks = 4, .recent = 60}, 150) == seconds(Full{}, 150));
  CHECK(seconds(int4(256), 500) == seconds(int4(), 500));
}

TEST_CASE("a plan's heads by the rows that they read") {
  HeadPlan<E> plan{shape};
  plan.set(0, 1, Window{.sinks = 10, .recent = 140});
  plan.set(0, 2, int4());
  plan.set(0, 3, Budget{.budget = 142, .scorer = {.observation_window = 8}});
  const HeadCosts costs = seconds_read(plan, 600, table());
  REQUIRE(costs.size() == 1);
  REQUIRE(costs[0].size() == 4);
  CHECK(costs[0][0] == doctest::Approx(11e-6));                 // 600 rows
  CHECK(costs[0][1] == doctest::Approx(2.5e-6).epsilon(0.01));  // 150, less the one that is to come
  CHECK(costs[0][2] == doctest::Approx(6e-6));
  CHECK(costs[0][3] == doctest::Approx(2.5e-6));  // 142 and the window of 8
  // Balanced by them, one rank has the full head, and the other all else: 11 against 2.5 + 6 + 2.5.
  const Shards shards = balance(plan, costs, costs, {.ranks = 2, .cut_rows = false});
  CHECK(shards.slowest(0) == doctest::Approx(11e-6).epsilon(0.01));
  plan.set(0, 0, Chunks{.chunk = 16, .budget = 64});
  CHECK(rows_read(plan.at(0, 0).rule(64), 600) == 64 + 600 % 16);
}

TEST_CASE("what was not measured is refused, and what would fit is named") {
  const auto error = [](const HeadSettings<E>& settings, std::size_t rows, std::size_t queries) {
    return thrown<ConfigError>([&] { (void)seconds(settings, rows, queries); });
  };
  CHECK(
      contains(error(Full{}, 1001, 2),
               "1001 rows were not measured for exact rows, 2 query heads, at most 1000; measure more rows"));
  CHECK(contains(error(Full{}, 5, 3),
                 "nothing was measured for exact rows, 3 query heads; there is exact rows, 2"));
  CHECK(contains(
      error(int4(), 5, 4),
      "nothing was measured for uint4 keys in groups of 64 rows, rotated, uint4 values in groups of 64 "
      "channels, rotated, 4 query heads"));
  CHECK(contains(thrown<ConfigError>([&] { (void)seconds_read(HeadPlan<E>{{1, 8, 4, 128}}, 5, table()); }),
                 "keys of 128 and values of 128 channels, the costs were measured with 64 and 64"));
}

TEST_CASE("bad tables are refused") {
  const auto error = [](std::vector<MeasuredCost> measured, std::size_t queries = 2) {
    return thrown<ConfigError>([&] { (void)CostTable<E>{64, 64, {{Full{}, queries, std::move(measured)}}}; });
  };
  CHECK(error({{1, 1e-6}}).empty());
  CHECK(contains(error({}), "curve 0 has no measurement"));
  CHECK(contains(error({{1, 1e-6}}, 0), "0 query heads"));
  CHECK(contains(error({{0, 1e-6}}), "0 rows after 0; rows must ascend, from at least 1"));
  CHECK(contains(error({{5, 1e-6}, {5, 2e-6}}), "5 rows after 5"));
  CHECK(contains(error({{5, 1e-6}, {4, 2e-6}}), "4 rows after 5"));
  CHECK(contains(error({{5, 0}}), "5 rows take 0 seconds, must be from 1e-12 to 1e6"));
  CHECK(contains(error({{5, -1e-6}}), "-1e-06 seconds"));
  CHECK(contains(error({{5, std::nan("")}}), "nan seconds"));
  CHECK(contains(error({{5, std::numeric_limits<double>::infinity()}}), "inf seconds"));
  CHECK(contains(thrown<ConfigError>([] { (void)CostTable<E>{64, 64, {}}; }), "there is no curve"));
  auto twice = curves();
  twice.push_back({Window{.sinks = 4, .recent = 60}, 2, {{7, 1e-6}}});
  CHECK(contains(thrown<ConfigError>([&] { (void)CostTable<E>{64, 64, twice}; }),
                 "curves 0 and 3 are both of exact rows, 2 query heads"));
}
