// SPDX-License-Identifier: Apache-2.0
//
// Numbers as pairs of bfloat16, which is how the processor's units take the factors of a product: two neighbours along
// the dimension that is summed share a word. What rounding leaves is kept for a second term.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

using Words = hn::RebindToUnsigned<Floats>;
using WordVector = hn::Vec<Words>;
inline constexpr Words words;

/// Rounds to the nearest bfloat16, ties away from zero, and returns it as a float's bits. Ties to even would take
/// twice as many instructions. NaN may become anything: a caller sees it in the rest, which is NaN, or, if it is a
/// softmax weight, in the sum of the weights.
[[nodiscard]] HWY_INLINE WordVector round_to_bfloat16(FloatVector x) {
  return hn::And(hn::Add(hn::BitCast(words, x), hn::Set(words, 0x8000U)), hn::Set(words, 0xffff0000U));
}

/// Neighbours along a product's summed dimension as pairs of bfloat16, and the rest that rounding left, for
/// a second term.
struct PairVector {
  WordVector pairs;
  FloatVector rest_low, rest_high;
};
[[nodiscard]] HWY_INLINE PairVector pair_up(FloatVector low, FloatVector high) {
  const auto low_bits = round_to_bfloat16(low);
  const auto high_bits = round_to_bfloat16(high);
  return {hn::Or(hn::ShiftRight<16>(low_bits), high_bits), hn::Sub(low, hn::BitCast(floats, low_bits)),
          hn::Sub(high, hn::BitCast(floats, high_bits))};
}

/// The even and the odd ones of the next 2 * lanes numbers, of which there are `left`; zeros come after them.
HWY_INLINE void load_pairs(const float* numbers, std::size_t left, FloatVector& even, FloatVector& odd) {
  HWY_ALIGN float padded[2 * lanes];
  if (left < 2 * lanes) {
    std::fill(std::copy_n(numbers, left, padded), padded + 2 * lanes, 0.0F);
    numbers = padded;
  }
  hn::LoadInterleaved2(floats, numbers, even, odd);
}

/// Stores four vectors as columns of rows that are `stride` words apart.
HWY_INLINE void store_as_columns(const WordVector* columns, std::uint32_t* to, std::size_t stride) {
  HWY_ALIGN std::uint32_t numbers[4][lanes];
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t i = 0; i < 4; ++i) hn::Store(columns[i], words, numbers[i]);
  for (std::size_t m = 0; m < lanes; ++m) {
    for (std::size_t i = 0; i < 4; ++i) to[m * stride + i] = numbers[i][m];
  }
#else
  // In each group of 16 bytes, lane i becomes part of vector i; then the groups are scattered.
  const hn::Repartition<std::uint64_t, Words> doubles;
  const auto as_doubles = [&](WordVector v) KVPOLICY_CPU_LAMBDA { return hn::BitCast(doubles, v); };
  const auto a = as_doubles(hn::InterleaveLower(words, columns[0], columns[1]));
  const auto b = as_doubles(hn::InterleaveLower(words, columns[2], columns[3]));
  const auto c = as_doubles(hn::InterleaveUpper(words, columns[0], columns[1]));
  const auto d = as_doubles(hn::InterleaveUpper(words, columns[2], columns[3]));
  hn::Store(hn::BitCast(words, hn::InterleaveLower(doubles, a, b)), words, numbers[0]);
  hn::Store(hn::BitCast(words, hn::InterleaveUpper(doubles, a, b)), words, numbers[1]);
  hn::Store(hn::BitCast(words, hn::InterleaveLower(doubles, c, d)), words, numbers[2]);
  hn::Store(hn::BitCast(words, hn::InterleaveUpper(doubles, c, d)), words, numbers[3]);
  for (std::size_t block = 0; block < lanes; block += 4) {
    for (std::size_t i = 0; i < 4; ++i) {
      std::memcpy(to + (block + i) * stride, numbers[i] + block, 4 * sizeof(std::uint32_t));
    }
  }
#endif
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
