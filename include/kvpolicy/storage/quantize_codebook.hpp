// SPDX-License-Identifier: Apache-2.0
//
// Quantisation of rows whose codes stand for other numbers than equal steps (core/codebook.hpp), a group of channels at
// a time. A number becomes the nearest one that its group has.
//
// The scale of normal numbers is, of some near the group's deviation, the one whose codes explain most of the group's
// squares, fitted to them with the least square error: few numbers are a rough normal distribution. The scales of MXFP4
// and NVFP4 follow from the largest number of the block, as those formats are described (core/small_floats.hpp): the
// largest power of two with which it lies in E2M1's last binade, or the sixth of it. A head's own scale is given, and
// is nowhere chosen here.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/quantizable.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy::detail {

/// Writes codes, a byte each, as a packed row: `codes`, and their lower parts, if they have any, to `lower`.
inline void pack_codes(std::span<const std::uint8_t> from, Encoding encoding, std::byte* codes,
                       std::byte* lower) {
  const auto write = [&](std::byte* to, std::size_t bits, std::size_t dropped) {
    const std::size_t bytes = from.size() * bits / 8;
    const auto mask = static_cast<unsigned>((1U << bits) - 1U);
    std::fill_n(to, bytes, std::byte{0});
    for (std::size_t first = 0; first < from.size(); first += bytes) {
      const std::size_t shift = first / bytes * bits;
      for (std::size_t i = 0; i < bytes; ++i) {
        to[i] |= static_cast<std::byte>((from[first + i] >> dropped & mask) << shift);
      }
    }
  };
  const CodeParts parts = code_parts(encoding);
  write(codes, parts.upper, parts.lower);
  if (parts.lower > 0) write(lower, parts.lower, 0);
}

/// Encodes rows of one format.
class CodebookRow {
 public:
  /// @throws std::bad_alloc
  void resize(std::size_t channels) {
    codes_.resize(channels);
    found_.resize(channels);
  }

  /// Writes the scales of a row's groups, its codes and their lower parts (PageLayout).
  void encode(std::span<const float> row, const RowFormat& format, std::byte* scales, std::byte* codes,
              std::byte* lower) {
    const std::size_t group = format.codebook == Codebook::fp8 ? row.size() : format.group;
    for (std::size_t first = 0; first < row.size(); first += group, scales += scale_bytes(format.codebook)) {
      const std::span<const float> numbers = row.subspan(first, group);
      const std::span<std::uint8_t> to = std::span{codes_}.subspan(first, group);
      switch (format.codebook) {
        case Codebook::normal: encode_normal(numbers, bits_of(format.encoding), scales, to); break;
        case Codebook::mxfp4: encode_mxfp4(numbers, scales, to); break;
        case Codebook::nvfp4: encode_nvfp4(numbers, format.scale, scales, to); break;
        default: encode_fp8(numbers, format.scale, to);
      }
    }
    pack_codes(std::span{codes_}.first(row.size()), format.encoding, codes, lower);
  }

 private:
  void encode_normal(std::span<const float> numbers, std::size_t bits, std::byte* scale,
                     std::span<std::uint8_t> codes) {
    const NormalNumbers normal = normal_numbers(bits);
    const float deviation = std::sqrt(Sums{numbers, numbers}.squares / static_cast<float>(numbers.size()));
    float fitted = 0.0F;
    float most_explained = 0.0F;  // of the squares, by the codes of `fitted`
    for (int twentieth = 16; twentieth <= 24; ++twentieth) {
      const float share = static_cast<float>(twentieth) / 20.0F;
      const Sums sums{numbers,
                      nearest(numbers, normal.table, bits, share * deviation * normal.outermost / 127.0F)};
      const float explained = sums.products * sums.products / sums.squares;
      if (explained > most_explained) {
        most_explained = explained;
        fitted = sums.products / sums.squares;
      }
    }
    // The outermost number stays in the range of half.
    constexpr float most = 515.5F;
    static_assert(static_cast<float>(float16{most}) * 127.0F <= largest_quantizable);
    const float16 stored{fitted < most ? fitted : most};
    std::memcpy(scale, &stored, sizeof stored);
    CodeNumbers counted{};
    for (std::size_t i = 0; i < counted.size(); ++i) counted[i] = static_cast<std::int8_t>(i);
    const std::span<const float> found =
        nearest(numbers, normal.table, bits, static_cast<float>(stored), &counted);
    for (std::size_t n = 0; n < numbers.size(); ++n) codes[n] = static_cast<std::uint8_t>(found[n]);
  }

  // Sums over a group, in lanes that compilers turn into a vector.
  struct Sums {
    float products = 0.0F;
    float squares = 0.0F;  // of the second numbers

    Sums(std::span<const float> numbers, std::span<const float> others) {
      constexpr std::size_t lanes = 16;
      float product[lanes] = {};
      float square[lanes] = {};
      std::size_t at = 0;
      for (; at + lanes <= numbers.size(); at += lanes) {
        for (std::size_t i = 0; i < lanes; ++i) {
          product[i] += numbers[at + i] * others[at + i];
          square[i] += others[at + i] * others[at + i];
        }
      }
      for (std::size_t i = 0; at + i < numbers.size(); ++i) {
        product[i] += numbers[at + i] * others[at + i];
        square[i] += others[at + i] * others[at + i];
      }
      for (std::size_t i = 0; i < lanes; ++i) {
        products += product[i];
        squares += square[i];
      }
    }
  };

  // For each number the nearest one of the table, where one unit of it is `step`; the lower one where two are. With
  // `instead`, what that table has in its place.
  std::span<const float> nearest(std::span<const float> numbers, const CodeNumbers& table, std::size_t bits,
                                 float step, const CodeNumbers* instead = nullptr) {
    const CodeNumbers& written = instead == nullptr ? table : *instead;
    float* found = found_.data();
    std::fill_n(found, numbers.size(), static_cast<float>(written[0]));
    for (std::size_t i = 0; i + 1 < std::size_t{1} << bits; ++i) {
      const float border = 0.5F * static_cast<float>(table[i] + table[i + 1]) * step;
      const auto rise = static_cast<float>(written[i + 1] - written[i]);
      for (std::size_t n = 0; n < numbers.size(); ++n) found[n] += numbers[n] > border ? rise : 0.0F;
    }
    return {found, numbers.size()};
  }

  [[nodiscard]] static float largest_of(std::span<const float> numbers) {
    float largest = 0.0F;
    for (const float number : numbers) {
      const float size = std::abs(number);
      largest = size > largest ? size : largest;
    }
    return largest;
  }

  static void encode_mxfp4(std::span<const float> numbers, std::byte* scale, std::span<std::uint8_t> codes) {
    constexpr std::uint8_t binades = 2;  // E2M1's last one begins at 2^2
    const std::uint8_t largest = E8m0::at_most(largest_of(numbers));
    const auto stored = static_cast<std::uint8_t>(largest > binades ? largest - binades : 1);
    *scale = static_cast<std::byte>(stored);
    // The inverse, a power of two: numbers are in half's range, so the scale is far below 2^127.
    const float inverse = std::bit_cast<float>((254U - stored) << 23);
    for (std::size_t i = 0; i < numbers.size(); ++i) codes[i] = E2m1::encode(numbers[i] * inverse);
  }

  static void encode_nvfp4(std::span<const float> numbers, float head_scale, std::byte* scale,
                           std::span<std::uint8_t> codes) {
    const std::uint8_t stored = E4m3::encode(largest_of(numbers) / E2m1::largest / head_scale);
    *scale = static_cast<std::byte>(stored);
    const float step = E4m3::decode(stored) * head_scale;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      codes[i] = step > 0.0F ? E2m1::encode(numbers[i] / step) : std::uint8_t{0};
    }
  }

  static void encode_fp8(std::span<const float> numbers, float head_scale, std::span<std::uint8_t> codes) {
    for (std::size_t i = 0; i < numbers.size(); ++i) codes[i] = E4m3::encode(numbers[i] / head_scale);
  }

  std::vector<std::uint8_t> codes_;
  std::vector<float> found_;  // of a group
};

}  // namespace kvpolicy::detail
