// SPDX-License-Identifier: Apache-2.0
//
// Small writes from the host, in stream order. Addresses and words are kernel parameters, so the
// writes need no staging buffer and no waiting, and are allowed while a graph is captured.
#pragma once

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

struct ScatterParams {
  static constexpr int most = 240;  ///< because kernel parameters are limited to 4 KB
  int count = 0;
  unsigned long long* address[most];
  unsigned long long word[most];
};

inline constexpr int scatter_threads = 256;

template <int Threads = scatter_threads>
KVPOLICY_KERNEL(Threads, 1)
scatter_kernel(const KVPOLICY_GRID_CONSTANT ScatterParams params) {
  const int i = thread_index();
  if (i < params.count) *params.address[i] = params.word[i];
}

}  // namespace kvpolicy::gpu
