// SPDX-License-Identifier: Apache-2.0
//
// Budgets by shares are compared with the multiple of the shares that a bisection finds.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/share_budgets.hpp>
#include <support/compare.hpp>

using namespace kvpolicy;

namespace {

using Rows = std::vector<std::size_t>;

Rows rows_of(const HeadBudgets& budgets) { return {budgets.values().begin(), budgets.values().end()}; }

// The multiple of the shares whose parts, none above `most`, sum to `total`.
double multiple_for(const std::vector<double>& shares, double most, double total) {
  double low = 0.0;
  double high = 1e18;
  for (int i = 0; i < 400; ++i) {
    const double middle = low + (high - low) / 2;
    double sum = 0.0;
    for (const double share : shares) sum += std::min(share * middle, most);
    (sum < total ? low : high) = middle;
  }
  return low;
}

}  // namespace

TEST_CASE("budgets are in proportion to shares, and what a head cannot use goes to the others") {
  const HeadShares shares{2, 2, {0.125, 0.25, 0.5, 1.0}};
  CHECK(rows_of(share_budgets(shares, {.capacity = 15, .most_rows = 100})) == Rows{4, 8, 16, 32});
  CHECK(rows_of(share_budgets(shares, {.capacity = 15, .most_rows = 32})) == Rows{4, 8, 16, 32});
  CHECK(rows_of(share_budgets(shares, {.capacity = 15, .most_rows = 18})) == Rows{8, 16, 18, 18});
  CHECK(rows_of(share_budgets(shares, {.capacity = 15, .most_rows = 15})) == Rows{15, 15, 15, 15});
  CHECK(rows_of(share_budgets(HeadShares{1, 1, {0.001}}, {.capacity = 7, .most_rows = 9})) == Rows{7});
}

TEST_CASE("heads that need nothing get rows only where all others have a whole text") {
  const HeadShares shares{1, 4, {0.0, 0.5, 0.0, 1.0}};
  CHECK(rows_of(share_budgets(shares, {.capacity = 3, .most_rows = 8})) == Rows{0, 4, 0, 8});
  CHECK(rows_of(share_budgets(shares, {.capacity = 5, .most_rows = 8})) == Rows{2, 8, 2, 8});
  CHECK(rows_of(share_budgets(HeadShares{1, 3, {0.0, 0.0, 0.0}}, {.capacity = 5, .most_rows = 8})) ==
        Rows{5, 5, 5});
}

TEST_CASE("budgets of random shares sum to the capacity, and are the multiple of a bisection to a row") {
  std::mt19937 random{1};
  for (int trial = 0; trial < 300; ++trial) {
    const std::size_t layers = 1 + random() % 9;
    const std::size_t heads = 1 + random() % 5;
    std::vector<double> values(layers * heads);
    // Many of them small, as they are in models.
    for (double& value : values) {
      const double x = static_cast<double>(random() % 1000 + 1) / 1000;
      value = x * x * x;
    }
    const std::size_t most = 1 + random() % 5000;
    const std::size_t capacity = 1 + random() % most;
    CAPTURE(trial);
    const Rows rows =
        rows_of(share_budgets(HeadShares{layers, heads, values}, {.capacity = capacity, .most_rows = most}));
    CHECK(std::accumulate(rows.begin(), rows.end(), std::size_t{0}) == capacity * rows.size());
    const double multiple = multiple_for(values, static_cast<double>(most),
                                         static_cast<double>(capacity) * static_cast<double>(rows.size()));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      CHECK(rows[i] <= most);
      const double exact = std::min(values[i] * multiple, static_cast<double>(most));
      // A rounded part is within one of it; the bisection ends within 1e-6 of a row.
      CHECK(static_cast<double>(rows[i]) >= exact - 1 - 1e-6);
      CHECK(static_cast<double>(rows[i]) <= exact + 1 + 1e-6);
    }
  }
}

TEST_CASE("shares and settings that do not work are refused by name") {
  const auto refusal = [](const HeadShares& shares, const ShareBudgetConfig& config) {
    return test::thrown<ConfigError>([&] { static_cast<void>(share_budgets(shares, config)); });
  };
  const HeadShares one{1, 1, {0.5}};
  CHECK(test::contains(refusal(one, {.capacity = 9, .most_rows = 8}),
                       "capacity is 9, must be 1 to most_rows = 8"));
  CHECK(test::contains(refusal(one, {.capacity = 0, .most_rows = 8}), "capacity is 0"));
  CHECK(test::contains(refusal(one, {.capacity = 1, .most_rows = 0}), "most_rows is 0"));
  CHECK(test::contains(refusal(HeadShares{}, {}), "there are none"));
  for (const double wrong : {-0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(test::contains(refusal(HeadShares{1, 2, {0.5, wrong}}, {}), "the share of layer 0, head 1 is"));
  }
}
