// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cache/random_operations.hpp"

TEST_CASE("random operations in float: every policy does what its model says") {
  test::random_sequences<float, float>(1, 60);
}

TEST_CASE("a compression that keeps every row lets rows leave the residual only as others come") {
  const test::HeadSpec spec{.kind = test::Kind::budget, .budget = 40, .window = 6, .bits = 8, .residual = 7};
  test::Random random{1};
  test::Sequence<float> sequence{{1, 1, 1, 64}, {spec}, {.max_rollback = 3}, {}};
  sequence.run<float>(random, {.tokens = 20});
  for (int i = 0; i < 2; ++i) {
    sequence.compress();
    sequence.commit();
  }
  sequence.run<float>(random, {.tokens = 1});
  sequence.commit();
  sequence.run<float>(random, {.tokens = 40});
  sequence.compress();
}
