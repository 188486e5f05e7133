// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cache/random_operations.hpp"

TEST_CASE("random operations in bfloat16: every policy does what its model says") {
  test::random_sequences<kvpolicy::bfloat16, float>(2, 40);
}
