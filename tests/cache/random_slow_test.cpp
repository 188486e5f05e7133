// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cache/random_operations.hpp"
#include "cache/slow_memory.hpp"

TEST_CASE("random operations with slow memory: every policy does what its model says") {
  test::random_sequences<float, float, test::SlowBackend<float>>(3, 15);
}
