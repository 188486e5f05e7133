// SPDX-License-Identifier: Apache-2.0
//
// Caches of random shapes over the CPU engine, compared with the models of their policies and with
// attention in double.
#include <doctest/doctest.h>

#include <kvpolicy/cpu.hpp>

#include "cache/random_shape.hpp"

namespace {

struct CpuBackend : test::HostBackend<kvpolicy::bfloat16> {
  using Cache = kvpolicy::cpu::KvCache<kvpolicy::bfloat16>;
  // Low-bit rows are multiplied with 16-bit factors. Rows in bfloat16 are multiplied with queries and
  // weights in bfloat16 only if those of the call are.
  static constexpr double out_error = 3e-4;
  static constexpr double lse_error = 3e-4;
};

}  // namespace

TEST_CASE("random operations on random shapes over the CPU engine") {
  test::random_shapes<kvpolicy::bfloat16, float, CpuBackend>(2, 10, 40);
}
