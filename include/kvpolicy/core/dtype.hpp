// SPDX-License-Identifier: Apache-2.0
//
// The element types of keys, values and queries: float, IEEE float16 and bfloat16. float16 and bfloat16
// are plain 16-bit storage with conversions (round to nearest even); arithmetic is done in float.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvpolicy {

struct bfloat16;
struct float16;

/// Whether `x` is neither NaN nor infinite. Tests the bits, because -ffast-math disables
/// std::isfinite.
[[nodiscard]] constexpr bool is_finite(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fffffffU) < 0x7f800000U;
}
/// Whether `x` is NaN; tests the bits as well.
[[nodiscard]] constexpr bool is_nan(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fffffffU) > 0x7f800000U;
}

/// The encoding of one number of a row in memory. Those after bfloat16 are packed codes, which stand
/// for equal steps unless a codebook says otherwise (core/codebook.hpp).
enum class Encoding : std::uint8_t {
  float32,
  float16,
  bfloat16,
  uint8,
  uint4,
  uint2,
  uint6,
  uint5,
  uint3,
  uint4x2  ///< 8 bits whose upper 4 can be read alone
};

/// Whether the encoding is one of the packed codes.
[[nodiscard]] constexpr bool is_quantized(Encoding encoding) noexcept { return encoding >= Encoding::uint8; }

/// Bits of one number.
[[nodiscard]] constexpr std::size_t bits_of(Encoding encoding) noexcept {
  switch (encoding) {
    case Encoding::float32: return 32;
    case Encoding::float16:
    case Encoding::bfloat16: return 16;
    case Encoding::uint8: return 8;
    case Encoding::uint4: return 4;
    case Encoding::uint2: return 2;
    case Encoding::uint6: return 6;
    case Encoding::uint5: return 5;
    case Encoding::uint3: return 3;
    case Encoding::uint4x2: return 8;
  }
  return 0;
}

/// Whether numbers can be quantised to codes of so many bits.
[[nodiscard]] constexpr bool is_code_width(std::size_t bits) noexcept {
  return bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
}

/// The encoding whose codes have `bits` bits, which must be a code width.
[[nodiscard]] constexpr Encoding code_encoding(std::size_t bits) noexcept {
  switch (bits) {
    case 2: return Encoding::uint2;
    case 3: return Encoding::uint3;
    case 4: return Encoding::uint4;
    case 5: return Encoding::uint5;
    case 6: return Encoding::uint6;
    default: return Encoding::uint8;
  }
}

/// A code in two parts. Widths that do not divide a byte are stored as a row of the upper bits, as wide as a
/// power of two, and a row of the lower ones; so are codes in halves. The other widths have no lower part.
struct CodeParts {
  std::size_t upper;  ///< bits
  std::size_t lower;  ///< bits, or 0
};

/// The parts of a quantised encoding's codes.
[[nodiscard]] constexpr CodeParts code_parts(Encoding encoding) noexcept {
  switch (encoding) {
    case Encoding::uint6: return {4, 2};
    case Encoding::uint5: return {4, 1};
    case Encoding::uint3: return {2, 1};
    case Encoding::uint4x2: return {4, 4};
    default: return {bits_of(encoding), 0};
  }
}

/// Whether the upper halves of codes are a page of rows by themselves (PageLayout).
[[nodiscard]] constexpr bool is_in_halves(Encoding encoding) noexcept {
  return encoding == Encoding::uint4x2;
}
/// The encoding as which the upper halves of codes are read.
inline constexpr Encoding upper_half_encoding = Encoding::uint4;

/// The encoding's name, for messages.
[[nodiscard]] constexpr std::string_view name_of(Encoding encoding) noexcept {
  switch (encoding) {
    case Encoding::float32: return "float32";
    case Encoding::float16: return "float16";
    case Encoding::bfloat16: return "bfloat16";
    case Encoding::uint8: return "uint8";
    case Encoding::uint4: return "uint4";
    case Encoding::uint2: return "uint2";
    case Encoding::uint6: return "uint6";
    case Encoding::uint5: return "uint5";
    case Encoding::uint3: return "uint3";
    case Encoding::uint4x2: return "uint4x2";
  }
  return "unknown";
}

/// The upper half of a float: 8 exponent bits, 7 stored mantissa bits.
struct bfloat16 {
  std::uint16_t bits = 0;

  constexpr bfloat16() = default;
  constexpr explicit bfloat16(float value) noexcept : bits{encode(value)} {}
  constexpr explicit operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  friend constexpr bool operator==(bfloat16, bfloat16) = default;

 private:
  static constexpr std::uint16_t encode(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    // Rounding could turn a NaN into infinity, so a NaN becomes a quiet NaN instead.
    const auto quiet = static_cast<std::uint16_t>((word >> 16) | 0x0040U);
    const auto rounded = static_cast<std::uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
    return (word & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
  }
};

/// IEEE 754 binary16: 5 exponent bits, 10 stored mantissa bits, largest value 65504.
struct float16 {
  std::uint16_t bits = 0;
  static constexpr float largest = 65504.0F;

  constexpr float16() = default;
  constexpr explicit float16(float value) noexcept : bits{encode(value)} {}
  constexpr explicit operator float() const noexcept { return decode(bits); }
  friend constexpr bool operator==(float16, float16) = default;

 private:
  static constexpr std::uint16_t encode(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000U);
    const std::uint32_t magnitude = word & 0x7fffffffU;
    std::uint32_t result = 0;
    if (magnitude > 0x7f800000U) {
      result = 0x7e00U;  // NaN
    } else if (magnitude >= 0x477ff000U) {
      result = 0x7c00U;                     // 65520 and above round to infinity
    } else if (magnitude >= 0x38800000U) {  // normal: rebias the exponent by 112, round 13 bits off
      const std::uint32_t rebased = magnitude - (112U << 23);
      result = (rebased + 0x0fffU + ((rebased >> 13) & 1U)) >> 13;
    } else {
      // Subnormal: adding 0.5 puts the unit of the sum at 2^-24, half's smallest step, so the
      // float addition itself does the rounding.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
      result = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U;
    }
    return static_cast<std::uint16_t>(sign | result);
  }

  static constexpr float decode(std::uint16_t bits) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7fffU;
    if (magnitude >= 0x7c00U) {
      return std::bit_cast<float>(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
    }
    if (magnitude >= 0x0400U) return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(subnormal));
  }
};

/// The element types of rows, queries and outputs.
template <class T>
concept Element = std::same_as<T, float> || std::same_as<T, float16> || std::same_as<T, bfloat16>;

/// The encoding of an element type's numbers.
template <Element T>
inline constexpr Encoding encoding_of = std::same_as<T, float>     ? Encoding::float32
                                        : std::same_as<T, float16> ? Encoding::float16
                                                                   : Encoding::bfloat16;

}  // namespace kvpolicy
