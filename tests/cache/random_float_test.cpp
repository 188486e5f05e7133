// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cache/random_operations.hpp"

TEST_CASE("random operations in float: every policy does what its model says") {
  test::random_sequences<kvpolicy::AnyPlan<float>, float>(1, 60);
}
