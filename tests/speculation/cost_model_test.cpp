// SPDX-License-Identifier: Apache-2.0
//
// Compares the cost model with sums that are written out and with rounds that are simulated with random
// numbers, and its best lengths with a search.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/speculation/cost_model.hpp>

using namespace kvpolicy;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

double oracle_tokens(double a, std::size_t length) {
  double sum = 0;
  double power = 1;
  for (std::size_t i = 0; i <= length; ++i, power *= a) sum += power;
  return sum;
}

struct Played {
  double tokens = 0;
  double seconds = 0;
};

// Simulates one round of the hierarchy, token by token.
Played play(std::mt19937& random, const HierarchyAcceptance& a, const HierarchyLengths& lengths,
            const HierarchyCosts& costs) {
  const auto accepted = [&](double probability) {
    return std::uniform_real_distribution<double>{0.0, 1.0}(random) < probability;
  };
  Played played;
  std::size_t standing = 0;
  while (standing < lengths.outer) {
    std::size_t drafts = 0;
    while (drafts < lengths.inner && standing + drafts + 1 < lengths.outer) ++drafts;
    played.seconds += costs.draft * static_cast<double>(drafts);
    played.seconds += costs.selected.base + costs.selected.per_token * static_cast<double>(drafts + 1);
    std::size_t stand = 0;
    while (stand < drafts && accepted(a.selected)) ++stand;
    standing += stand + 1;
  }
  played.seconds += costs.all.base + costs.all.per_token * static_cast<double>(standing + 1);
  played.tokens = 1;
  while (played.tokens <= static_cast<double>(standing) && accepted(a.all)) ++played.tokens;
  return played;
}

}  // namespace

TEST_CASE("expected tokens are the sum of powers") {
  for (const double a : {0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-12, 1.0}) {
    for (const std::size_t length : {0u, 1u, 2u, 7u, 100u}) {
      CAPTURE(a);
      CAPTURE(length);
      CHECK(expected_tokens(a, length) == doctest::Approx(oracle_tokens(a, length)).epsilon(1e-12));
    }
  }
  CHECK(expected_tokens(0.0, 9) == 1.0);
  CHECK(expected_tokens(1.0, 9) == 10.0);
}

TEST_CASE("speed-up, by hand") {
  // 1 + 0.5 + 0.25 tokens for 2 draft tokens of cost 0.1 and a pass over 3 tokens; a plain step costs
  // 1.
  const DraftCosts costs{0.1, {0.9, 0.1}};
  CHECK(speedup(0.5, 2, costs) == doctest::Approx(1.75 / (0.2 + 1.2)));
  CHECK(speedup(0.5, 0, costs) == doctest::Approx(1.0));
  // Leviathan et al., theorem 3.8: (1 - a^(g + 1)) / ((1 - a)(g c + 1)).
  CHECK(speedup(0.8, 5, {0.05, {1.0, 0.0}}) ==
        doctest::Approx((1 - std::pow(0.8, 6)) / (0.2 * (5 * 0.05 + 1))));
}

TEST_CASE("the best length is the best of all, and the shortest of equal ones") {
  std::mt19937 random{8};
  std::uniform_real_distribution<double> uniform{0.0, 1.0};
  for (int round = 0; round < 500; ++round) {
    const double a = uniform(random);
    const DraftCosts costs{0.5 * uniform(random) * uniform(random), {uniform(random), 0.1 * uniform(random)}};
    const std::size_t most = random() % 24;
    const std::size_t best = best_length(a, costs, most);
    REQUIRE(best <= most);
    const auto speed = [&](std::size_t length) {
      const auto g = static_cast<double>(length);
      return oracle_tokens(a, length) /
             (g * costs.draft + costs.verify.base + costs.verify.per_token * (g + 1));
    };
    for (std::size_t length = 0; length <= most; ++length) {
      CHECK(speed(length) <= speed(best) * (1 + 1e-12));
    }
  }
}

TEST_CASE("the best length in extreme cases") {
  const DraftCosts cheap{0.01, {1.0, 0.001}};
  CHECK(best_length(0.0, cheap, 16) == 0);
  CHECK(best_length(1.0, cheap, 16) == 16);
  CHECK(best_length(1.0, cheap, 0) == 0);
  CHECK(best_length(0.9, {2.0, {1.0, 0.0}}, 16) == 0);   // a draft costs more than the target
  CHECK(best_length(0.9, {0.0, {0.0, 1.0}}, 16) == 0);   // a longer pass saves nothing
  CHECK(best_length(0.5, {0.0, {1.0, 0.0}}, 16) == 16);  // drafts cost nothing
  // A draft costs as much as it is accepted: the first token breaks even, and plain decoding wins ties.
  CHECK(best_length(0.25, {0.25, {1.0, 0.0}}, 16) == 0);
}

TEST_CASE("a simulated hierarchy takes and yields what the model says") {
  std::mt19937 random{9};
  const HierarchyCosts costs{0.05, {0.3, 0.02}, {1.0, 0.03}};
  for (const HierarchyAcceptance& a : {HierarchyAcceptance{0.7, 0.9}, HierarchyAcceptance{0.3, 0.97},
                                       HierarchyAcceptance{1.0, 0.5}, HierarchyAcceptance{0.0, 1.0}}) {
    for (const HierarchyLengths& lengths :
         {HierarchyLengths{1, 6}, HierarchyLengths{4, 16}, HierarchyLengths{0, 5}, HierarchyLengths{8, 3},
          HierarchyLengths{3, 0}}) {
      const int rounds = 20'000;
      double tokens = 0;
      double seconds = 0;
      for (int round = 0; round < rounds; ++round) {
        const Played played = play(random, a, lengths, costs);
        tokens += played.tokens;
        seconds += played.seconds;
      }
      const double plain = costs.all.base + costs.all.per_token;
      CAPTURE(lengths.inner);
      CAPTURE(lengths.outer);
      CHECK(speedup(a, lengths, costs) == doctest::Approx(tokens * plain / seconds).epsilon(0.01));
      const auto until =
          standing_costs(a.selected, lengths.inner, lengths.outer, {costs.draft, costs.selected});
      CHECK(until.back() + costs.all(lengths.outer + 1) == doctest::Approx(seconds / rounds).epsilon(0.01));
    }
  }
}

TEST_CASE("a hierarchy without a draft is the target drafting for itself") {
  const HierarchyCosts costs{0.05, {0.3, 0.02}, {1.0, 0.03}};
  for (std::size_t outer = 0; outer <= 12; ++outer) {
    CHECK(speedup(HierarchyAcceptance{0.6, 0.9}, {0, outer}, costs) ==
          doctest::Approx(speedup(0.9, outer, {0.32, {1.0, 0.03}})));
  }
}

TEST_CASE("the best lengths of a hierarchy are the best of all") {
  std::mt19937 random{10};
  std::uniform_real_distribution<double> uniform{0.0, 1.0};
  for (int round = 0; round < 60; ++round) {
    const HierarchyAcceptance a{uniform(random), 1 - 0.5 * uniform(random)};
    const HierarchyCosts costs{0.1 * uniform(random),
                               {0.5 * uniform(random) + 0.01, 0.05 * uniform(random)},
                               {1.0, 0.05 * uniform(random)}};
    const HierarchyLengths most{random() % 6, random() % 20};
    const HierarchyLengths best = best_lengths(a, costs, most);
    REQUIRE(best.inner <= most.inner);
    REQUIRE(best.outer <= most.outer);
    const double highest = speedup(a, best, costs);
    for (std::size_t inner = 0; inner <= most.inner; ++inner) {
      for (std::size_t outer = 0; outer <= most.outer; ++outer) {
        CHECK(speedup(a, HierarchyLengths{inner, outer}, costs) <= highest * (1 + 1e-12));
      }
    }
  }
  CHECK(best_lengths({0.9, 0.9}, {0.1, {2.0, 0.0}, {1.0, 0.0}}, {0, 9}) == HierarchyLengths{0, 0});
  // A draft that is never right gains nothing: the target alone proposes.
  CHECK(best_lengths({0.0, 0.9}, {0.1, {0.2, 0.0}, {1.0, 0.0}}, {4, 16}).inner == 0);
}

TEST_CASE("errors name what is wrong") {
  const DraftCosts good{0.1, {1.0, 0.0}};
  for (const double a : {-0.1, 1.1, not_a_number}) {
    CHECK_THROWS_AS(static_cast<void>(expected_tokens(a, 3)), ConfigError);
    CHECK_THROWS_AS(static_cast<void>(best_length(a, good, 3)), ConfigError);
    CHECK_THROWS_AS(static_cast<void>(best_lengths({a, 0.5}, {0.1, {1.0, 0.0}, {1.0, 0.0}}, {2, 2})),
                    ConfigError);
    CHECK_THROWS_AS(
        static_cast<void>(speedup(HierarchyAcceptance{0.5, a}, {2, 2}, {0.1, {1.0, 0.0}, {1.0, 0.0}})),
        ConfigError);
  }
  for (const DraftCosts& costs :
       {DraftCosts{-0.1, {1.0, 0.0}}, DraftCosts{not_a_number, {1.0, 0.0}}, DraftCosts{infinity, {1.0, 0.0}},
        DraftCosts{0.1, {0.0, 0.0}}, DraftCosts{0.1, {-1.0, 2.0}}, DraftCosts{0.1, {1.0, not_a_number}},
        DraftCosts{0.1, {infinity, 0.0}}}) {
    CHECK_THROWS_AS(static_cast<void>(speedup(0.5, 1, costs)), ConfigError);
    CHECK_THROWS_AS(static_cast<void>(best_length(0.5, costs, 3)), ConfigError);
    CHECK_THROWS_AS(static_cast<void>(standing_costs(0.5, 1, 1, costs)), ConfigError);
  }
}
