// SPDX-License-Identifier: Apache-2.0
//
// Checks that the component's headers and the CUDA runtime are found and linked. Needs no device.
#include <cstdio>

#include <kvpolicy/cuda/memory.hpp>

int main() {
  int version = 0;
  kvpolicy::gpu::check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  std::printf("CUDA %d: %s\n", version, version == CUDART_VERSION ? "right" : "wrong");
  return version == CUDART_VERSION ? 0 : 1;
}
