// SPDX-License-Identifier: Apache-2.0
//
// Conversions and arithmetic of the emulation, which need no launch.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <kvpolicy/cuda/kernels/simt.cuh>

using namespace kvpolicy;
using namespace kvpolicy::gpu;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

TEST_CASE("exp2_approximate at the ends of its range") {
  CHECK(exp2_approximate(-infinity) == 0.0F);
  CHECK(exp2_approximate(infinity) == infinity);
  CHECK(exp2_approximate(0.0F) == 1.0F);
  CHECK(exp2_approximate(10.0F) == 1024.0F);
  CHECK(exp2_approximate(-126.0F) == 0x1p-126F);
  CHECK(exp2_approximate(-127.0F) == 0.0F);  // subnormal, flushed to 0
  CHECK(exp2_approximate(1e-40F) == 1.0F);
  CHECK(std::isnan(exp2_approximate(std::nanf(""))));
}

TEST_CASE("exponential at the ends of its range") {
  CHECK(exponential(-HUGE_VAL) == 0.0);
  CHECK(exponential(0.0) == 1.0);
  CHECK(std::abs(exponential(1.0) - 2.718281828459045) < 1e-15);
  CHECK(std::isnan(exponential(std::nan(""))));
}

TEST_CASE_TEMPLATE("16-bit numbers go to float and back", E, float16, bfloat16) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto number = static_cast<std::uint16_t>(bits);
    const float value = to_float<E>(number);
    if (std::isnan(value)) continue;
    REQUIRE(from_float<E>(value) == number);
    REQUIRE(pack<E>(value, -value) == (bits | (bits ^ 0x8000U) << 16));
  }
}

// The half nearest to an exact number, ties to even, found by trying both neighbours.
std::uint16_t nearest_half(long double exact) {
  std::uint32_t low = 0;  // the largest half not above |exact|
  const long double magnitude = exact < 0 ? -exact : exact;
  for (std::uint32_t step = 0x4000U; step > 0; step /= 2) {
    if (low + step <= 0x7bffU &&
        static_cast<long double>(to_float<float16>(static_cast<std::uint16_t>(low + step))) <= magnitude) {
      low += step;
    }
  }
  const long double below = to_float<float16>(static_cast<std::uint16_t>(low));
  const long double above =
      low == 0x7bffU ? 65536.0L
                     : static_cast<long double>(to_float<float16>(static_cast<std::uint16_t>(low + 1)));
  const long double up = above - magnitude;
  const long double down = magnitude - below;
  if (up < down || (up == down && low % 2 == 1)) ++low;
  return static_cast<std::uint16_t>(low | (exact < 0 ? 0x8000U : 0U));
}

TEST_CASE("half2_multiply_add rounds once") {
  // a b = 1 + 2^-10 + 2^-22 ..., with a c that makes ties, so that two roundings would give another result.
  std::mt19937 random{7};
  int ties_broken = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto draw = [&] {
      // Finite numbers with exponents whose sums fit the 64 bits of a long double.
      const auto bits = static_cast<std::uint32_t>(random());
      const std::uint32_t exponent = 8 + (bits >> 16) % 14;
      return static_cast<std::uint16_t>((bits & 0x83ffU) | exponent << 10);
    };
    const std::uint16_t a = draw();
    const std::uint16_t b = draw();
    const std::uint16_t c = draw();
    const long double product = static_cast<long double>(to_float<float16>(a)) * to_float<float16>(b);
    const long double exact = product + to_float<float16>(c);
    const std::uint32_t got =
        half2_multiply_add(a | std::uint32_t{c} << 16, b | 0x3c000000U, c | std::uint32_t{a} << 16);
    REQUIRE((got & 0xffffU) == (exact == 0 ? 0U : nearest_half(exact)));
    const long double other = static_cast<long double>(to_float<float16>(c)) + to_float<float16>(a);
    REQUIRE((got >> 16) == (other == 0 ? 0U : nearest_half(other)));
    const float twice = static_cast<float>(product) + to_float<float16>(c);
    ties_broken += from_float<float16>(twice) != (got & 0xffffU);
  }
  CHECK(ties_broken > 0);  // the test includes numbers where it matters
  CHECK(half2_multiply_add(0x7c00U, 0x3c00U, 0x3c00U) == 0x7c00U);
  CHECK((half2_multiply_add(0x7bffU, 0x4000U, 0) & 0xffffU) == 0x7c00U);
}

TEST_CASE("permute_bytes takes bytes of b:a") {
  CHECK(permute_bytes(0x33221100U, 0x77665544U, 0x3210U) == 0x33221100U);
  CHECK(permute_bytes(0x33221100U, 0x77665544U, 0x7654U) == 0x77665544U);
  CHECK(permute_bytes(0x33221100U, 0x77665544U, 0x4140U) == 0x44114400U);
  CHECK(permute_bytes(0x33221100U, 0x77665544U, 0x0527U) == 0x00552277U);
}

TEST_CASE("small ones") {
  CHECK(count_bits(0xf0f00001U) == 9);
  CHECK(float_of_bits(bits_of_float(-1.5F)) == -1.5F);
  CHECK(std::fabs(inverse_square_root(16.0F) - 0.25F) <= 1e-7F);
  // The square is a tie between two floats; what a multiply-add would keep is lost.
  const float above_one = 1.0F + 0x1p-12F;
  CHECK(rounded_product(above_one, above_one) - (1.0F + 0x1p-11F) == 0.0F);
  float sine = 0.0F;
  float cosine = 0.0F;
  sine_cosine(1e6, sine, cosine);
  CHECK(std::fabs(sine - -0.3499935F) <= 1e-6F);
  CHECK(std::fabs(cosine - 0.9367521F) <= 1e-6F);
}

}  // namespace
