// SPDX-License-Identifier: Apache-2.0
//
// Rows of normal numbers (core/codebook.hpp) as rows of 8-bit codes with a scale and a zero, which integer products
// read: the numbers are integers from -127 to 127, so the code number + 128 times the scale, less 128 scales, is the
// same row. (The numbers of MXFP4 lie so near to 0 that they would lose accuracy, and the scales of NVFP4 are no
// numbers in half: these are decoded to float.)
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/cpu/decode_codebook-inl.hpp>
#include <kvpolicy/cpu/joined_codes-inl.hpp>
#include <kvpolicy/cpu/row_params-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>
#include <kvpolicy/cpu/x86/integer_pairs-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// The codes of one side of a row tile as bytes.
class ByteCodes {
 public:
  /// More groups in a row are decoded to float.
  static constexpr std::size_t most_groups = 8;

  [[nodiscard]] static std::size_t scratch_floats(std::size_t channels) {
    return max_tile_rows * (channels + most_groups * sizeof(float16)) / sizeof(float);
  }
  ByteCodes(std::size_t channels, float* scratch)
      : channels_{channels},
        rows_{reinterpret_cast<std::uint8_t*>(scratch)},
        zeros_{reinterpret_cast<float16*>(rows_ + max_tile_rows * channels)} {}

  /// The side itself, or what it is in bytes if it is of normal numbers. Valid until the next call; `joined` joins
  /// codes of two parts.
  [[nodiscard]] const RowTileSide& of(const RowTileSide& side, std::size_t rows, JoinedCodes& joined) {
    if (side.format.codebook != Codebook::normal || !takes(side.format)) return side;
    const std::size_t groups = channels_ / side.format.group;
    side_.format = {Encoding::uint8, Granularity::per_token, side.format.group, side.format.hadamard};
    const std::byte* const* codes = joined.of(side, rows);
    const Table numbers = table(side.format);
    if (joined_bits(side.format.encoding) == 2) {
      for (std::size_t row = 0; row < rows; ++row) {
        look_up_codes<2>(codes[row], channels_ / 4, numbers, rows_ + row * channels_);
      }
    } else {
      for (std::size_t row = 0; row < rows; ++row) {
        look_up_codes<4>(codes[row], channels_ / 2, numbers, rows_ + row * channels_);
      }
    }
    for (std::size_t row = 0; row < rows; ++row) {
      side_.codes[row] = reinterpret_cast<const std::byte*>(rows_ + row * channels_);
      side_.scales[row] = reinterpret_cast<const float16*>(side.code_scales[row]);
      side_.zeros[row] = zeros_ + row * groups;
      for (std::size_t g = 0; g < groups; ++g) {
        // A power of two times a half is one, or beyond the largest: products are then computed otherwise.
        zeros_[row * groups + g] = float16{-128.0F * static_cast<float>(side_.scales[row][g])};
      }
    }
    return side_;
  }

 private:
  using Table = std::array<std::uint8_t, 16>;

  [[nodiscard]] bool takes(const RowFormat& format) const {
    // Of smaller groups, integer products know nothing.
    if (format.group != channels_ && format.group < RowTileParams::smallest_group) return false;
    return channels_ / format.group <= most_groups && JoinedCodes::takes(format.encoding, channels_) &&
           channels_ * joined_bits(format.encoding) / 8 >= 16;
  }
  [[nodiscard]] static Table table(const RowFormat& format) {
    const CodeNumbers numbers = code_numbers(format.codebook, bits_of(format.encoding));
    Table shifted;
    for (std::size_t i = 0; i < shifted.size(); ++i) shifted[i] = static_cast<std::uint8_t>(numbers[i] + 128);
    return shifted;
  }

  std::size_t channels_;
  std::uint8_t* rows_;  // [max_tile_rows, channels]
  float16* zeros_;      // [max_tile_rows, groups]
  RowTileSide side_;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
