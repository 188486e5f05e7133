// SPDX-License-Identifier: Apache-2.0
//
// Small vector functions: conversion of stored numbers to float, exp, tanh, sums across lanes.
#pragma once

#include <cstddef>
#include <utility>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cpu/highway.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using FloatVector = hn::Vec<Floats>;
inline constexpr Floats floats;
inline constexpr std::size_t lanes = hn::MaxLanes(floats);
using Ints = hn::Rebind<std::int32_t, Floats>;
using IntVector = hn::Vec<Ints>;
inline constexpr Ints ints;

/// With 32 registers, 24 accumulators fit; with 16 registers, 12 do.
inline constexpr bool many_registers =
    HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_ARCH_ARM_A64 != 0;

/// Calls f(integral_constant<0>) to f(integral_constant<N - 1>). The compiler keeps arrays of vectors in
/// registers only if every index is a constant before its first optimisation pass.
template <std::size_t N, class F>
HWY_INLINE void unroll(F&& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) KVPOLICY_CPU_INLINE_LAMBDA {
    (f(std::integral_constant<std::size_t, I>{}), ...);
  }(std::make_index_sequence<N>{});
}

/// Unrolls the loop after it, which must have a small constant number of iterations, for the same reason.
/// Each iteration of `unroll` is a function of its own, which takes several times as long to compile; use
/// that only if the index must be a template argument.
#define KVPOLICY_CPU_UNROLL _Pragma("GCC unroll 16")

/// Calls visit.operator()<N>(first) for portions of `Most` of `count`, then for the rest.
template <std::size_t Most, class Visit>
HWY_INLINE void for_each_portion(std::size_t count, Visit&& visit) {
  std::size_t at = 0;
  for (; at + Most <= count; at += Most) visit.template operator()<Most>(at);
  if constexpr (Most > 3) {
    if (count - at == 3) return visit.template operator()<3>(at);
  }
  if constexpr (Most > 2) {
    if (count - at == 2) return visit.template operator()<2>(at);
  }
  if (count - at == 1) visit.template operator()<1>(at);
  static_assert(Most >= 2 && Most <= 4);
}

[[nodiscard]] HWY_INLINE FloatVector zero_vector() { return hn::Zero(floats); }

using HalfBits = hn::Rebind<std::uint16_t, Floats>;
inline constexpr HalfBits half_bits;

/// Converts `lanes` half numbers, given by their bits, to float, exactly, infinities and NaN included.
[[nodiscard]] HWY_INLINE FloatVector half_to_float(hn::Vec<HalfBits> bits) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || \
    (HWY_TARGET == HWY_AVX2 && !defined(HWY_DISABLE_F16C))
  return hn::PromoteTo(floats, hn::BitCast(hn::Rebind<hwy::float16_t, Floats>{}, bits));
#else
  const hn::Rebind<std::uint32_t, Floats> words;
  const auto all = hn::PromoteTo(words, bits);
  const auto magnitude = hn::And(all, hn::Set(words, 0x7fffU));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(all, magnitude));
  // Read as a float's exponent, half's is too small by 112; a multiplication corrects that, for subnormal
  // numbers as well.
  const auto finite = hn::Mul(hn::BitCast(floats, hn::ShiftLeft<13>(magnitude)), hn::Set(floats, 0x1p112F));
  const auto special = hn::Gt(hn::BitCast(hn::Rebind<std::int32_t, Floats>{}, magnitude),
                              hn::Set(hn::Rebind<std::int32_t, Floats>{}, 0x7bff));
  const auto exponent = hn::IfThenElseZero(hn::RebindMask(words, special), hn::Set(words, 0x7f800000U));
  return hn::BitCast(floats, hn::Or(hn::BitCast(words, finite), hn::Or(sign, exponent)));
#endif
}

/// Loads and converts `lanes` half numbers.
[[nodiscard]] HWY_INLINE FloatVector load_half(const void* source) {
  return half_to_float(hn::LoadU(half_bits, static_cast<const std::uint16_t*>(source)));
}

/// `lanes` numbers of a dense row, from channel `channel` on.
template <Encoding E>
[[nodiscard]] HWY_INLINE FloatVector load_numbers(const std::byte* row, std::size_t channel) {
  static_assert(!is_quantized(E));
  if constexpr (E == Encoding::float32) {
    return hn::LoadU(floats, reinterpret_cast<const float*>(row) + channel);
  } else if constexpr (E == Encoding::float16) {
    return load_half(row + channel * sizeof(float16));
  } else {
    const hn::Rebind<std::uint32_t, Floats> words;
    const auto bits = hn::LoadU(half_bits, reinterpret_cast<const std::uint16_t*>(row) + channel);
    return hn::BitCast(floats, hn::ShiftLeft<16>(hn::PromoteTo(words, bits)));
  }
}

/// Whether load_pair returns a row's numbers in another order.
template <Encoding E>
inline constexpr bool deinterleaves_pairs = E == Encoding::bfloat16 && lanes > 1;

struct VectorPair {
  FloatVector first, second;
};

/// Loads two vectors of a dense row's numbers, from channel `channel` on. Of bfloat16 it returns the even
/// numbers and the odd ones: each word holds two numbers, which a shift and a mask convert to float.
/// Keeping them in order would take twice as many instructions.
template <Encoding E>
[[nodiscard]] HWY_INLINE VectorPair load_pair(const std::byte* row, std::size_t channel) {
  if constexpr (deinterleaves_pairs<E>) {
    const hn::Rebind<std::uint32_t, Floats> words;
    const auto both =
        hn::LoadU(words, reinterpret_cast<const std::uint32_t*>(row + channel * sizeof(bfloat16)));
    return {hn::BitCast(floats, hn::ShiftLeft<16>(both)),
            hn::BitCast(floats, hn::And(both, hn::Set(words, 0xffff0000U)))};
  } else {
    return {load_numbers<E>(row, channel), load_numbers<E>(row, channel + lanes)};
  }
}

/// Loads numbers in float, which are in order, in the order of load_pair<E>.
template <Encoding E>
[[nodiscard]] HWY_INLINE VectorPair deinterleave_pair(const float* numbers) {
  VectorPair pair;
  if constexpr (deinterleaves_pairs<E>) {
    hn::LoadInterleaved2(floats, numbers, pair.first, pair.second);
  } else {
    pair = {hn::LoadU(floats, numbers), hn::LoadU(floats, numbers + lanes)};
  }
  return pair;
}

/// Stores a pair of vectors in the original order.
template <Encoding E>
HWY_INLINE void interleave_pair(const VectorPair& pair, float* numbers) {
  if constexpr (deinterleaves_pairs<E>) {
    hn::StoreInterleaved2(pair.first, pair.second, floats, numbers);
  } else {
    hn::StoreU(pair.first, floats, numbers);
    hn::StoreU(pair.second, floats, numbers + lanes);
  }
}

/// exp(x) for x <= 0, with an error of at most 2 units in the last place. It is 0 below -87, where the
/// result is less than half of float's smallest normal number, which is no weight beside the largest one,
/// 1. NaN stays NaN.
[[nodiscard]] HWY_INLINE FloatVector exp_nonpositive(FloatVector x) {
  // The addition rounds to a whole number, and the lowest bits of this large sum are that power of two with
  // float's bias. For numbers whose result is 0, and for NaN, the bits may be anything.
  const auto bias = hn::Set(floats, 0x1.8p23F + 127.0F);
  const auto power = hn::MulAdd(x, hn::Set(floats, 1.44269504F), bias);
  const auto turns = hn::Sub(power, bias);
  // x - turns * ln 2, with ln 2 in two parts; then the polynomial of degree 5 with the smallest relative
  // error (9.2e-8) on [-ln 2 / 2, ln 2 / 2].
  auto r = hn::NegMulAdd(turns, hn::Set(floats, 0.693145751953125F), x);
  r = hn::NegMulAdd(turns, hn::Set(floats, 1.428606765330187e-6F), r);
  auto y = hn::MulAdd(r, hn::Set(floats, 0.00829028431F), hn::Set(floats, 0.0418981016F));
  y = hn::MulAdd(y, r, hn::Set(floats, 0.166676372F));
  y = hn::MulAdd(y, r, hn::Set(floats, 0.499991477F));
  y = hn::MulAdd(y, r, hn::Set(floats, 0.999999702F));
  y = hn::MulAdd(y, r, hn::Set(floats, 1.0F));
  const auto scale = hn::BitCast(floats, hn::ShiftLeft<23>(hn::BitCast(ints, power)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(floats, -87.0F)), hn::Mul(y, scale));
}

[[nodiscard]] HWY_INLINE FloatVector tanh(FloatVector x) {
  const auto magnitude = hn::Abs(x);
  // Near zero 1 - exp(-2x) would cancel, so a Taylor polynomial is used.
  const auto square = hn::Mul(x, x);
  auto y = hn::MulAdd(square, hn::Set(floats, 62.0F / 2835.0F), hn::Set(floats, -17.0F / 315.0F));
  y = hn::MulAdd(y, square, hn::Set(floats, 2.0F / 15.0F));
  y = hn::MulAdd(y, square, hn::Set(floats, -1.0F / 3.0F));
  const auto near_zero = hn::MulAdd(hn::Mul(y, square), magnitude, magnitude);
  const auto e = exp_nonpositive(hn::Mul(magnitude, hn::Set(floats, -2.0F)));
  const auto one = hn::Set(floats, 1.0F);
  const auto far = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const auto y_abs = hn::IfThenElse(hn::Lt(magnitude, hn::Set(floats, 0.3F)), near_zero, far);
  return hn::CopySignToAbs(y_abs, x);
}

/// Joins the lanes of each of four vectors by `join`, which takes two vectors of any length, and writes the four
/// results.
template <class Join>
HWY_INLINE void store_joined(FloatVector a, FloatVector b, FloatVector c, FloatVector d,
                             [[maybe_unused]] Join join, float* out) {
#if HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(a);
  out[1] = hn::GetLane(b);
  out[2] = hn::GetLane(c);
  out[3] = hn::GetLane(d);
#else
  // In each group of 16 bytes the order is (a, b, c, d); then the groups are joined.
  const auto ac = join(hn::InterleaveLower(floats, a, c), hn::InterleaveUpper(floats, a, c));
  const auto bd = join(hn::InterleaveLower(floats, b, d), hn::InterleaveUpper(floats, b, d));
  const auto all = join(hn::InterleaveLower(floats, ac, bd), hn::InterleaveUpper(floats, ac, bd));
  const auto fold = [&]<class Tag>(auto self, Tag, auto v) KVPOLICY_CPU_INLINE_LAMBDA {
    if constexpr (hn::MaxLanes(Tag{}) == 4) {
      return v;
    } else {
      const hn::Half<Tag> low;
      return self(self, low, join(hn::LowerHalf(low, v), hn::UpperHalf(low, v)));
    }
  };
  hn::StoreU(fold(fold, floats, all), hn::CappedTag<float, 4>{}, out);
#endif
}

/// Adds up the lanes of each of four vectors and writes the four sums.
HWY_INLINE void store_sums(FloatVector a, FloatVector b, FloatVector c, FloatVector d, float* out) {
  store_joined(a, b, c, d, [](auto x, auto y) KVPOLICY_CPU_INLINE_LAMBDA { return hn::Add(x, y); }, out);
}

/// Writes the largest lane of each of four vectors.
HWY_INLINE void store_highest(FloatVector a, FloatVector b, FloatVector c, FloatVector d, float* out) {
  store_joined(a, b, c, d, [](auto x, auto y) KVPOLICY_CPU_INLINE_LAMBDA { return hn::Max(x, y); }, out);
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
