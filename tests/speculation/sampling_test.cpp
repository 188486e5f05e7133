// SPDX-License-Identifier: Apache-2.0
//
// From logits to distributions and draws: compared with the definitions on random logits, and tested at
// the limits.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/sampling.hpp>

#include "chi_square.hpp"

using namespace kvpolicy;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr double just_below_one = 1.0 - 0x1p-53;

Distribution sampled(const std::vector<float>& logits, const SamplingOptions& options) {
  return distribution_of(logits, options);
}
bool throws_shape_error(const std::vector<float>& logits, float temperature = 1.0F) {
  try {
    (void)distribution_of(logits, {.temperature = temperature});
    return false;
  } catch (const ShapeError&) {
    return true;
  }
}
double total(const Distribution& p) {
  double sum = 0.0;
  for (const auto& outcome : p.outcomes()) sum += outcome.probability;
  return sum;
}

}  // namespace

TEST_CASE("distributions equal the definitions on random logits, with ties and banned tokens") {
  std::mt19937_64 random{7};
  std::normal_distribution<float> normal{0.0F, 2.0F};
  const auto pick = [&](std::size_t below) { return random() % below; };
  for (int round = 0; round < 3000; ++round) {
    std::vector<float> logits(1 + pick(40));
    for (float& x : logits) x = normal(random);
    if (round % 3 == 0) {
      for (float& x : logits) x = std::round(x);  // ties
    }
    if (round % 5 == 0) {
      for (float& x : logits) x = pick(4) == 0 ? -infinity : x;
      logits[pick(logits.size())] = 1.0F;
    }
    const SamplingOptions options{.temperature = std::array{0.05F, 0.7F, 1.0F, 3.0F}[pick(4)],
                                  .top_k = std::array<std::size_t, 5>{0, 1, 3, 17, 400}[pick(5)],
                                  .top_p = std::array{1.0F, 0.9F, 0.31F, 0.013F}[pick(4)]};
    CAPTURE(round);
    const Distribution p = sampled(logits, options);
    const std::vector<double> expected = test::shaped(logits, options);
    bool equal = true;
    for (std::size_t token = 0; token < logits.size(); ++token) {
      const double own = p(static_cast<int>(token));
      equal = equal && std::abs(own - expected[token]) <= 1e-12;
    }
    CHECK(equal);
    CHECK(std::abs(total(p) - 1.0) <= 1e-12);
    CHECK(std::ranges::is_sorted(p.outcomes(), {}, &Distribution::Outcome::token));
  }
}

TEST_CASE("greedy is a temperature of 0, and the limit of small temperatures") {
  const std::vector<float> logits{0.5F, 2.0F, -1.0F, 2.0F, 1.99F};
  CHECK(sampled(logits, {}) == Distribution::certain(1));
  CHECK(sampled(logits, {.temperature = 1.0F, .top_k = 1}) == Distribution::certain(1));
  // Nothing overflows, however small the temperature: the two likeliest tokens share the probability.
  for (const float tiny : {1e-6F, 1e-30F, std::numeric_limits<float>::denorm_min()}) {
    const Distribution p = sampled(logits, {.temperature = tiny});
    CHECK(p(1) == 0.5);
    CHECK(p(3) == 0.5);
    CHECK(p(4) == 0.0);
  }
  const float huge = std::numeric_limits<float>::max();
  const Distribution far = sampled({-huge, huge, 0.0F}, {.temperature = 0.5F});
  CHECK(far == Distribution::certain(1));
}

TEST_CASE("logits without a meaning are refused by name") {
  for (const float temperature : {0.0F, 1.0F}) {
    CHECK(throws_shape_error({}, temperature));
    CHECK(throws_shape_error({1.0F, nan_value}, temperature));
    CHECK(throws_shape_error({nan_value, 1.0F}, temperature));
    CHECK(throws_shape_error({1.0F, infinity}, temperature));
    CHECK(throws_shape_error({-infinity, -infinity}, temperature));
    CHECK_FALSE(throws_shape_error({-infinity, 0.0F}, temperature));
  }
  CHECK_THROWS_WITH_AS((void)sampled({1.0F, nan_value}, {}), doctest::Contains("token 1 is"), ShapeError);
  CHECK_THROWS_WITH_AS((void)sampled({-infinity, -infinity}, {}), doctest::Contains("all 2 tokens"),
                       ShapeError);
}

TEST_CASE("options that do not work are refused") {
  for (const float temperature : {-1.0F, nan_value, infinity}) {
    CHECK_THROWS_AS(SamplingOptions{.temperature = temperature}.validate(), ConfigError);
    CHECK_THROWS_AS((void)sampled({1.0F, 2.0F}, {.temperature = temperature}), ConfigError);
  }
  for (const float top_p : {0.0F, -0.5F, 1.001F, nan_value}) {
    CHECK_THROWS_AS(SamplingOptions{.top_p = top_p}.validate(), ConfigError);
    CHECK_THROWS_AS((void)sampled({1.0F, 2.0F}, {.temperature = 1.0F, .top_p = top_p}), ConfigError);
  }
  CHECK_NOTHROW(SamplingOptions{}.validate());
  const SamplingOptions edge{.temperature = 1e-30F, .top_k = 1'000'000, .top_p = 1e-30F};
  CHECK_NOTHROW(edge.validate());
}

TEST_CASE("top_k: ties go to the lower token, and a k above the vocabulary means all") {
  const std::vector<float> logits{1.0F, 3.0F, 1.0F, 1.0F};
  const Distribution p = sampled(logits, {.temperature = 1.0F, .top_k = 2});
  REQUIRE(p.outcomes().size() == 2);
  CHECK(p(0) > 0.0);
  CHECK(p(1) > p(0));
  CHECK(sampled(logits, {.temperature = 1.0F, .top_k = 4}) == sampled(logits, {.temperature = 1.0F}));
  CHECK(sampled(logits, {.temperature = 1.0F, .top_k = 99}) == sampled(logits, {.temperature = 1.0F}));
  // Banned tokens never count for k.
  const Distribution few = sampled({-infinity, 0.0F, -infinity, 0.0F}, {.temperature = 1.0F, .top_k = 3});
  CHECK(few.outcomes().size() == 2);
}

TEST_CASE("top_p: the fewest tokens that reach it, at least one, counted among the top_k") {
  const std::vector<float> logits{0.0F, 0.0F, 0.0F, 0.0F};
  const auto kept = [&](float top_p, std::size_t top_k = 0) {
    return sampled(logits, {.temperature = 1.0F, .top_k = top_k, .top_p = top_p}).outcomes().size();
  };
  CHECK(kept(1e-9F) == 1);
  CHECK(kept(0.25F) == 1);
  CHECK(kept(0.26F) == 2);
  CHECK(kept(0.5F) == 2);
  CHECK(kept(0.75F) == 3);
  CHECK(kept(0.76F) == 4);
  CHECK(kept(1.0F) == 4);
  CHECK(kept(0.5F, 2) == 1);  // of two tokens, not of four
  // Ties go to the lower token.
  CHECK(sampled(logits, {.temperature = 1.0F, .top_p = 0.5F}).outcomes().back().token == 1);
}

TEST_CASE("draws: the ends of [0, 1), shares, and no token of probability 0") {
  const Distribution p{{{2, 1.0}, {5, 0.0}, {7, 3.0}, {9, 0.0}}};
  CHECK(p.draw(0.0) == 2);
  CHECK(p.draw(0.249999) == 2);
  CHECK(p.draw(0.25) == 7);
  CHECK(p.draw(just_below_one) == 7);
  const Distribution leading_zero{{{0, 0.0}, {1, 1.0}}};
  CHECK(leading_zero.draw(0.0) == 1);
  // Rounding errors go to the last possible token: ten tenths sum to less than 1.
  std::vector<Distribution::Outcome> tenths;
  for (int token = 0; token < 10; ++token) tenths.push_back({token, 1.0});
  tenths.push_back({10, 0.0});
  CHECK(Distribution{tenths}.draw(just_below_one) == 9);
  CHECK(Distribution::certain(4).draw(just_below_one) == 4);
  CHECK(p(5) == 0.0);
  CHECK(p(6) == 0.0);
  CHECK(p(7) == 0.75);
}

TEST_CASE("the rest of p after a token of q was refused") {
  const Distribution p{{{0, 0.5}, {1, 0.3}, {3, 0.2}}};
  const Distribution q{{{0, 0.2}, {1, 0.5}, {2, 0.3}}};
  const Distribution rest = positive_part(p, q);
  REQUIRE(rest.outcomes().size() == 2);
  CHECK(rest(0) == doctest::Approx(0.6).epsilon(1e-12));
  CHECK(rest(3) == doctest::Approx(0.4).epsilon(1e-12));
  CHECK(positive_part(p, p) == p);
  CHECK(positive_part(p, Distribution{}) == p);
  CHECK(positive_part(Distribution::certain(1), Distribution::certain(2)) == Distribution::certain(1));
  CHECK(positive_part(p, Distribution::certain(0)) == p.without(0));
}

TEST_CASE("the only token of a distribution has no others") {
  const Distribution p{{{0, 1.0}, {1, 1.0}, {3, 2.0}}};
  CHECK(p.without(3) == Distribution{{{0, 1.0}, {1, 1.0}}});
  CHECK(p.without(2) == p);
  CHECK(Distribution::certain(3).without(3).empty());
  CHECK(Distribution{{{0, 1.0}, {1, 0.0}}}.without(0).empty());
  CHECK(Distribution{}.without(0).empty());
}

TEST_CASE("the rule: a token of q is accepted with min(1, p / q), and the result is distributed as p") {
  const Distribution p{{{0, 0.5}, {1, 0.3}, {3, 0.2}}};
  const Distribution q{{{0, 0.2}, {1, 0.5}, {2, 0.3}}};
  Random random{9};
  constexpr int trials = 200'000;
  std::array<int, 4> came{};
  std::array<int, 4> guessed{};
  std::array<int, 4> stayed{};
  for (int i = 0; i < trials; ++i) {
    const int guess = q.draw(random.uniform());
    const bool stays = SpeculativeSampling::accepts(p, q, guess, random);
    ++guessed[static_cast<std::size_t>(guess)];
    stayed[static_cast<std::size_t>(guess)] += stays ? 1 : 0;
    const int token = stays ? guess : SpeculativeSampling::after_refusal(p, q).draw(random.uniform());
    ++came[static_cast<std::size_t>(token)];
  }
  CHECK(stayed[0] == guessed[0]);
  CHECK(std::abs(stayed[1] / double(guessed[1]) - 0.6) < 0.008);
  CHECK(stayed[2] == 0);
  double statistic = 0.0;
  for (const int token : {0, 1, 3}) {
    const double expected = p(token) * trials;
    const double off = came[static_cast<std::size_t>(token)] - expected;
    statistic += off * off / expected;
  }
  CHECK(came[2] == 0);
  CHECK(test::chi_square_p(statistic, 2) > 0.001);
}

TEST_CASE("random numbers: [0, 1), the same for the same seed on every platform") {
  Random random{12345};
  double lowest = 1.0;
  double highest = 0.0;
  double sum = 0.0;
  for (int i = 0; i < 100'000; ++i) {
    const double x = random.uniform();
    lowest = std::min(lowest, x);
    highest = std::max(highest, x);
    sum += x;
  }
  CHECK(lowest >= 0.0);
  CHECK(lowest < 1e-3);
  CHECK(highest < 1.0);
  CHECK(highest > 0.999);
  CHECK(std::abs(sum / 100'000 - 0.5) < 0.005);
  // The standard states the 10,000th number of the engine's default seed.
  Random standard{5489};
  double last = 0.0;
  for (int i = 0; i < 10'000; ++i) last = standard.uniform();
  CHECK(last == static_cast<double>(9981545732273789042ULL >> 11) * 0x1p-53);
}
