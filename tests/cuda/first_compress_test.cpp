// SPDX-License-Identifier: Apache-2.0
//
// Heads on the device that compress by themselves from the first compression on that their cache is
// told to make (`after_first_compress`), alone and in forks.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "cuda/support/device_backend.hpp"

TEST_CASE("a device head compresses by itself from the first compression on") {
  using E = kvpolicy::float16;
  using test::Kind;
  // Each text is told to compress after about 40 operations.
  for (const std::uint64_t seed : {1U, 2U}) {
    const std::vector<test::HeadSpec> heads{
        {.kind = Kind::budget,
         .budget = 11,
         .window = 4,
         .compress_every = 9,
         .after_first = true,
         .returns_rows = true},
        {.kind = Kind::budget,
         .budget = 70,
         .window = 4,
         .compress_every = 5,
         .compress_from = 90,
         .after_first = true,
         .returns_rows = true},
        {.kind = Kind::budget, .budget = 30, .window = 6, .returns_rows = true}};
    test::random_operations<E, E, test::DeviceBackend<E>>(seed, {1, 3, 3, 64}, heads, {}, {}, 200);
  }
}
