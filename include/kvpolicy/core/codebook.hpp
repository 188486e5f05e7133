// SPDX-License-Identifier: Apache-2.0
//
// Which numbers the codes of a quantised row stand for, and what multiplies them. Equal steps are the library's usual
// format (storage/quantize.hpp). Normal numbers have the least mean square error there can be for the normal
// distribution (Lloyd, 1982; Max, 1960), and the channels of a rotated row nearly have that distribution (TurboQuant,
// arXiv:2504.19874); they need no zero. Numbers with an exponent (core/small_floats.hpp) are for engines whose rows
// come in them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/small_floats.hpp>

namespace kvpolicy {

/// The numbers that codes stand for.
enum class Codebook : std::uint8_t {
  even,    ///< 0, 1, 2, … times a scale, plus a zero, both in half, for each group of numbers
  normal,  ///< `normal_numbers`, times a scale in half for each group
  fp8,     ///< E4M3, times a scale of the head
  mxfp4,   ///< E2M1, times a power of two in E8M0 for each 32 channels
  nvfp4    ///< E2M1, times a number in E4M3 for each 16 channels, times a scale of the head
};

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 5> names_of(Codebook) {
  return {"even", "normal", "fp8", "mxfp4", "nvfp4"};
}
/// The name of one of them.
[[nodiscard]] constexpr std::string_view name_of(Codebook codebook) {
  return names_of(Codebook{})[static_cast<std::size_t>(codebook)];
}

/// Bytes of the scale of a group in a page; 0 where the head has the only one.
[[nodiscard]] constexpr std::size_t scale_bytes(Codebook codebook) noexcept {
  switch (codebook) {
    case Codebook::even:
    case Codebook::normal: return sizeof(float16);
    case Codebook::fp8: return 0;
    case Codebook::mxfp4:
    case Codebook::nvfp4: return 1;
  }
  return 0;
}

/// Whether a group has a zero besides.
[[nodiscard]] constexpr bool has_zeros(Codebook codebook) noexcept { return codebook == Codebook::even; }

/// Bytes of a group's scale, and of its zero if it has one.
[[nodiscard]] constexpr std::size_t param_bytes_of_group(Codebook codebook) noexcept {
  return scale_bytes(codebook) + (has_zeros(codebook) ? sizeof(float16) : 0);
}

/// The channels that share a scale where the format says so; 0 where the settings do.
[[nodiscard]] constexpr std::size_t block_channels(Codebook codebook) noexcept {
  return codebook == Codebook::mxfp4 ? 32 : codebook == Codebook::nvfp4 ? 16 : 0;
}

/// Whether all rows of a head have a scale in common.
[[nodiscard]] constexpr bool has_head_scale(Codebook codebook) noexcept {
  return codebook == Codebook::fp8 || codebook == Codebook::nvfp4;
}

/// Whether codes of so many bits can stand for these numbers.
[[nodiscard]] constexpr bool fits_codebook(Codebook codebook, std::size_t bits) noexcept {
  switch (codebook) {
    case Codebook::even: return true;
    case Codebook::normal: return bits <= 4;
    case Codebook::fp8: return bits == 8;
    case Codebook::mxfp4:
    case Codebook::nvfp4: return bits == 4;
  }
  return false;
}

/// Integers by code; those beyond the last code are 0.
using CodeNumbers = std::array<std::int8_t, 16>;

/// The numbers with the least mean square error for the normal distribution, in a unit of which its largest is 127 and
/// rounded to integers, which changes the error by less than two thousandths. `outermost` is the largest in deviations.
struct NormalNumbers {
  CodeNumbers table;
  float outermost;
};
/// Those of codes of `bits` bits, 2 to 4.
[[nodiscard]] constexpr NormalNumbers normal_numbers(std::size_t bits) noexcept {
  switch (bits) {
    case 2: return {{-127, -38, 38, 127}, 1.5104F};
    case 3: return {{-127, -79, -45, -14, 14, 45, 79, 127}, 2.1520F};
    default: return {{-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127}, 2.7326F};
  }
}

/// The integers that codes of `bits` bits stand for, but for a factor (`code_factor`). E4M3 has none.
[[nodiscard]] constexpr CodeNumbers code_numbers(Codebook codebook, std::size_t bits) noexcept {
  return codebook == Codebook::normal ? normal_numbers(bits).table : E2m1::doubled;
}

/// What the integers of a group are multiplied by. `scale` are the bytes of its scale.
[[nodiscard]] inline float code_factor(Codebook codebook, const std::byte* scale, float head_scale) noexcept {
  if (codebook == Codebook::normal) {
    float16 stored;
    std::memcpy(&stored, scale, sizeof stored);
    return static_cast<float>(stored);
  }
  const auto code = static_cast<std::uint8_t>(*scale);
  if (codebook == Codebook::mxfp4) return 0.5F * E8m0::decode(code);
  return 0.5F * (E4m3::decode(code) * head_scale);
}

}  // namespace kvpolicy
