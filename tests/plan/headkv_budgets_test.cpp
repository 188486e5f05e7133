// SPDX-License-Identifier: Apache-2.0
//
// Published budgets are what numpy gives for the published lines of Python; plan budgets come from the
// formula in exact fractions. Both were computed without the library and written down here.
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/headkv_budgets.hpp>

using namespace kvpolicy;

namespace {

using Rows = std::vector<std::size_t>;

const HeadScores scores{2, 4, {0.5, 0.0, 1.5, 2.0, 0.25, 0.75, 3.0, 0.0}};
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

Rows rows_of(const HeadBudgets& budgets) { return {budgets.values().begin(), budgets.values().end()}; }

std::size_t sum_of(const HeadBudgets& budgets) {
  return std::accumulate(budgets.values().begin(), budgets.values().end(), std::size_t{0});
}

}  // namespace

TEST_CASE("published budgets match numpy") {
  const auto published = [](const HeadKvBudgetConfig& config) {
    return rows_of(published_headkv_budgets(scores, config));
  };
  CHECK(published({128, 8, 1.005}) == Rows{60, 1, 180, 239, 31, 90, 358, 1});
  CHECK(published({128, 8, 1.2}) == Rows{70, 20, 170, 220, 45, 95, 320, 20});
  CHECK(published({64, 8, 2.0}) == Rows{42, 28, 70, 84, 35, 49, 112, 28});
  CHECK(published({40, 8, 1.1, 0.5}) == Rows{28, 3, 47, 54, 21, 34, 65, 3});  // sums to 255
  CHECK(published({40, 8, 1.1, 2.0}) == Rows{7, 3, 35, 61, 4, 11, 132, 3});
  CHECK(published({128, 8, 1.1, 0.0}) == Rows(8, 120));
}

TEST_CASE("the published floor division is Python's, computed by the remainder") {
  // With equal scores, budget = b for any beta; one higher score shows how many rows are divided by
  // score.
  const auto pool = [](std::size_t rows, double beta) {
    const HeadBudgets budgets = published_headkv_budgets(HeadScores{1, 2, {1.0, 0.0}}, {rows, 0, beta});
    return (budgets(0, 0) - budgets(0, 1)) / 2;
  };
  CHECK(pool(110, 1.1) == 99);  // 110 / 1.1 is 100 in floating point
  CHECK(pool(120, 1.2) == 100);
  CHECK(pool(120, 1.005) == 119);
  CHECK(pool(7, 2.5) == 2);
  CHECK(pool(120, 1e300) == 0);
  CHECK(pool(120, infinity) == 0);
}

TEST_CASE("plan budgets are the formula, rounded by largest remainder") {
  CHECK(rows_of(headkv_budgets(scores, 2, {128, 8, 1.005})) == Rows{30, 210, 60, 180});
  CHECK(rows_of(headkv_budgets(scores, 2, {128, 8, 1.2})) == Rows{45, 195, 70, 170});
  CHECK(rows_of(headkv_budgets(scores, 4, {64, 8, 2.0})) == Rows{42, 28, 70, 84, 35, 49, 112, 28});
  CHECK(rows_of(headkv_budgets(scores, 1, {41, 8, 1.1})) == Rows{33, 33});
  CHECK(rows_of(headkv_budgets(scores, 4, {15, 8, 1.005})) == Rows{4, 0, 10, 14, 2, 5, 21, 0});
  const HeadScores thirds{2, 3, {1, 2, 4, 1, 1, 4}};
  CHECK(rows_of(headkv_budgets(thirds, 3, {18, 8, 1.0})) == Rows{5, 9, 18, 5, 5, 18});
  CHECK(rows_of(headkv_budgets(thirds, 3, {17, 8, 1.5})) == Rows{6, 8, 14, 6, 6, 14});
  CHECK(rows_of(headkv_budgets(thirds, 1, {17, 8, 1.5})) == Rows{9, 9});
}

TEST_CASE("plan budgets sum to the capacity exactly, for any scores") {
  std::mt19937 random{7};
  for (int round = 0; round < 300; ++round) {
    const std::size_t layers = 1 + random() % 6;
    const std::size_t kv_heads = 1 + random() % 9;
    const std::size_t group = 1 + random() % 4;
    HeadScores drawn{layers, kv_heads * group};
    for (double& score : drawn.values()) {
      score = std::ldexp(static_cast<double>(random() % 1000), static_cast<int>(random() % 40) - 20);
    }
    drawn(0, 0) = 1.0;
    HeadKvBudgetConfig config{.capacity = 1 + random() % 3000,
                              .beta = 1.0 + static_cast<double>(random() % 500) / 100.0,
                              .score_power = static_cast<double>(random() % 30) / 10.0};
    config.observation_window = random() % (config.capacity + 1);
    const HeadBudgets budgets = headkv_budgets(drawn, kv_heads, config);
    CHECK(budgets.layers() == layers);
    CHECK(budgets.heads() == kv_heads);
    REQUIRE(sum_of(budgets) == (config.capacity - config.observation_window) * layers * kv_heads);
    // A head with a larger score never has fewer rows.
    const HeadScores means = group_scores(drawn, kv_heads);
    for (std::size_t a = 0; a < means.values().size(); ++a) {
      for (std::size_t b = 0; b < means.values().size(); ++b) {
        if (means.values()[a] > means.values()[b] * (1 + 1e-9)) {
          CHECK(budgets.values()[a] + 1 >= budgets.values()[b]);
        }
      }
    }
  }
}

TEST_CASE("settings that do not work are refused by name") {
  const auto make = [](const HeadScores& some, const HeadKvBudgetConfig& config = {}) {
    CHECK_THROWS_AS((void)published_headkv_budgets(some, config), ConfigError);
    CHECK_THROWS_AS((void)headkv_budgets(some, 2, config), ConfigError);
  };
  make(scores, {.beta = not_a_number});
  make(scores, {.beta = 0.99});
  make(scores, {.beta = -infinity});
  make(scores, {.score_power = not_a_number});
  make(scores, {.score_power = -1.0});
  make(scores, {.score_power = infinity});
  make(scores, {.capacity = 0, .observation_window = 0});
  make(scores, {.capacity = 8, .observation_window = 9});
  make(HeadScores{2, 4, 0.0});
  make(HeadScores{});
  for (const double bad : {not_a_number, infinity, -0.5}) {
    HeadScores broken = scores;
    broken(1, 3) = bad;
    make(broken);
  }
  CHECK_THROWS_WITH_AS((void)headkv_budgets(scores, 3), doctest::Contains("3 KV heads"), ConfigError);
  CHECK_THROWS_AS((void)headkv_budgets(scores, 0), ConfigError);
  CHECK_THROWS_AS((void)headkv_budgets(HeadScores{1, 2, {1e308, 1e308}}, 2), ConfigError);
}
