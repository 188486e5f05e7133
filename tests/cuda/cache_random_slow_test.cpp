// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cuda/support/random_device.hpp"

TEST_CASE("random operations with rows in slow memory: every policy does what its model says") {
  test::random_device_sequences<kvpolicy::float16, test::SlowDeviceBackend<kvpolicy::float16>>(
      test::more_seeds(2), 40);
}
