// SPDX-License-Identifier: Apache-2.0
//
// Runs a kernel written as a lambda, for the emulation's own tests.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>

#include "launch.hpp"

namespace kvpolicy::gpu::simt {

struct Shape {
  unsigned grid_x = 1;
  unsigned grid_y = 1;
  unsigned threads = 32;
  std::size_t shared_bytes = 0;
};

template <class Params, class Kernel>
void run_kernel(const Shape& shape, const Params& params, Kernel kernel) {
  void (*function)(const Params) = kernel;
  const cudaError_t error =
      launch(function, shape.grid_x, shape.grid_y, shape.threads, shape.shared_bytes, nullptr, params);
  REQUIRE(error == cudaSuccess);
}

/// Calls body() under the orders 1, 2, ... `seeds`; returns how often it returned true.
template <class Body>
int count_seeds(int seeds, Body body) {
  int count = 0;
  for (int s = 1; s <= seeds; ++s) {
    seed(static_cast<std::uint64_t>(s));
    if (body()) ++count;
  }
  return count;
}

}  // namespace kvpolicy::gpu::simt
