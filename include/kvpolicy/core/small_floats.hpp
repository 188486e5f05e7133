// SPDX-License-Identifier: Apache-2.0
//
// Numbers of 8 and 4 bits with an exponent, as the Open Compute Project defines them: E4M3 (OFP8 1.0), E2M1 and the
// scale E8M0 (Microscaling Formats 1.0). Rounding is to nearest even; what is too large becomes the largest number.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace kvpolicy {

/// 4 exponent bits, 3 stored mantissa bits, no infinity; subnormal steps of 2^-9.
struct E4m3 {
  static constexpr float largest = 448.0F;
  static constexpr std::uint8_t nan = 0x7f;  ///< or with the sign

  [[nodiscard]] static constexpr float decode(std::uint8_t code) noexcept {
    const std::uint32_t magnitude = code & 0x7fU;
    float value = static_cast<float>(magnitude) * 0x1p-9F;
    if (magnitude >= 8U) value = std::bit_cast<float>((magnitude << 20) + (120U << 23));
    if (magnitude == nan) value = std::numeric_limits<float>::quiet_NaN();
    return (code & 0x80U) != 0 ? -value : value;
  }
  [[nodiscard]] static constexpr std::uint8_t encode(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = word >> 31 << 7;
    const std::uint32_t magnitude = word & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return static_cast<std::uint8_t>(sign | nan);
    std::uint32_t code = 0;
    if (magnitude >= 121U << 23) {  // 2^-6 or more: rebias the exponent by 120, round 20 bits off
      const std::uint32_t rebased = magnitude - (120U << 23);
      code = (rebased + 0x7ffffU + ((rebased >> 20) & 1U)) >> 20;
    } else {  // in a sum with 2^14 the last bit is one of 2^-9, so the addition itself does the rounding
      code = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14F) - 0x46800000U;
    }
    return static_cast<std::uint8_t>(sign | (code < 0x7eU ? code : 0x7eU));
  }
};

/// 2 exponent bits and 1 stored mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the same with a sign (bit 3).
struct E2m1 {
  static constexpr float largest = 6.0F;
  /// Twice the numbers, which are integers.
  static constexpr std::array<std::int8_t, 16> doubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                                          0, -1, -2, -3, -4, -6, -8, -12};

  [[nodiscard]] static constexpr float decode(std::uint8_t code) noexcept {
    return 0.5F * static_cast<float>(doubled[code & 0xfU]);
  }
  /// Where two numbers are nearest, the one with an even code.
  [[nodiscard]] static constexpr std::uint8_t encode(float value) noexcept {
    const float size = value < 0.0F ? -value : value;
    const unsigned code = unsigned{size > 0.25F} + unsigned{size >= 0.75F} + unsigned{size > 1.25F} +
                          unsigned{size >= 1.75F} + unsigned{size > 2.5F} + unsigned{size >= 3.5F} +
                          unsigned{size > 5.0F};
    return static_cast<std::uint8_t>(value < 0.0F ? code | 8U : code);
  }
};

/// A power of two, 2^-127 to 2^127.
struct E8m0 {
  static constexpr std::uint8_t nan = 0xff;

  [[nodiscard]] static constexpr float decode(std::uint8_t code) noexcept {
    if (code == nan) return std::numeric_limits<float>::quiet_NaN();
    return code == 0 ? 0x1p-127F : std::bit_cast<float>(static_cast<std::uint32_t>(code) << 23);
  }
  /// The code of the largest power of two that is at most `value`, which is at least 2^-126.
  [[nodiscard]] static constexpr std::uint8_t at_most(float value) noexcept {
    return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(value) >> 23 & 0xffU);
  }
};

}  // namespace kvpolicy
