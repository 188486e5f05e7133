// SPDX-License-Identifier: Apache-2.0
//
// The kernel that bounds what units of rows in halves weigh; ./scripts/long-runs --device-bounds goes on with this.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/bound.cuh>

#include "cuda/support/bound_trial.hpp"
#include "support/repeats.hpp"

TEST_CASE("no unit's rows weigh more than a device says they can") {
  std::size_t rows = 0;
  for (std::uint64_t seed = 1; seed <= test::repeats(90U); ++seed) {
    CAPTURE(seed);
    rows += test::check_random_device_bounds(seed);
  }
  CHECK(rows > 1000 * test::repeats(90U));
}
