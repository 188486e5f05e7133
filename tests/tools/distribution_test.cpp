// SPDX-License-Identifier: Apache-2.0
#include <common/distribution.hpp>

#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include <doctest/doctest.h>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::vector<long double> slow_softmax(const std::vector<float>& logits) {
  std::vector<long double> shares;
  long double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<long double>(logit));
  for (const float logit : logits) shares.push_back(std::exp(static_cast<long double>(logit)) / sum);
  return shares;
}

std::vector<float> draw(std::mt19937& bits, std::size_t count, float scale) {
  std::normal_distribution<float> normal{0.0F, scale};
  std::vector<float> logits(count);
  for (float& logit : logits) logit = normal(bits);
  return logits;
}

}  // namespace

TEST_CASE("surprise and divergence equal those of explicit probabilities") {
  std::mt19937 bits{11};
  for (const std::size_t count : {1UL, 2UL, 7UL, 256UL}) {
    for (const float scale : {0.1F, 3.0F, 20.0F}) {
      const auto truth = draw(bits, count, scale);
      const auto guess = draw(bits, count, scale);
      const auto p = slow_softmax(truth);
      const auto q = slow_softmax(guess);
      long double apart = 0;
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(surprise(truth, i) == doctest::Approx(static_cast<double>(-std::log(p[i]))).epsilon(1e-9));
        apart += p[i] * std::log(p[i] / q[i]);
      }
      CHECK(divergence(truth, guess) == doctest::Approx(static_cast<double>(apart)).epsilon(1e-9));
      CHECK(divergence(truth, truth) == 0);
    }
  }
}

TEST_CASE("logits that are too large for exp do no harm") {
  const std::vector<float> large{1000.0F, 1001.0F, -1e30F};
  const std::vector<float> small{0.0F, 1.0F, -1e30F};
  CHECK(surprise(large, 0) == doctest::Approx(surprise(small, 0)));
  CHECK(divergence(large, small) <= 1e-9);
}

TEST_CASE("distributions of different sizes are refused") {
  const std::vector<float> two{0.0F, 1.0F};
  const std::vector<float> one{0.0F};
  CHECK_THROWS_AS(static_cast<void>(divergence(two, one)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(surprise(two, 2)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(log_sum_exp({})), ShapeError);
}
