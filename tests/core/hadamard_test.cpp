// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation against its matrix.
#include <kvpolicy/core/hadamard.hpp>

#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include "support/policy_model.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

TEST_CASE("a row is rotated as by its matrix, and the rotation is its own inverse") {
  test::Random random{1};
  for (const std::size_t channels : {1U, 2U, 8U, 24U, 64U, 80U, 96U, 128U, 256U, 576U}) {
    CAPTURE(channels);
    std::vector<float> row(channels);
    for (float& number : row) number = test::normal(random);
    row[channels / 2] = 100.0F;  // an outlier
    const std::vector<double> expected = oracle::hadamard({row.begin(), row.end()});
    std::vector<float> rotated = row;
    rotate_hadamard(rotated);
    double off = 0.0;
    for (std::size_t i = 0; i < channels; ++i) {
      const double difference = std::abs(static_cast<double>(rotated[i]) - expected[i]);
      off = difference <= off ? off : difference;
    }
    CHECK(off <= 1e-4);
    rotate_hadamard(rotated);
    double back = 0.0;
    for (std::size_t i = 0; i < channels; ++i) {
      const auto difference = static_cast<double>(std::abs(rotated[i] - row[i]));
      back = difference <= back ? back : difference;
    }
    CHECK(back <= 1e-4);
  }
  std::vector<float> nothing;
  rotate_hadamard(nothing);
}

TEST_CASE("the factor of a block is the one that float arithmetic gives") {
  for (std::size_t block = 1; block <= 512; block *= 2) {
    CAPTURE(block);
    volatile float root = std::sqrt(static_cast<float>(block));
    CHECK(hadamard_unit(block) == 1.0F / root);
  }
}

TEST_CASE("an outlier is spread over its block") {
  std::vector<float> row(64, 0.0F);
  row[17] = 8.0F;
  rotate_hadamard(row);
  for (const float number : row) CHECK(std::abs(number) == 1.0F);
  static_assert(hadamard_block(64) == 64 && hadamard_block(80) == 16 && hadamard_block(96) == 32);
}
