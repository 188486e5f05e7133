// SPDX-License-Identifier: Apache-2.0
//
// Compares the measured acceptance with the one that generated the observations.
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/speculation/acceptance_vector.hpp>

using namespace kvpolicy;

namespace {

using Shares = std::vector<double>;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// Draws which of `children` children is accepted, if the k-th is with probability shares[k].
std::optional<std::size_t> draw_child(std::mt19937& random, const Shares& shares, std::size_t children) {
  double draw = std::uniform_real_distribution<double>{0.0, 1.0}(random);
  for (std::size_t k = 0; k < children && k < shares.size(); ++k) {
    draw -= shares[k];
    if (draw < 0) return k;
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("without observations the prior is used") {
  const Shares prior{0.5, 0.25, 0.0, 0.125};
  const AcceptanceVector measured{{.prior = prior}};
  REQUIRE(measured.size() == 4);
  for (std::size_t k = 0; k < 4; ++k) {
    CHECK(measured.acceptance()[k] == doctest::Approx(prior[k]));
    CHECK(measured.trials(k) == 0.0);
  }
  // Nothing is left for the second child; such a prior must not cause a division by zero.
  CHECK(AcceptanceVector{{.prior = {1.0, 0.0}}}.acceptance() == Shares{1.0, 0.0});
  const Shares all = AcceptanceVector{}.acceptance();
  CHECK(std::accumulate(all.begin(), all.end(), 0.0) <= 1.0);
  CHECK_NOTHROW(static_cast<void>(best_tree(all, 32)));
}

TEST_CASE("counts, by hand") {
  AcceptanceVector measured{{.prior = {0.5, 0.25}, .prior_trials = 2.0, .memory = infinity}};
  measured.observe(2, 0);
  measured.observe(2, 1);
  measured.observe(2, std::nullopt);
  measured.observe(1, std::nullopt);  // says nothing about a second child
  measured.observe(0, std::nullopt);  // says nothing at all
  CHECK(measured.trials(0) == 4.0);
  CHECK(measured.trials(1) == 2.0);
  // First child: 1 of 4, prior 1 of 2. Second child, when it was tried: 1 of 2, prior 1 of 2.
  CHECK(measured.acceptance()[0] == doctest::Approx(2.0 / 6.0));
  CHECK(measured.acceptance()[1] == doctest::Approx(4.0 / 6.0 * 0.5));
  measured.observe(9, 7);  // more children than are measured: both were refused
  CHECK(measured.trials(1) == 3.0);
  CHECK(measured.acceptance()[0] == doctest::Approx(2.0 / 7.0));
}

TEST_CASE("measured acceptance converges to the true one, for any numbers of children") {
  std::mt19937 random{5};
  const Shares truth{0.55, 0.2, 0.1, 0.05};
  AcceptanceVector measured{{.prior = {0.1, 0.1, 0.1, 0.1}, .memory = infinity}};
  const int nodes = 60'000;
  for (int node = 0; node < nodes; ++node) {
    const std::size_t children = 1 + random() % 4;
    measured.observe(children, draw_child(random, truth, children));
  }
  const Shares acceptance = measured.acceptance();
  for (std::size_t k = 0; k < truth.size(); ++k) {
    CHECK(std::abs(acceptance[k] - truth[k]) <= 0.01);
  }
}

TEST_CASE("old observations lose weight") {
  std::mt19937 random{6};
  AcceptanceVector measured{{.prior = {0.5, 0.1}, .memory = 500.0}};
  for (const Shares& truth : {Shares{0.9, 0.05}, Shares{0.2, 0.4}}) {
    for (int node = 0; node < 4'000; ++node) measured.observe(2, draw_child(random, truth, 2));
    CHECK(std::abs(measured.acceptance()[0] - truth[0]) <= 0.06);
    CHECK(std::abs(measured.acceptance()[1] - truth[1]) <= 0.06);
    CHECK(measured.trials(0) <= 500.0);
  }
}

TEST_CASE("every measurement is a distribution that trees can be built from") {
  std::mt19937 random{7};
  for (int round = 0; round < 50; ++round) {
    AcceptanceVector measured{{.prior = {0.9, 0.1, 0.0}, .prior_trials = 0.01, .memory = 3.0}};
    for (int node = 0; node < 40; ++node) {
      const std::size_t children = random() % 6;
      const bool some = children > 0 && random() % 2 == 0;
      measured.observe(children, some ? std::optional<std::size_t>{random() % children} : std::nullopt);
      CHECK_NOTHROW(detail::check_acceptance(measured.acceptance()));
    }
  }
}

TEST_CASE("errors leave the counts as they were") {
  AcceptanceVector measured;
  measured.observe(3, 1);
  const Shares before = measured.acceptance();
  CHECK_THROWS_AS(measured.observe(3, 3), ConfigError);
  CHECK_THROWS_AS(measured.observe(0, 0), ConfigError);
  CHECK(measured.acceptance() == before);
  CHECK_THROWS_AS(AcceptanceVector{{.prior = {}}}, ConfigError);
  CHECK_THROWS_AS(AcceptanceVector({.prior = {0.7, 0.7}}), ConfigError);
  CHECK_THROWS_AS(AcceptanceVector({.prior = {not_a_number}}), ConfigError);
  CHECK_THROWS_AS(AcceptanceVector({.prior_trials = 0.0}), ConfigError);
  CHECK_THROWS_AS(AcceptanceVector({.prior_trials = infinity}), ConfigError);
  CHECK_THROWS_AS(AcceptanceVector({.memory = 0.5}), ConfigError);
  CHECK_THROWS_AS(AcceptanceVector({.memory = not_a_number}), ConfigError);
}
