// SPDX-License-Identifier: Apache-2.0
//
// Launches a kernel and waits for it: on the emulation, or, compiled by nvcc, on the device. What a
// kernel follows a pointer to must come from `new` (containers, make_unique): that is memory which
// the device reaches as well (cuda/gpu/main.cpp); the stack is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvpolicy/cuda/runtime.hpp>

namespace test {

/// @throws kvpolicy::DeviceError if the launch is refused or the kernel fails.
template <class Params>
void launch(void (*kernel)(const Params), int grid_x, int grid_y, int threads, std::size_t shared_bytes,
            const std::type_identity_t<Params>& params) {
  const kvpolicy::gpu::Kernel<Params> loaded{kernel, "a test's kernel", threads, shared_bytes};
  static_cast<void>(kvpolicy::gpu::load_kernel(loaded));
  kvpolicy::gpu::launch(loaded, {.x = grid_x, .y = grid_y}, nullptr, params);
  kvpolicy::gpu::check(cudaDeviceSynchronize(), "a test's kernel");
}

/// Another order of threads, where the order is ours to choose.
inline void set_order([[maybe_unused]] std::uint64_t seed) {
#if !defined(__CUDACC__)
  kvpolicy::gpu::simt::seed(seed);
#endif
}

}  // namespace test
