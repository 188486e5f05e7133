// SPDX-License-Identifier: Apache-2.0
//
// Reads with a bound on the CPU engine, checked against attention in double as tests/cache does on the plain one.
#include <cstddef>
#include <cstdint>

#include <doctest/doctest.h>

#include <kvpolicy/cpu/engine.hpp>

#include "cache/bounded_text.hpp"

TEST_CASE("the CPU engine's bounds hold for random texts, and for those made to break them") {
  std::size_t rows = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    rows += test::check_random_bounds<kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor>>(seed);
  }
  CHECK(rows > 100'000);
}
