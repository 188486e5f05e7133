// SPDX-License-Identifier: Apache-2.0
//
// Sorts pairs on the device: CUB's radix sort, and on the emulation the test suite's own with the same meaning.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <kvpolicy/cuda/runtime.hpp>

#if defined(__CUDACC__)
#include <cub/device/device_radix_sort.cuh>
#else
#include <simt/device_sort.hpp>
#endif

namespace kvpolicy::reference {

/// Bytes of scratch memory for `count` pairs. @throws DeviceError
[[nodiscard]] inline std::size_t sort_bytes(int count) {
  std::size_t bytes = 0;
  const float* keys = nullptr;
  const int* values = nullptr;
  gpu::check(cub::DeviceRadixSort::SortPairsDescending(nullptr, bytes, keys, static_cast<float*>(nullptr),
                                                       values, static_cast<int*>(nullptr), count),
             "cub::DeviceRadixSort");
  return bytes;
}
/// Largest keys first, equal ones in the order in which they came; both zeros are equal. NaN comes before infinity if
/// its sign is clear, and after -infinity if it is set. Can be captured. @throws DeviceError
inline void sort_pairs(void* scratch, std::size_t scratch_bytes, const float* keys, float* sorted_keys,
                       const int* values, int* sorted_values, int count, cudaStream_t stream) {
  gpu::check(cub::DeviceRadixSort::SortPairsDescending(scratch, scratch_bytes, keys, sorted_keys, values,
                                                       sorted_values, count, 0, 8 * sizeof(float), stream),
             "cub::DeviceRadixSort");
}

}  // namespace kvpolicy::reference
