// SPDX-License-Identifier: Apache-2.0
//
// Conversions and arithmetic of kernels/simt.cuh.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include <kvpolicy/core/dtype.hpp>

#include "shared_memory.hpp"

namespace kvpolicy::gpu {
namespace simt {

/// A subnormal float becomes a zero of the same sign.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x; }

/// a b + c, rounded once. The product of two halves is exact in double. Information that the next two
/// roundings drop is kept in the last bit ("round to odd"), so that only the third rounding, to half, counts.
inline float16 fused(float16 a, float16 b, float16 c) {
  const double product = static_cast<double>(static_cast<float>(a)) * static_cast<float>(b);
  const double addend = static_cast<float>(c);
  double sum = product + addend;
  if (!std::isfinite(sum)) return float16{static_cast<float>(sum)};
  const double of_addend = sum - product;
  const double dropped = (product - (sum - of_addend)) + (addend - of_addend);
  if (dropped != 0.0) {
    const bool away = (dropped < 0.0) != (sum < 0.0);
    sum = std::bit_cast<double>((std::bit_cast<std::uint64_t>(sum) - (away ? 1 : 0)) | 1);
  }
  auto narrow = static_cast<float>(sum);
  if (static_cast<double>(narrow) != sum) {
    const bool away = std::fabs(static_cast<double>(narrow)) > std::fabs(sum);
    narrow = std::bit_cast<float>((std::bit_cast<std::uint32_t>(narrow) - (away ? 1 : 0)) | 1);
  }
  return float16{narrow};
}

inline float16 half_of(std::uint32_t bits) {
  float16 h;
  h.bits = static_cast<std::uint16_t>(bits);
  return h;
}

}  // namespace simt

inline float exp2_approximate(float x) { return simt::flushed(std::exp2(simt::flushed(x))); }
inline float exp2_exact(float x) { return std::exp2(x); }
inline float log2_exact(float x) { return std::log2(x); }
inline float reciprocal_approximate(float x) { return simt::flushed(1.0F / simt::flushed(x)); }
inline std::uint32_t multiply_high(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline float rounded_product(float a, float b) {
  volatile float product = a * b;  // a compiler may otherwise add to it before it is rounded
  return product;
}
inline float rounded_quotient(float a, float b) { return a / b; }
inline void refuse_fast_math() {}
inline float inverse_square_root(float x) { return 1.0F / std::sqrt(x); }
inline double square_root(double x) { return std::sqrt(x); }
inline double exponential(double x) { return std::exp(x); }
inline void sine_cosine(double angle, float& sine, float& cosine) {
  sine = static_cast<float>(std::sin(angle));
  cosine = static_cast<float>(std::cos(angle));
}

inline std::uint32_t count_bits(std::uint32_t x) { return static_cast<std::uint32_t>(std::popcount(x)); }
inline std::uint32_t bits_of_float(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float float_of_bits(std::uint32_t x) { return std::bit_cast<float>(x); }

template <Element E>
inline float to_float(std::uint16_t bits) {
  E number;
  number.bits = bits;
  return static_cast<float>(number);
}
template <Element E>
inline std::uint16_t from_float(float x) {
  return E{x}.bits;
}
template <Element E>
inline std::uint32_t pack(float low, float high) {
  return static_cast<std::uint32_t>(from_float<E>(low)) | static_cast<std::uint32_t>(from_float<E>(high))
                                                              << 16;
}
inline std::uint32_t half2_multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto low = simt::fused(simt::half_of(a), simt::half_of(b), simt::half_of(c)).bits;
  const auto high = simt::fused(simt::half_of(a >> 16), simt::half_of(b >> 16), simt::half_of(c >> 16)).bits;
  return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
}
inline std::uint32_t unset_word() { return simt::poison_word; }
inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  std::uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t from = selector >> (4 * i) & 7U;
    out |= (static_cast<std::uint32_t>(bytes >> (8 * from)) & 0xffU) << (8 * i);
  }
  return out;
}

}  // namespace kvpolicy::gpu
