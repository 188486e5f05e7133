// SPDX-License-Identifier: Apache-2.0
//
// Random weights made on the device, for benches of models without a file.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda::llama {

struct RandomParams {
  std::uint16_t* numbers = nullptr;  ///< gets bfloat16 in (-amplitude, amplitude), or
  std::uint8_t* codes = nullptr;     ///< gets 8-bit codes -127 to 127, two's complement
  long long count = 0;
  float amplitude = 0.0F;
  std::uint64_t seed = 0;
};

inline constexpr int random_threads = 256;
inline constexpr int random_blocks = 1024;

/// The n-th number of a stream: splitmix64 (Steele et al., OOPSLA 2014) by its counter.
KVPOLICY_DEVICE std::uint64_t random_bits(std::uint64_t seed, long long n) {
  std::uint64_t z = seed + 0x9e3779b97f4a7c15ULL * static_cast<std::uint64_t>(n + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

template <int Threads = random_threads>
KVPOLICY_KERNEL(Threads, 1)
random_kernel(const KVPOLICY_GRID_CONSTANT RandomParams p) {
  const long long stride = static_cast<long long>(grid_x()) * Threads;
  for (long long i = static_cast<long long>(block_x()) * Threads + thread_index(); i < p.count; i += stride) {
    const std::uint64_t bits = random_bits(p.seed, i);
    if (p.numbers != nullptr) {
      const float unit = static_cast<float>(static_cast<std::uint32_t>(bits >> 40)) * 0x1p-23F - 1.0F;
      p.numbers[i] = from_float<bfloat16>(unit * p.amplitude);
    } else {
      const auto code = static_cast<int>((bits >> 40) % 255) - 127;
      p.codes[i] = static_cast<std::uint8_t>(code);
    }
  }
}

}  // namespace kvpolicy::cuda::llama
