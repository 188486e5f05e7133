// SPDX-License-Identifier: Apache-2.0
//
// Lengths chosen from measurements in simulated decoding: the true costs are known, times are noisy,
// and some are ten times too long.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/speculation/draft_length.hpp>

using namespace kvpolicy;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

struct Truth {
  double acceptance = 0.5;
  double draft = 0.1;
  double base = 1.0;
  double per_token = 0.01;

  // The best length, found by trying each.
  [[nodiscard]] std::size_t best(std::size_t most) const {
    std::size_t best = 0;
    double highest = 0;
    for (std::size_t length = 0; length <= most; ++length) {
      double tokens = 0;
      for (std::size_t i = 0; i <= length; ++i) tokens += std::pow(acceptance, i);
      const auto g = static_cast<double>(length);
      const double speed = tokens / (g * draft + base + per_token * (g + 1));
      if (speed <= highest) continue;
      highest = speed;
      best = length;
    }
    return best;
  }
};

class Simulation {
 public:
  explicit Simulation(unsigned seed, double noise = 0.05, double outliers = 0.03)
      : random_{seed}, noise_{noise}, outliers_{outliers} {}

  // Simulates one round with the requested length.
  DraftRound round(const DraftLength& length, const Truth& truth) {
    DraftRound result{.drafted = length.length()};
    while (result.accepted < result.drafted && uniform() < truth.acceptance) ++result.accepted;
    const auto g = static_cast<double>(result.drafted);
    result.draft_seconds = noisy(g * truth.draft);
    result.verify_seconds = noisy(truth.base + truth.per_token * (g + 1));
    return result;
  }

 private:
  double uniform() { return std::uniform_real_distribution<double>{0.0, 1.0}(random_); }
  double noisy(double seconds) {
    const double error = 1 + noise_ * (2 * uniform() - 1);
    return seconds * error * (uniform() < outliers_ ? 10.0 : 1.0);
  }

  std::mt19937 random_;
  double noise_;
  double outliers_;
};

// The share of `rounds` rounds whose best length is within 1 of the true one, and the same for
// requested lengths.
struct Share {
  double best = 0;
  double asked = 0;
};

Share near_optimum(DraftLength& length, Simulation& simulation, const Truth& truth, int rounds,
                   std::size_t most = 16) {
  const std::size_t target = truth.best(most);
  const auto near = [&](std::size_t value) { return value + 1 >= target && value <= target + 1; };
  Share share;
  for (int i = 0; i < rounds; ++i) {
    share.best += near(length.best()) ? 1.0 / rounds : 0.0;
    share.asked += near(length.length()) ? 1.0 / rounds : 0.0;
    length.observe(simulation.round(length, truth));
  }
  return share;
}

}  // namespace

TEST_CASE("the length converges to the optimum and stays") {
  unsigned seed = 0;
  for (const Truth& truth :
       {Truth{0.9, 0.1, 1.0, 0.02}, Truth{0.7, 0.05, 1.0, 0.05}, Truth{0.5, 0.02, 1.0, 0.1},
        Truth{0.8, 0.3, 1.0, 0.0}, Truth{0.95, 0.01, 0.5, 0.2}, Truth{0.3, 0.1, 1.0, 0.01},
        Truth{0.99, 0.01, 1.0, 0.0}}) {
    CAPTURE(truth.acceptance);
    CAPTURE(truth.draft);
    DraftLength length{{.memory = 1024.0}};
    Simulation simulation{++seed};
    near_optimum(length, simulation, truth, 600);
    const Share share = near_optimum(length, simulation, truth, 1000);
    CHECK(share.best >= 0.95);
    CHECK(share.asked >= 0.85);
    CHECK(std::abs(length.acceptance() - truth.acceptance) <= 0.05);
    CHECK(length.costs().draft == doctest::Approx(truth.draft).epsilon(0.1));
    CHECK(length.costs().verify(5) == doctest::Approx(truth.base + 5 * truth.per_token).epsilon(0.1));
  }
}

TEST_CASE("the length follows a change of acceptance and of costs") {
  DraftLength length;
  Simulation simulation{20};
  const Truth good{0.9, 0.1, 1.0, 0.02};
  const Truth poor{0.4, 0.1, 1.0, 0.02};
  const Truth slow{0.9, 0.4, 1.0, 0.02};
  for (const Truth& truth : {good, poor, good, slow, good}) {
    near_optimum(length, simulation, truth, 400);
    CHECK(near_optimum(length, simulation, truth, 200).best >= 0.85);
  }
}

TEST_CASE("plain decoding if a draft does not pay off, and back if it does") {
  DraftLength length;
  Simulation simulation{21};
  const Truth useless{0.05, 0.3, 1.0, 0.05};
  const Truth good{0.9, 0.1, 1.0, 0.02};
  REQUIRE(useless.best(16) == 0);
  for (int times = 0; times < 2; ++times) {
    for (int i = 0; i < 1000; ++i) length.observe(simulation.round(length, useless));
    int plain = 0;
    int tried = 0;
    for (int i = 0; i < 640; ++i) {
      (length.length() == 0 ? plain : tried) += 1;
      length.observe(simulation.round(length, useless));
    }
    CHECK(plain >= 560);
    CHECK(tried >= 5);
    for (int i = 0; i < 700; ++i) length.observe(simulation.round(length, good));
    CHECK(near_optimum(length, simulation, good, 200).best >= 0.8);
  }
}

TEST_CASE("drafts that are never accepted, and drafts that always are") {
  Simulation simulation{22};
  DraftLength never;
  DraftLength always;
  for (int i = 0; i < 500; ++i) {
    never.observe(simulation.round(never, {0.0, 0.1, 1.0, 0.01}));
    always.observe(simulation.round(always, {1.0, 0.01, 1.0, 0.01}));
  }
  CHECK(never.best() == 0);
  CHECK(never.acceptance() < 0.1);
  CHECK(always.best() == 16);
  CHECK(always.acceptance() > 0.99);
}

TEST_CASE("the first length is used until a draft was tried, even if passes without a draft have a cost") {
  for (const std::size_t first : {1U, 4U, 9U}) {
    DraftLength length{{.max_length = 16, .first = first}};
    for (int round = 0; round < 100; ++round) {
      length.observe({.drafted = 0, .verify_seconds = 1.0});
      CHECK(length.length() == first);
    }
    // A draft that is never accepted is given up as usual.
    for (int round = 0; round < 100; ++round) {
      length.observe({.drafted = length.length(), .draft_seconds = 1.0, .verify_seconds = 1.0});
    }
    CHECK(length.best() == 0);
  }
}

TEST_CASE("draft tokens after a refused one are no evidence") {
  // Of 8 draft tokens one is accepted and one is refused: 1 of 2, not 1 of 8.
  DraftLength length{{.prior = 0.5, .memory = infinity}};
  for (int i = 0; i < 100; ++i) length.observe({.drafted = 8, .accepted = 1});
  CHECK(length.acceptance() == doctest::Approx(0.5));
  DraftLength all{{.prior = 0.5, .prior_trials = 1.0, .memory = infinity}};
  all.observe({.drafted = 3, .accepted = 3});
  CHECK(all.acceptance() == doctest::Approx(3.5 / 4));
  all.observe({.drafted = 4, .accepted = 0});
  CHECK(all.acceptance() == doctest::Approx(3.5 / 5));
  all.observe({});  // plain decoding
  CHECK(all.acceptance() == doctest::Approx(3.5 / 5));
}

TEST_CASE("implausible times are ignored, but the acceptance counts") {
  DraftLength length{{.prior = 0.5, .prior_trials = 1.0, .memory = infinity}};
  for (const double bad : {0.0, -1.0, not_a_number, infinity, 1e300, 1e-320}) {
    length.observe({.drafted = 4, .accepted = 4, .draft_seconds = bad, .verify_seconds = bad});
    CHECK(length.costs().draft == 0.0);
    CHECK(length.costs().verify(1) == 0.0);
    CHECK(length.length() == 4);
  }
  CHECK(length.acceptance() == doctest::Approx(24.5 / 25));
  // A draft without times costs nothing, so a long draft pays off.
  length.observe({.drafted = 4, .accepted = 4, .draft_seconds = 0.0, .verify_seconds = 1.0});
  CHECK(length.best() == 16);
  const DraftCosts before = length.costs();
  length.observe({.drafted = 8, .accepted = 8, .draft_seconds = -1.0, .verify_seconds = not_a_number});
  CHECK(length.costs().draft == before.draft);
  CHECK(length.costs().verify(9) == before.verify(9));
}

TEST_CASE("a fixed length is kept, and measured") {
  DraftLength length{{.fixed = 3}};
  Simulation simulation{23};
  const Truth truth{0.95, 0.01, 1.0, 0.0};
  for (int i = 0; i < 300; ++i) {
    REQUIRE(length.length() == 3);
    length.observe(simulation.round(length, truth));
  }
  CHECK(std::abs(length.acceptance() - 0.95) <= 0.05);
  DraftLength plain{{.max_length = 0}};
  for (int i = 0; i < 300; ++i) {
    REQUIRE(plain.length() == 0);
    plain.observe(simulation.round(plain, truth));
  }
  CHECK(DraftLength{{.fixed = 0}}.length() == 0);
  CHECK(DraftLength{{.max_length = 2}}.length() == 2);
}

TEST_CASE("lengths never exceed the longest; without probes they are the best") {
  for (const std::size_t most : {1u, 2u, 5u}) {
    DraftLength length{{.max_length = most}};
    DraftLength settled{{.max_length = most, .probe_every = 0}};
    Simulation simulation{24};
    bool other = false;
    for (int i = 0; i < 500; ++i) {
      REQUIRE(length.length() <= most);
      REQUIRE(settled.length() == settled.best());
      other = other || length.length() != length.best();
      length.observe(simulation.round(length, {0.9, 0.05, 1.0, 0.01}));
      settled.observe(simulation.round(settled, {0.9, 0.05, 1.0, 0.01}));
    }
    CHECK(length.best() == most);
    CHECK(other);
  }
}

TEST_CASE("a draft that is given up for good is not tried again") {
  DraftLength length{{.retry_every = 0}};
  Simulation simulation{25};
  for (int i = 0; i < 500; ++i) length.observe(simulation.round(length, {0.0, 0.5, 1.0, 0.01}));
  for (int i = 0; i < 500; ++i) {
    REQUIRE(length.length() == 0);
    length.observe(simulation.round(length, {1.0, 0.01, 1.0, 0.01}));
  }
}

TEST_CASE("single times may be any number of times too long") {
  PassTimes times;
  std::mt19937 random{26};
  for (int i = 0; i < 400; ++i) {
    const std::size_t tokens = i % 4 == 0 ? 3 : 9;
    const double seconds = 1.0 + 0.1 * static_cast<double>(tokens);
    times.add(tokens, random() % 16 == 0 ? seconds * 1000 : seconds);
    if (i < 12) continue;
    REQUIRE(times.has_slope());
    CHECK(times.cost().base == doctest::Approx(1.0));
    CHECK(times.cost().per_token == doctest::Approx(0.1));
  }
}

TEST_CASE("the line through the times, by hand") {
  PassTimes times;
  CHECK(times.empty());
  CHECK(times.cost()(4) == 0.0);
  times.add(4, 2.0);
  CHECK_FALSE(times.has_slope());
  CHECK(times.cost()(9) == 2.0);  // nothing is known about longer passes
  times.add(8, 3.0);
  CHECK(times.has_slope());
  CHECK(times.cost().base == doctest::Approx(1.0));
  CHECK(times.cost().per_token == doctest::Approx(0.25));
  times.add(8, 3.0);  // 8 has more measurements than 4: the slope stays until 4 has as many
  CHECK_FALSE(times.has_slope());
  CHECK(times.cost()(8) == doctest::Approx(3.0));
  CHECK(times.cost().per_token == doctest::Approx(0.25));
  for (int i = 0; i < 4; ++i) times.add(4, 2.6);
  CHECK_FALSE(times.has_slope());
  times.add(8, 3.0);
  CHECK(times.cost().per_token == doctest::Approx(0.1));
  for (int i = 0; i < 5; ++i) times.add(4, 5.0);  // times fall with the tokens: treated as constant
  CHECK(times.cost().per_token == 0.0);
  CHECK(times.cost().base == doctest::Approx((5 * 5.0 + 3 * 3.0) / 8));
  PassTimes steep;  // the line is negative at 0 tokens: it goes through the origin
  for (int i = 0; i < 2; ++i) {
    steep.add(1, 0.1);
    steep.add(3, 2.0);
  }
  CHECK(steep.cost().base == 0.0);
  CHECK(steep.cost().per_token == doctest::Approx(1.05 / 2));
}

TEST_CASE("old times are not used") {
  PassTimes times;
  for (int i = 0; i < 3; ++i) times.add(2, 1.0);
  for (std::size_t i = 0; i < PassTimes::believed_for; ++i) times.add(6, 9.0);
  CHECK(times.cost()(6) == doctest::Approx(9.0));
  CHECK_FALSE(times.has_slope());
  for (int i = 0; i < 3; ++i) times.add(4, 9.0);
  CHECK(times.has_slope());
  CHECK(times.cost().per_token == doctest::Approx(0.0));
}

TEST_CASE("errors leave the measurements as they were") {
  DraftLength length;
  length.observe({.drafted = 4, .accepted = 2, .draft_seconds = 0.1, .verify_seconds = 1.0});
  const double before = length.acceptance();
  CHECK_THROWS_AS(length.observe({.drafted = 3, .accepted = 4}), ConfigError);
  CHECK_THROWS_AS(length.observe({.drafted = 4096, .verify_seconds = 1.0}), ConfigError);
  CHECK(length.acceptance() == before);
  CHECK_THROWS_AS(DraftLength({.max_length = 4096}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.max_length = 2, .fixed = 3}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.prior = not_a_number}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.prior = 1.5}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.prior_trials = 0.0}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.prior_trials = infinity}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.memory = 0.5}), ConfigError);
  CHECK_THROWS_AS(DraftLength({.memory = not_a_number}), ConfigError);
}
