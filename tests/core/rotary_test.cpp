// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include <kvpolicy/core/rotary.hpp>

#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/tensors.hpp"

using kvpolicy::ConfigError;
using kvpolicy::RotaryConfig;
using test::contains;
using test::largest_difference;
using test::thrown;

TEST_CASE("plain and linear frequencies") {
  const auto plain = kvpolicy::inverse_frequencies({.theta = 500000.0}, 64);
  REQUIRE(plain.size() == 32);
  for (std::size_t i = 0; i < 32; ++i) {
    CHECK(static_cast<double>(plain[i]) == doctest::Approx(std::pow(500000.0, -static_cast<double>(i) / 32)));
  }
  const auto linear = kvpolicy::inverse_frequencies(
      {.theta = 500000.0, .scaling = RotaryConfig::Scaling::linear, .factor = 4.0}, 64);
  for (std::size_t i = 0; i < 32; ++i) CHECK(linear[i] == doctest::Approx(plain[i] / 4.0F));
}

// The published rule, by wavelength, as its authors wrote it.
TEST_CASE("llama3 frequencies") {
  const RotaryConfig config{.theta = 500000.0,
                            .scaling = RotaryConfig::Scaling::llama3,
                            .factor = 8.0,
                            .low_freq_factor = 1.0,
                            .high_freq_factor = 4.0,
                            .original_max_position = 8192};
  const auto frequencies = kvpolicy::inverse_frequencies(config, 128);
  int kept = 0, stretched = 0, blended = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    const double base = std::pow(500000.0, -static_cast<double>(i) / 64);
    const double wavelength = 2 * std::numbers::pi / base;
    double expected = 0;
    if (wavelength < 8192.0 / 4) {
      expected = base, ++kept;
    } else if (wavelength > 8192.0) {
      expected = base / 8, ++stretched;
    } else {
      const double smooth = (8192.0 / wavelength - 1) / (4.0 - 1);
      expected = (1 - smooth) * base / 8 + smooth * base, ++blended;
    }
    CHECK(static_cast<double>(frequencies[i]) == doctest::Approx(expected));
  }
  CHECK(kept > 10);
  CHECK(stretched > 10);
  CHECK(blended > 2);
}

TEST_CASE("rotating by many positions, and back") {
  test::Random random{1};
  const auto frequencies = kvpolicy::inverse_frequencies({}, 64);
  for (const std::int64_t positions : {0, 1, -1, 77, -4096, 1000000}) {
    std::vector<float> row(64);
    for (float& x : row) x = test::normal(random);
    const std::vector<float> original = row;
    kvpolicy::rotate(row, frequencies, positions);
    const auto expected =
        oracle::turn({original.begin(), original.end()}, static_cast<double>(positions), 10000.0);
    // At a million positions the rounding of the frequencies, which are floats, causes the remaining
    // error.
    CHECK(largest_difference(row, expected) <= (std::abs(positions) > 10000 ? 0.05 : 1e-3));
    kvpolicy::rotate(row, frequencies, -positions);
    CHECK(largest_difference(row, original) <= 2e-6);
  }
}

TEST_CASE("rotary: settings that do not work are refused by name") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto error = [](RotaryConfig config) { return thrown<ConfigError>([&] { config.validate(); }); };
  CHECK(error({}).empty());
  CHECK(contains(error({.theta = -2.5}), "theta is -2.5"));
  CHECK(contains(error({.theta = nan}), "theta is"));
  CHECK(contains(error({.factor = 0.0}), "factor is 0"));
  CHECK(contains(error({.factor = std::numeric_limits<double>::infinity()}), "factor is inf"));
  constexpr auto llama3 = RotaryConfig::Scaling::llama3;
  CHECK(contains(error({.scaling = llama3, .low_freq_factor = 4, .high_freq_factor = 4}), "got 4 and 4"));
  CHECK(contains(error({.scaling = llama3, .high_freq_factor = nan}), "high_freq_factor"));
  CHECK(contains(error({.scaling = llama3, .original_max_position = 0}), "original_max_position is 0"));
  CHECK(error({.low_freq_factor = nan}).empty());  // not read without llama3
  CHECK(contains(thrown<ConfigError>([] { static_cast<void>(kvpolicy::inverse_frequencies({}, 7)); }),
                 "head_dim is 7"));
  CHECK(contains(thrown<ConfigError>([] { static_cast<void>(kvpolicy::inverse_frequencies({}, 0)); }),
                 "head_dim is 0"));
}
