// SPDX-License-Identifier: Apache-2.0
//
// Part of the emulation: the one algorithm of CUB over a whole device that the library's tests need.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "runtime_streams.hpp"

namespace cub {

struct DeviceRadixSort {
  /// In the stream's order, as CUB does it: by a number's bits, so that every NaN has a place, but for the sign of 0.
  static cudaError_t SortPairsDescending(void* scratch, std::size_t& scratch_bytes, const float* keys,
                                         float* sorted_keys, const int* values, int* sorted_values, int count,
                                         int = 0, int = 32, cudaStream_t stream = nullptr) {
    if (scratch == nullptr) {
      scratch_bytes = 256;
      return cudaSuccess;
    }
    return kvpolicy::gpu::simt::call([=](auto& d) {
      return d.submit(stream, [=] {
        std::vector<int> order(static_cast<std::size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, std::ranges::greater{}, [&](int i) { return rank(keys[i]); });
        for (int i = 0; i < count; ++i) {
          sorted_keys[i] = keys[order[static_cast<std::size_t>(i)]];
          sorted_values[i] = values[order[static_cast<std::size_t>(i)]];
        }
      });
    });
  }

 private:
  static std::uint32_t rank(float key) {
    const auto bits = std::bit_cast<std::uint32_t>(key == 0.0F ? 0.0F : key);
    return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  }
};

}  // namespace cub
