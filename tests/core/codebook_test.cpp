// SPDX-License-Identifier: Apache-2.0
//
// The numbers that codes stand for, against what is published.
#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/codebook.hpp>

using namespace kvpolicy;

// Max (1960), tables I: levels in deviations, and the mean square errors.
TEST_CASE("normal numbers are those of Max's tables, in a unit of a 127th of the largest") {
  const auto check = [](std::size_t bits, const std::vector<double>& upper) {
    const NormalNumbers levels = normal_numbers(bits);
    CAPTURE(bits);
    CHECK(levels.outermost == doctest::Approx(upper.back()).epsilon(1e-3));
    for (std::size_t i = 0; i < upper.size(); ++i) {
      const double unit = upper.back() / 127;
      CHECK(std::abs(levels.table[upper.size() + i] * unit - upper[i]) <= 0.5 * unit + 1e-3);
      CHECK(levels.table[upper.size() + i] == -levels.table[upper.size() - 1 - i]);
    }
    for (std::size_t code = std::size_t{1} << bits; code < 16; ++code) CHECK(levels.table[code] == 0);
  };
  check(2, {0.4528, 1.510});
  check(3, {0.2451, 0.7560, 1.344, 2.152});
  check(4, {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733});
}
