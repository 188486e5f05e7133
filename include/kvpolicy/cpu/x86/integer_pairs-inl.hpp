// SPDX-License-Identifier: Apache-2.0
//
// Products of 16-bit numbers, added in pairs to 32-bit sums. x86 computes them in one instruction
// (AVX512-VNNI) or two (all others); with numbers of at most 16 bits they do at least twice the work of a
// float product. The plain Highway version is the reference, and other processors use it, although products
// in float are faster there.
//
// vpdpbusd, which multiplies bytes, would need a 16-bit factor in two halves: as many instructions, and
// twice the sums. Sums never saturate, because callers bound them.
#pragma once

#include <cstdint>

#include <kvpolicy/cpu/highway.hpp>

#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#define KVPOLICY_CPU_PAIR_PRODUCTS 1
#include <immintrin.h>
#else
#define KVPOLICY_CPU_PAIR_PRODUCTS 0
#endif

// AVX512-VNNI is enabled by the compiler's flags, or by the target that kvpolicy::compiled names.
#if defined(KVPOLICY_CPU_RUNTIME_VNNI) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define KVPOLICY_CPU_HAS_VNNI 1
#else
#define KVPOLICY_CPU_HAS_VNNI 0
#endif

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET
namespace hn = hwy::HWY_NAMESPACE;

/// Whether add_pair_products is faster than float products here.
inline constexpr bool has_pair_products = KVPOLICY_CPU_PAIR_PRODUCTS != 0;

/// sum + a.low * b.low + a.high * b.high in each lane, whose halves are signed 16-bit numbers. `D` is a tag
/// of int32. Undefined if a sum exceeds 32 bits.
template <class D>
[[nodiscard]] HWY_INLINE hn::Vec<D> add_pair_products_portable(D, hn::Vec<D> sum, hn::Vec<D> a,
                                                               hn::Vec<D> b) {
  const auto low = [](hn::Vec<D> pair)
                       KVPOLICY_CPU_LAMBDA { return hn::ShiftRight<16>(hn::ShiftLeft<16>(pair)); };
  const auto lows = hn::Mul(low(a), low(b));
  const auto highs = hn::Mul(hn::ShiftRight<16>(a), hn::ShiftRight<16>(b));
  return hn::Add(sum, hn::Add(lows, highs));
}

#if KVPOLICY_CPU_PAIR_PRODUCTS
/// `sum`, of which the compiler cannot tell how it came about. GCC otherwise adds up the products of a whole loop
/// body last, and writes all of them to memory until then.
template <class V>
[[nodiscard]] HWY_INLINE V added_at_once(V sum) {
#if defined(__GNUC__)
  __asm__("" : "+x"(sum.raw));
#endif
  return sum;
}
#endif

template <class D>
[[nodiscard]] HWY_INLINE hn::Vec<D> add_pair_products(D d, hn::Vec<D> sum, hn::Vec<D> a, hn::Vec<D> b) {
#if KVPOLICY_CPU_PAIR_PRODUCTS
  constexpr std::size_t width = hn::MaxLanes(D{});
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  if constexpr (width == 16) {
#if KVPOLICY_CPU_HAS_VNNI
    return hn::Vec<D>{_mm512_dpwssd_epi32(sum.raw, a.raw, b.raw)};
#else
    return hn::Add(sum, hn::Vec<D>{_mm512_madd_epi16(a.raw, b.raw)});
#endif
  }
#if KVPOLICY_CPU_HAS_VNNI
  if constexpr (width == 8) return hn::Vec<D>{_mm256_dpwssd_epi32(sum.raw, a.raw, b.raw)};
  if constexpr (width == 4) return hn::Vec<D>{_mm_dpwssd_epi32(sum.raw, a.raw, b.raw)};
#endif
#endif
#if HWY_TARGET <= HWY_AVX2
  if constexpr (width == 8) return added_at_once(hn::Add(sum, hn::Vec<D>{_mm256_madd_epi16(a.raw, b.raw)}));
#endif
  if constexpr (width == 4) return added_at_once(hn::Add(sum, hn::Vec<D>{_mm_madd_epi16(a.raw, b.raw)}));
#endif
  return add_pair_products_portable(d, sum, a, b);
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
