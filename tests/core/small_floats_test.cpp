// SPDX-License-Identifier: Apache-2.0
//
// Numbers of 8 and 4 bits with an exponent, against their definitions: every code, and the nearest of all codes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/small_floats.hpp>

using namespace kvpolicy;

namespace {

// (-1)^sign * 2^(exponent - bias) * 1.mantissa; with an exponent field of 0 the mantissa alone.
double defined(unsigned code, unsigned exponent_bits, unsigned mantissa_bits, int bias) {
  const unsigned mantissa = code & ((1U << mantissa_bits) - 1U);
  const unsigned exponent = code >> mantissa_bits & ((1U << exponent_bits) - 1U);
  const bool negative = (code >> (mantissa_bits + exponent_bits) & 1U) != 0;
  const double fraction = std::ldexp(static_cast<double>(mantissa), -static_cast<int>(mantissa_bits));
  const double size = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                    : std::ldexp(1.0 + fraction, static_cast<int>(exponent) - bias);
  return negative ? -size : size;
}

// The code of the number nearest to `value` among the codes [0, count) without a sign; the even one of two.
unsigned nearest(double value, unsigned count, double (*number)(unsigned)) {
  unsigned best = 0;
  for (unsigned code = 1; code < count; ++code) {
    const double off = std::abs(number(code) - value);
    const double least = std::abs(number(best) - value);
    if (off < least || (off == least && code % 2 == 0)) best = code;
  }
  return best;
}

double e4m3(unsigned code) { return defined(code, 4, 3, 7); }
double e2m1(unsigned code) { return defined(code, 2, 1, 1); }

// Numbers of every size, both signs, and what lies right beside the middle of two.
std::vector<float> telling_numbers(double largest, double (*number)(unsigned), unsigned count) {
  std::vector<float> all{0.0F,
                         1e-30F,
                         std::numeric_limits<float>::denorm_min(),
                         static_cast<float>(largest) * 0.99F,
                         static_cast<float>(largest) * 1.01F,
                         65504.0F,
                         1e30F,
                         std::numeric_limits<float>::infinity()};
  for (unsigned code = 0; code + 1 < count; ++code) {
    const auto middle = static_cast<float>((number(code) + number(code + 1)) / 2);
    for (const float value : {static_cast<float>(number(code)), middle, std::nextafter(middle, 0.0F),
                              std::nextafter(middle, 1e9F)}) {
      all.push_back(value);
    }
  }
  for (std::uint32_t bits = 0; bits < 0x7f800000U; bits += 12345677U)
    all.push_back(std::bit_cast<float>(bits));
  return all;
}

}  // namespace

TEST_CASE("E4M3: every code is what its definition says") {
  for (unsigned code = 0; code < 256; ++code) {
    CAPTURE(code);
    const float value = E4m3::decode(static_cast<std::uint8_t>(code));
    if ((code & 0x7fU) == 0x7fU) {
      CHECK(std::isnan(value));
    } else {
      CHECK(value == e4m3(code));
      CHECK(std::signbit(value) == (code >= 128));
    }
  }
  CHECK(E4m3::largest == e4m3(0x7e));
}

TEST_CASE("E4M3: a number becomes the nearest, the even one of two, and at most the largest") {
  for (const float value : telling_numbers(E4m3::largest, e4m3, 0x7f)) {
    CAPTURE(value);
    const double size = std::min(double{value}, 1e6);  // beyond that, distances in double are all equal
    const unsigned expected = nearest(size, 0x7f, e4m3);
    CHECK(unsigned{E4m3::encode(value)} == expected);
    CHECK(unsigned{E4m3::encode(-value)} == (expected | 0x80U));
  }
  CHECK((E4m3::encode(std::numeric_limits<float>::quiet_NaN()) & 0x7f) == 0x7f);
}

TEST_CASE("E2M1: the numbers, and the nearest of them") {
  for (unsigned code = 0; code < 16; ++code) {
    CAPTURE(code);
    CHECK(E2m1::decode(static_cast<std::uint8_t>(code)) == e2m1(code));
    CHECK(2 * e2m1(code) == E2m1::doubled[code]);
  }
  for (const float value : telling_numbers(E2m1::largest, e2m1, 8)) {
    CAPTURE(value);
    const unsigned expected = nearest(std::min(double{value}, 1e6), 8, e2m1);
    CHECK(unsigned{E2m1::encode(value)} == expected);
    if (value > 0.0F) CHECK(unsigned{E2m1::encode(-value)} == (expected | 8U));
  }
}

TEST_CASE("E8M0: powers of two") {
  for (unsigned code = 0; code < 255; ++code) {
    CHECK(E8m0::decode(static_cast<std::uint8_t>(code)) == std::ldexp(1.0, static_cast<int>(code) - 127));
  }
  CHECK(std::isnan(E8m0::decode(E8m0::nan)));
  for (const float value : {1.0F, 1.99F, 2.0F, 0.75F, 3e-38F, 65504.0F, 3e38F}) {
    CAPTURE(value);
    const double power = E8m0::decode(E8m0::at_most(value));
    CHECK(power <= value);
    CHECK(2 * power > value);
  }
}
