// SPDX-License-Identifier: Apache-2.0
//
// Compares float16 and bfloat16 with the compiler's own half and with bit arithmetic in double.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <kvpolicy/core/dtype.hpp>

using kvpolicy::bfloat16;
using kvpolicy::float16;

namespace {

template <class T>
T from_bits(unsigned bits) {
  T value;
  value.bits = static_cast<std::uint16_t>(bits);
  return value;
}

float as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// The value of a 16-bit pattern with so many mantissa bits, from the definition.
double meaning(unsigned bits, int mantissa_bits, int bias) {
  const int exponent_bits = 15 - mantissa_bits;
  const unsigned exponent = bits >> mantissa_bits & ((1U << exponent_bits) - 1U);
  const double mantissa = static_cast<double>(bits & ((1U << mantissa_bits) - 1U));
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == (1U << exponent_bits) - 1U) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + std::ldexp(1.0, mantissa_bits),
                           static_cast<int>(exponent) - bias - mantissa_bits);
}

// Counts wrong conversions: all patterns are decoded, and the floats next to and between neighbours are
// encoded. A tie must go to the even pattern, any other number to the nearer one.
template <class T>
int wrong_conversions(int mantissa_bits, int bias) {
  int wrong = 0;
  for (unsigned bits = 0; bits < 0x10000U; ++bits) {
    const double expected = meaning(bits, mantissa_bits, bias);
    const auto decoded = static_cast<float>(from_bits<T>(bits));
    if (std::isnan(expected)) {
      wrong += std::isnan(decoded) && std::isnan(static_cast<float>(T{decoded})) ? 0 : 1;
      continue;
    }
    wrong += static_cast<double>(decoded) == expected && T{decoded}.bits == bits ? 0 : 1;
    const double next = meaning(bits + 1, mantissa_bits, bias);
    if ((bits & 0x7fffU) == 0x7fffU || !std::isfinite(expected) || !std::isfinite(next)) continue;
    const auto middle = static_cast<float>((expected + next) / 2);  // exact, because floats are finer
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    wrong += T{middle}.bits == even ? 0 : 1;
    const bool negative = (bits & 0x8000U) != 0;
    const float away = std::nextafter(middle, negative ? -INFINITY : INFINITY);
    const float towards = std::nextafter(middle, 0.0F);
    wrong += T{away}.bits == bits + 1 ? 0 : 1;
    wrong += T{towards}.bits == bits ? 0 : 1;
  }
  return wrong;
}

}  // namespace

TEST_CASE("half: every pattern and every tie") { CHECK(wrong_conversions<float16>(10, 15) == 0); }
TEST_CASE("bfloat16: every pattern and every tie") { CHECK(wrong_conversions<bfloat16>(7, 127) == 0); }

TEST_CASE("half: the ends of its range") {
  CHECK(float16{65504.0F}.bits == 0x7bffU);
  CHECK(float16{std::nextafter(65520.0F, 0.0F)}.bits == 0x7bffU);
  CHECK(float16{65520.0F}.bits == 0x7c00U);
  CHECK(float16{-1e30F}.bits == 0xfc00U);
  CHECK(float16{INFINITY}.bits == 0x7c00U);
  CHECK(float16{0x1p-24F}.bits == 1U);
  CHECK(float16{0x1p-25F}.bits == 0U);  // a tie, to even
  CHECK(float16{std::nextafter(0x1p-25F, 1.0F)}.bits == 1U);
  CHECK(float16{-0.0F}.bits == 0x8000U);
  CHECK(float16{as_float(1U)}.bits == 0U);
}

TEST_CASE("bfloat16: the ends of its range") {
  CHECK(bfloat16{std::numeric_limits<float>::max()}.bits == 0x7f80U);
  CHECK(bfloat16{as_float(0x7f7f7fffU)}.bits == 0x7f7fU);
  CHECK(bfloat16{as_float(0x7f7f8000U)}.bits == 0x7f80U);
  CHECK(bfloat16{-INFINITY}.bits == 0xff80U);
  // NaNs with a payload in the lower half only must not round to infinity, nor wrap around.
  for (const std::uint32_t nan : {0x7f800001U, 0xff800001U, 0x7fffffffU, 0xffffffffU}) {
    CHECK(std::isnan(static_cast<float>(bfloat16{as_float(nan)})));
    CHECK(std::isnan(static_cast<float>(float16{as_float(nan)})));
    CHECK((bfloat16{as_float(nan)}.bits & 0x8000U) == (nan >> 16 & 0x8000U));
  }
}

// GCC has ARM's own name for it in all versions, _Float16 in C++ only since 13.
#if defined(__ARM_FP16_FORMAT_IEEE)
using compilers_half = __fp16;
#elif defined(__FLT16_MAX__)
using compilers_half = _Float16;
#endif
#if defined(__ARM_FP16_FORMAT_IEEE) || defined(__FLT16_MAX__)
TEST_CASE("half: the compiler's own half agrees on every 257th float") {
  int wrong = 0;
  for (std::uint64_t bits = 0; bits <= 0xffffffffU; bits += 257) {
    const float value = as_float(static_cast<std::uint32_t>(bits));
    if (std::isnan(value)) continue;
    const auto expected = std::bit_cast<std::uint16_t>(static_cast<compilers_half>(value));
    wrong += float16{value}.bits == expected ? 0 : 1;
  }
  CHECK(wrong == 0);
}
#endif

TEST_CASE("encodings have the right number of bits") {
  using kvpolicy::Encoding;
  static_assert(kvpolicy::bits_of(Encoding::float32) == 32 && kvpolicy::bits_of(Encoding::uint2) == 2);
  static_assert(kvpolicy::encoding_of<float16> == Encoding::float16);
  static_assert(kvpolicy::encoding_of<bfloat16> == Encoding::bfloat16);
  static_assert(!kvpolicy::is_quantized(Encoding::bfloat16) && kvpolicy::is_quantized(Encoding::uint8));
  static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2);
  static_assert(float16{1.5F}.bits == 0x3e00U && bfloat16{1.5F}.bits == 0x3fc0U);  // at compile time, too
  CHECK(kvpolicy::name_of(Encoding::uint4) == "uint4");
}
