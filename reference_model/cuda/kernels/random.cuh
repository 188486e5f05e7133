// SPDX-License-Identifier: Apache-2.0
//
// Random numbers by their index, for weights of models without a file, rows of benches and tokens that are drawn.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

/// The n-th number of a stream: splitmix64 (Steele et al., OOPSLA 2014) by its counter.
KVPOLICY_DEVICE std::uint64_t random_bits(std::uint64_t seed, long long n) {
  std::uint64_t z = seed + 0x9e3779b97f4a7c15ULL * static_cast<std::uint64_t>(n + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

/// The bits of bfloat16 numbers in (-amplitude, amplitude).
struct RandomNumbers {
  std::uint64_t seed;
  float amplitude;

  KVPOLICY_DEVICE std::uint16_t operator()(long long i) const {
    const auto bits = static_cast<std::uint32_t>(random_bits(seed, i) >> 40);
    return from_float<bfloat16>((static_cast<float>(bits) * 0x1p-23F - 1.0F) * amplitude);
  }
};

/// 8-bit codes from -127 to 127.
struct RandomCodes {
  std::uint64_t seed;

  KVPOLICY_DEVICE std::int8_t operator()(long long i) const {
    return static_cast<std::int8_t>(static_cast<int>((random_bits(seed, i) >> 40) % 255) - 127);
  }
};

/// Whether the bits are those of a bfloat16 NaN.
struct IsNan {
  KVPOLICY_DEVICE bool operator()(std::uint16_t bits) const { return (bits & 0x7fffU) > 0x7f80U; }
};

}  // namespace kvpolicy::gpu::llama
