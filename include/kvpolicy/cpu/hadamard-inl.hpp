// SPDX-License-Identifier: Apache-2.0
//
// The rotation of core/hadamard.hpp in vectors, with the same bits: of many rows, where numbers that neighbour each
// other are added and subtracted in registers.
#pragma once

#include <cstddef>

#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

#if HWY_TARGET != HWY_SCALAR
/// Rotates a block of N vectors. Every step adds and subtracts the two numbers of each pair of neighbours, and puts
/// sums before differences: what are neighbours in the next step were twice as far apart at first (Pease 1968). After
/// the last step all numbers are in their places again.
template <std::size_t N>
HWY_INLINE void rotate_block(float* block) {
  constexpr std::size_t channels = N * lanes;
  FloatVector numbers[N];
  KVPOLICY_CPU_UNROLL
  for (std::size_t i = 0; i < N; ++i) numbers[i] = hn::LoadU(floats, block + i * lanes);
  for (std::size_t step = 1; step < channels; step *= 2) {
    FloatVector next[N];
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < N / 2; ++i) {
      const auto first = hn::ConcatEven(floats, numbers[2 * i + 1], numbers[2 * i]);
      const auto second = hn::ConcatOdd(floats, numbers[2 * i + 1], numbers[2 * i]);
      next[i] = hn::Add(first, second);
      next[i + N / 2] = hn::Sub(first, second);
    }
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < N; ++i) numbers[i] = next[i];
  }
  const auto unit = hn::Set(floats, hadamard_unit(channels));
  KVPOLICY_CPU_UNROLL
  for (std::size_t i = 0; i < N; ++i) {
    hn::StoreU(hn::Mul(numbers[i], unit), floats, block + i * lanes);
  }
}
#endif

/// Rotates rows of `channels` numbers that begin `stride` floats after one another.
inline void rotate_rows(float* rows, std::size_t count, std::size_t stride, std::size_t channels) {
  if (channels == 0) return;
#if HWY_TARGET != HWY_SCALAR
  const auto each_block = [&]<std::size_t N>() KVPOLICY_CPU_LAMBDA {
    for (std::size_t row = 0; row < count; ++row) {
      for (std::size_t at = 0; at < channels; at += N * lanes) rotate_block<N>(rows + row * stride + at);
    }
  };
  switch (hadamard_block(channels) / lanes) {
    case 2: return each_block.template operator()<2>();
    case 4: return each_block.template operator()<4>();
    case 8: return each_block.template operator()<8>();
    case 16: return each_block.template operator()<16>();
    default: break;
  }
#endif
  for (std::size_t row = 0; row < count; ++row) rotate_hadamard({rows + row * stride, channels});
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
