// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/sampler.hpp>

namespace kvpolicy::reference::sampler_test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// The share of each token in `draws` draws.
std::vector<double> shares(const SamplerConfig& config, const std::vector<float>& logits,
                           std::size_t draws = 20000) {
  Sampler sampler(config);
  std::vector<double> counts(logits.size());
  for (std::size_t i = 0; i < draws; ++i) {
    counts[static_cast<std::size_t>(sampler.next(logits))] += 1.0 / static_cast<double>(draws);
  }
  return counts;
}

TEST_CASE("temperature 0 takes the likeliest token, the lower of equal ones") {
  Sampler sampler;
  CHECK(sampler.next(std::vector<float>{1, 3, 2}) == 1);
  CHECK(sampler.next(std::vector<float>{1, 3, 3}) == 1);
  CHECK(sampler.next(std::vector<float>{-infinity, -5}) == 1);
  CHECK(sampler.next(std::vector<float>{0}) == 0);
}

TEST_CASE("draws follow the softmax at a temperature") {
  const std::vector<float> logits{0, 1, 2, -infinity};
  for (const float temperature : {0.5F, 1.0F, 3.0F}) {
    const auto found = shares({.temperature = temperature, .seed = 7}, logits);
    double sum = 0;
    for (int i = 0; i < 3; ++i) sum += std::exp(i / static_cast<double>(temperature));
    for (int i = 0; i < 3; ++i) {
      const double expected = std::exp(i / static_cast<double>(temperature)) / sum;
      // Four standard deviations for 20,000 draws.
      CHECK(std::fabs(found[static_cast<std::size_t>(i)] - expected) <=
            4 * std::sqrt(expected * (1 - expected) / 20000));
    }
    CHECK(found[3] == 0.0);
  }
}

TEST_CASE("top-k and top-p drop unlikely tokens") {
  const std::vector<float> logits{std::log(0.1F), std::log(0.5F), std::log(0.15F), std::log(0.25F)};
  const auto two = shares({.temperature = 1, .top_k = 2, .seed = 1}, logits);
  CHECK(two[0] == 0.0);
  CHECK(two[2] == 0.0);
  CHECK(two[1] == doctest::Approx(2.0 / 3).epsilon(0.03));
  CHECK(shares({.temperature = 1, .top_k = 1, .seed = 1}, logits)[1] == doctest::Approx(1.0));
  CHECK(shares({.temperature = 1, .top_p = 0.5F, .seed = 1}, logits)[1] == doctest::Approx(1.0));
  const auto nucleus = shares({.temperature = 1, .top_p = 0.8F, .seed = 1}, logits);
  CHECK(nucleus[0] == 0.0);  // 0.5 + 0.25 < 0.8 <= 0.5 + 0.25 + 0.15
  CHECK(nucleus[2] > 0.1);
  CHECK(shares({.temperature = 1, .top_p = 1e-9F, .seed = 1}, logits)[1] == doctest::Approx(1.0));
}

TEST_CASE("a seed fixes the tokens on every platform") {
  const std::vector<float> logits(100, 0.0F);
  Sampler sampler({.temperature = 1, .seed = 42});
  Sampler again({.temperature = 1, .seed = 42});
  Sampler other({.temperature = 1, .seed = 43});
  std::vector<int> tokens, same, different;
  for (int i = 0; i < 8; ++i) {
    tokens.push_back(sampler.next(logits));
    same.push_back(again.next(logits));
    different.push_back(other.next(logits));
  }
  CHECK(tokens == same);
  CHECK(tokens != different);
  // The first outputs of mt19937_64 with seed 42, as shares of 2^64, times 100.
  CHECK(tokens == std::vector<int>{75, 63, 75, 13, 90, 9, 57, 37});
}

TEST_CASE("extreme logits neither overflow nor choose a banned token") {
  CHECK(shares({.temperature = 1e-3F, .seed = 1}, {3e38F, -3e38F, 0}, 100)[0] == doctest::Approx(1.0));
  CHECK(shares({.temperature = 1e30F, .seed = 1}, {-infinity, 0, -infinity}, 100)[1] == doctest::Approx(1.0));
}

TEST_CASE("invalid logits and settings are refused") {
  Sampler sampler({.temperature = 1});
  CHECK_THROWS_AS((void)sampler.next(std::vector<float>{}), ShapeError);
  CHECK_THROWS_AS((void)sampler.next(std::vector<float>{0, NAN}), ShapeError);
  CHECK_THROWS_AS((void)sampler.next(std::vector<float>{infinity, 0}), ShapeError);
  CHECK_THROWS_AS((void)sampler.next(std::vector<float>{-infinity}), ShapeError);
  CHECK_THROWS_AS((void)likeliest(std::vector<float>{NAN}), ShapeError);
  CHECK_THROWS_AS(Sampler({.temperature = -1}), ConfigError);
  CHECK_THROWS_AS(Sampler({.temperature = NAN}), ConfigError);
  CHECK_THROWS_AS(Sampler({.top_p = 0}), ConfigError);
  CHECK_THROWS_AS(Sampler({.top_p = 1.1F}), ConfigError);
  CHECK_THROWS_AS(Sampler({.top_p = NAN}), ConfigError);
}

}  // namespace
}  // namespace kvpolicy::reference::sampler_test
