// SPDX-License-Identifier: Apache-2.0
//
// Compares budgets with the line in whole numbers: multiplied by beta x (layers - 1), it has no
// fractions.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/pyramid_budgets.hpp>

using namespace kvpolicy;

namespace {

using Rows = std::vector<std::size_t>;

ModelShape shape_of(std::size_t layers, std::size_t kv_heads) {
  return {.layers = layers, .q_heads = 2 * kv_heads, .kv_heads = kv_heads, .head_dim = 64};
}

// The budget of the first head of each layer; the others must have the same.
Rows of_layers(const HeadBudgets& budgets) {
  Rows rows;
  for (std::size_t layer = 0; layer < budgets.layers(); ++layer) {
    rows.push_back(budgets(layer, 0));
    for (std::size_t head = 1; head < budgets.heads(); ++head) {
      CHECK(budgets(layer, head) == rows.back());
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("the paper's pyramid") {
  const auto rows = [](std::size_t layers, const PyramidBudgetConfig& config) {
    return of_layers(pyramid_budgets(shape_of(layers, 3), config));
  };
  // 2 * 120 - 6 = 234 down to 6 in steps of 76.
  CHECK(rows(4, {128, 8, 20.0}) == Rows{234, 158, 82, 6});
  CHECK(rows(4, {128, 8, 1.0}) == Rows{120, 120, 120, 120});
  CHECK(rows(1, {128, 8, 20.0}) == Rows{120});
  CHECK(rows(2, {128, 8, std::numeric_limits<double>::infinity()}) == Rows{240, 0});
  // 97.5, 50, 2.5: the two halves make one row, which goes to the lower layer.
  CHECK(rows(3, {50, 0, 20.0}) == Rows{98, 50, 2});
  CHECK(rows(5, {8, 8, 20.0}) == Rows{0, 0, 0, 0, 0});
}

TEST_CASE("a short prompt makes the line flatter, as published") {
  const auto rows = [](std::size_t tokens) {
    return of_layers(
        pyramid_budgets(shape_of(3, 2), {.capacity = 128, .observation_window = 8, .tokens = tokens}));
  };
  CHECK(rows(0) == Rows{234, 120, 6});
  CHECK(rows(242) == Rows{234, 120, 6});
  CHECK(rows(4096) == Rows{234, 120, 6});
  CHECK(rows(208) == Rows{200, 120, 40});
  CHECK(rows(128) == Rows{120, 120, 120});
  CHECK(rows(50) == Rows{120, 120, 120});  // everything stays, whatever the budget
  CHECK(rows(3) == Rows{120, 120, 120});
}

TEST_CASE("budgets follow the line, fall and sum to the total") {
  std::mt19937 random{11};
  for (int round = 0; round < 500; ++round) {
    const std::size_t layers = 2 + random() % 40;
    const std::size_t heads = 1 + random() % 4;
    const std::size_t window = random() % 40;
    const std::size_t mean = random() % 3000;
    const std::size_t beta = 1 + random() % 40;
    const HeadBudgets budgets =
        pyramid_budgets(shape_of(layers, heads), {.capacity = mean + window + (mean + window == 0),
                                                  .observation_window = window,
                                                  .beta = static_cast<double>(beta)});
    const auto given = static_cast<std::int64_t>(mean + (mean + window == 0));
    const Rows rows = of_layers(budgets);
    REQUIRE(std::accumulate(rows.begin(), rows.end(), std::size_t{0}) ==
            static_cast<std::size_t>(given) * layers);
    const auto b = static_cast<std::int64_t>(beta);
    const auto last = static_cast<std::int64_t>(layers) - 1;
    const std::int64_t whole = b * last;  // the value of one row
    double least_up = 2.0;
    double most_down = -1.0;
    for (std::size_t i = 0; i < layers; ++i) {
      const std::int64_t exact =
          2 * given * whole - given * last - 2 * static_cast<std::int64_t>(i) * given * (b - 1);
      const std::int64_t off = static_cast<std::int64_t>(rows[i]) * whole - exact;
      CHECK(std::abs(off) < whole);
      const double rest = static_cast<double>(exact % whole) / static_cast<double>(whole);
      if (off > 0) least_up = std::min(least_up, rest);
      if (off < 0) most_down = std::max(most_down, rest);
      if (i > 0) CHECK(rows[i] <= rows[i - 1]);
    }
    CHECK(least_up + 1e-9 >= most_down);  // the largest remainders are rounded up
  }
}

TEST_CASE("settings that do not work") {
  const auto refused = [](const PyramidBudgetConfig& config) {
    CHECK_THROWS_AS((void)pyramid_budgets(shape_of(4, 2), config), ConfigError);
  };
  refused({.beta = 0.5});
  refused({.beta = std::numeric_limits<double>::quiet_NaN()});
  refused({.capacity = 0, .observation_window = 0});
  refused({.capacity = 8, .observation_window = 9});
  CHECK_THROWS_AS((void)pyramid_budgets({.layers = 0, .q_heads = 1, .kv_heads = 1, .head_dim = 64}),
                  ConfigError);
}
