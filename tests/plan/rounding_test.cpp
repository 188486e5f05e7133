// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/rounding.hpp>

using namespace kvpolicy;

namespace {
using Rows = std::vector<std::size_t>;
}

TEST_CASE("the largest remainders are rounded up, and a tie is spread evenly") {
  const auto rounded = [](std::vector<double> parts, std::size_t total) {
    return round_to_sum(parts, total);
  };
  CHECK(rounded({1.25, 2.75, 3.0}, 7) == Rows{1, 3, 3});
  // Not {1, 1, 0, 0}, because g++ 12 compiles that literal wrongly for AVX-512.
  CHECK(rounded({1.5, 2.5, 3.5, 4.5}, 12) == Rows{2, 2, 4, 4});
  CHECK(rounded({1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5}, 10) == Rows{1, 2, 1, 1, 1, 2, 1, 1});
  CHECK(rounded({4.0, 5.0}, 9) == Rows{4, 5});
  CHECK(rounded({}, 0) == Rows{});
  // Parts that do not sum to the total give the total nevertheless.
  CHECK(rounded({1.5, 1.25}, 6) == Rows{3, 3});
  CHECK(rounded({3.5, 0.25, 2.0}, 4) == Rows{3, 0, 1});
  CHECK(rounded({-1e-12, 3.0}, 3) == Rows{0, 3});
}

TEST_CASE("any parts sum to their total and stay within one of it") {
  std::mt19937 random{5};
  for (int round = 0; round < 500; ++round) {
    const std::size_t total = random() % 1000;
    std::vector<double> parts(1 + random() % 30);
    for (double& part : parts) part = static_cast<double>(random() % 1000);
    parts[0] += 1;
    const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
    for (double& part : parts) part *= static_cast<double>(total) / sum;
    const Rows whole = round_to_sum(parts, total);
    CHECK(std::accumulate(whole.begin(), whole.end(), std::size_t{0}) == total);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      CHECK(std::abs(static_cast<double>(whole[i]) - parts[i]) <= 1.0);
    }
  }
}
