// SPDX-License-Identifier: Apache-2.0
//
// The keys and values of a row tile as factors of products in the processor's units for bfloat16, packed once for
// all queries of a tile: keys in pairs of channels, values in pairs of rows. Rows stored in bfloat16 are used as
// they are. Of quantised rows with one scale each, the codes are used, which bfloat16 represents exactly: scales and
// zeros are for the caller to apply. Other quantised rows are decoded to float first: keys are then split into two
// terms, and values into as many as the softmax's weights. Rows in half are two exact terms. Numbers that are not
// finite are left to the products in float, because here they would meet padding of zeros.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvpolicy/cpu/bfloat16_pairs-inl.hpp>
#include <kvpolicy/cpu/decode_rows-inl.hpp>
#include <kvpolicy/cpu/query_tile-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>
#include <kvpolicy/cpu/x86/tile_product.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// What codes of rows with one scale each stand for: code * scale + zero, where codes count from the middle one, so
/// that less cancels.
struct CodeScales {
  std::array<float, max_tile_rows> scales;
  std::array<float, max_tile_rows> zeros;  ///< the numbers of the middle code
};

/// One side of a row tile, packed.
struct PairSide {
  std::uint32_t* pairs = nullptr;  ///< terms, one after another
  std::size_t terms = 0;           ///< 0: the side must be multiplied in float
  bool exact = false;              ///< the terms are the rows' numbers, not nearly so
  bool coded = false;              ///< the pairs are codes, and `codes` says what they stand for
  CodeScales codes;
};

class PairRows {
 public:
  static constexpr std::size_t most_terms = 2;
  /// Pairs of a row tile's rows, and of a row's channels, rounded up to whole tiles.
  static constexpr std::size_t row_pairs = max_tile_rows / 2;
  [[nodiscard]] static std::size_t channel_pairs(std::size_t head_dim) {
    return (head_dim / 2 + x86::tile_size - 1) / x86::tile_size * x86::tile_size;
  }
  [[nodiscard]] static std::size_t padded_pairs(std::size_t rows) {
    return (rows + 2 * x86::tile_size - 1) / (2 * x86::tile_size) * x86::tile_size;
  }

  [[nodiscard]] static std::size_t scratch_words(const HeadWidth& head) {
    return most_terms * (max_tile_rows * channel_pairs(head.keys) + row_pairs * head.values);
  }
  [[nodiscard]] static std::size_t scratch_floats(const HeadWidth& head) { return 2 * head.widest(); }

  PairRows(const HeadWidth& head, std::uint32_t* scratch, float* floats_scratch)
      : head_{head}, numbers_{floats_scratch} {
    keys_.pairs = scratch;
    values_.pairs = scratch + most_terms * key_term();
    // Channels that pad the last tile's pairs are never written again.
    std::fill_n(keys_.pairs, most_terms * key_term(), 0U);
  }

  [[nodiscard]] const PairSide& keys() const { return keys_; }  ///< [terms] of [max_tile_rows, channel pairs]
  [[nodiscard]] const PairSide& values() const {
    return values_;
  }  ///< [terms] of [row_pairs, width of values]
  /// Words from one term to the next.
  [[nodiscard]] std::size_t key_term() const { return max_tile_rows * channel_pairs(head_.keys); }
  [[nodiscard]] std::size_t value_term() const { return row_pairs * head_.values; }

  /// Whether rows of this format are packed as they are stored.
  [[nodiscard]] static bool takes(const RowFormat& format, std::size_t channels) {
    if (format.encoding == Encoding::bfloat16) return true;
    return is_quantized(format.encoding) && format.codebook == Codebook::even &&
           format.granularity == Granularity::per_token && format.group == channels &&
           channels * code_parts(format.encoding).upper / 8 >= lanes;
  }

  /// Packs keys as they are stored. Returns false if they must be decoded first, or a number is not finite.
  bool load_keys(const RowTileSide& side, std::size_t rows) {
    keys_.terms = 0;
    if (!takes(side.format, head_.keys)) return false;
    keys_.coded = is_quantized(side.format.encoding);
    const bool finite = keys_.coded
                            ? take_codes(side, rows, head_.keys, keys_.codes,
                                         [&](std::size_t row) KVPOLICY_CPU_LAMBDA { copy_codes(row); })
                            : copy_rows(side, rows);
    keys_.terms = finite ? 1 : 0;
    keys_.exact = true;
    return finite;
  }
  /// Packs decoded keys [rows, width of keys] in two terms, which are `exact` for numbers in half. Returns false if a
  /// number is not finite.
  bool load_keys(const float* keys, std::size_t rows, bool exact) {
    keys_.coded = false;
    keys_.exact = exact;
    keys_.terms = split_rows(keys, rows) ? most_terms : 0;
    return keys_.terms > 0;
  }

  /// As for keys.
  bool load_values(const RowTileSide& side, std::size_t rows) {
    values_.terms = 0;
    if (!takes(side.format, head_.values)) return false;
    values_.coded = is_quantized(side.format.encoding);
    const bool finite = values_.coded
                            ? take_codes(side, rows, head_.values, values_.codes,
                                         [&](std::size_t row) KVPOLICY_CPU_LAMBDA { pair_codes(row); })
                            : pair_rows(side, rows);
    if (!finite) return false;
    if (values_.coded) {
      for (std::size_t row = rows; row < 2 * padded_pairs(rows); ++row) pair_codes_of_nothing(row);
    }
    values_.terms = 1;
    return true;
  }
  /// Packs decoded values [rows, width of values] in `terms` terms. Returns false if a number is not finite.
  bool load_values(const float* values, std::size_t rows, std::size_t terms) {
    values_.coded = false;
    values_.terms = pair_decoded_rows(values, rows, terms) ? terms : 0;
    return values_.terms > 0;
  }

 private:
  // Stores decoded keys in two terms; returns false if a number is not finite.
  bool split_rows(const float* keys, std::size_t rows) {
    auto zeros = zero_vector();  // NaN after a number that is not finite, or becomes infinite by rounding
    for (std::size_t row = 0; row < rows; ++row) {
      const float* from = keys + row * head_.keys;
      std::uint32_t* to = keys_.pairs + row * channel_pairs(head_.keys);
      for (std::size_t pair = 0; pair < head_.keys / 2; pair += lanes) {
        FloatVector even, odd;
        load_pairs(from + 2 * pair, head_.keys - 2 * pair, even, odd);
        const PairVector first = pair_up(even, odd);
        const PairVector second = pair_up(first.rest_low, first.rest_high);
        hn::StoreU(first.pairs, words, to + pair);
        hn::StoreU(second.pairs, words, to + key_term() + pair);
        zeros = hn::MulAdd(hn::Add(first.rest_low, first.rest_high), zero_vector(), zeros);
      }
    }
    return hn::AllTrue(floats, hn::Eq(zeros, zero_vector()));
  }

  // Stores decoded values in pairs of rows, up to whole tiles, in so many terms; returns false if a
  // number is not finite.
  bool pair_decoded_rows(const float* values, std::size_t rows, std::size_t terms) {
    auto zeros = zero_vector();
    for (std::size_t pair = 0; pair < padded_pairs(rows); ++pair) {
      std::uint32_t* to = values_.pairs + pair * head_.values;
      if (2 * pair >= rows) {
        for (std::size_t term = 0; term < terms; ++term)
          std::fill_n(to + term * value_term(), head_.values, 0U);
        continue;
      }
      // As in pair_rows.
      const float* low = values + 2 * pair * head_.values;
      const float* high = values + std::min(2 * pair + 1, rows - 1) * head_.values;
      for (std::size_t channel = 0; channel < head_.values; channel += lanes) {
        const PairVector both = pair_up(hn::LoadU(floats, low + channel), hn::LoadU(floats, high + channel));
        hn::StoreU(both.pairs, words, to + channel);
        zeros = hn::MulAdd(hn::Add(both.rest_low, both.rest_high), zero_vector(), zeros);
        if (terms == 1) continue;
        hn::StoreU(pair_up(both.rest_low, both.rest_high).pairs, words, to + value_term() + channel);
      }
    }
    return hn::AllTrue(floats, hn::Eq(zeros, zero_vector()));
  }

  // Copies the row tile's keys contiguously; returns false if a number is not finite.
  bool copy_rows(const RowTileSide& side, std::size_t rows) {
    auto largest = hn::Zero(shorts);
    for (std::size_t row = 0; row < rows; ++row) {
      const auto* from = reinterpret_cast<const std::uint16_t*>(side.codes[row]);
      auto* to = reinterpret_cast<std::byte*>(keys_.pairs + row * channel_pairs(head_.keys));
      for (std::size_t channel = 0; channel < head_.keys; channel += hn::MaxLanes(shorts)) {
        const auto numbers = hn::LoadU(shorts, from + channel);
        largest = hn::Max(largest, hn::And(numbers, hn::Set(shorts, 0x7fffU)));
        std::array<std::uint16_t, hn::MaxLanes(shorts)> lines;
        hn::StoreU(numbers, shorts, lines.data());
        std::memcpy(to + channel * sizeof(std::uint16_t), lines.data(), sizeof lines);
      }
    }
    return are_finite(largest);
  }

  // Stores the row tile's values in pairs of rows, up to whole tiles; returns false if a number is not
  // finite.
  bool pair_rows(const RowTileSide& side, std::size_t rows) {
    auto largest = hn::Zero(words);
    const auto low_half = hn::Set(words, 0x7fffU);
    for (std::size_t pair = 0; pair < padded_pairs(rows); ++pair) {
      std::uint32_t* to = values_.pairs + pair * head_.values;
      if (2 * pair >= rows) {
        std::fill_n(to, head_.values, 0U);
        continue;
      }
      // An odd last row is paired with itself; the weights of the second one are zeros.
      const auto* low = reinterpret_cast<const std::uint16_t*>(side.codes[2 * pair]);
      const auto* high = reinterpret_cast<const std::uint16_t*>(side.codes[std::min(2 * pair + 1, rows - 1)]);
      for (std::size_t channel = 0; channel < head_.values; channel += lanes) {
        const auto low_bits = hn::PromoteTo(words, hn::LoadU(word_shorts, low + channel));
        const auto high_bits = hn::PromoteTo(words, hn::LoadU(word_shorts, high + channel));
        largest = hn::Max(largest, hn::Max(hn::And(low_bits, low_half), hn::And(high_bits, low_half)));
        hn::StoreU(hn::Or(low_bits, hn::ShiftLeft<16>(high_bits)), words, to + channel);
      }
    }
    return hn::AllTrue(words, hn::Lt(largest, hn::Set(words, 0x7f80U)));
  }

  // Reads the row tile's scales and zeros, and calls take(row) for each row with its codes in numbers_.
  // Codes count from the middle one, so that less cancels. Returns false if a scale or zero is not finite.
  template <class Take>
  bool take_codes(const RowTileSide& side, std::size_t rows, std::size_t channels, CodeScales& codes,
                  Take take) {
    const Encoding encoding = side.format.encoding;
    const float middle = static_cast<float>(1U << (bits_of(encoding) - 1));
    for (std::size_t row = 0; row < rows; ++row) {
      codes.scales[row] = static_cast<float>(*side.scales[row]);
      codes.zeros[row] = static_cast<float>(*side.zeros[row]) + middle * codes.scales[row];
      if (!(codes.zeros[row] - codes.zeros[row] == 0.0F)) return false;
    }
    const WholeRowParams params{hn::Set(floats, 1.0F), hn::Set(floats, -middle)};
    for (std::size_t row = 0; row < rows; ++row) {
      float* numbers = numbers_ + row % 2 * channels;
      switch (encoding) {
        case Encoding::uint8: decode_packed_row<Encoding::uint8>(side, row, params, channels, numbers); break;
        case Encoding::uint4: decode_packed_row<Encoding::uint4>(side, row, params, channels, numbers); break;
        case Encoding::uint6: decode_packed_row<Encoding::uint6>(side, row, params, channels, numbers); break;
        case Encoding::uint5: decode_packed_row<Encoding::uint5>(side, row, params, channels, numbers); break;
        case Encoding::uint3: decode_packed_row<Encoding::uint3>(side, row, params, channels, numbers); break;
        case Encoding::uint4x2:
          decode_packed_row<Encoding::uint4x2>(side, row, params, channels, numbers);
          break;
        default: decode_packed_row<Encoding::uint2>(side, row, params, channels, numbers);
      }
      take(row);
    }
    return true;
  }
  void copy_codes(std::size_t row) {
    const float* numbers = numbers_ + row % 2 * head_.keys;
    std::uint32_t* to = keys_.pairs + row * channel_pairs(head_.keys);
    for (std::size_t pair = 0; pair < head_.keys / 2; ++pair) {
      to[pair] = upper_half(numbers[2 * pair]) | upper_half(numbers[2 * pair + 1]) << 16;
    }
  }
  // Called for the first row of a pair alone, then for the second one, which completes the pair.
  void pair_codes(std::size_t row) {
    std::uint32_t* to = values_.pairs + row / 2 * head_.values;
    if (row % 2 == 0) {
      for (std::size_t channel = 0; channel < head_.values; ++channel)
        to[channel] = upper_half(numbers_[channel]);
    } else {
      const float* numbers = numbers_ + head_.values;
      for (std::size_t channel = 0; channel < head_.values; ++channel) {
        to[channel] |= upper_half(numbers[channel]) << 16;
      }
    }
  }
  void pair_codes_of_nothing(std::size_t row) {
    if (row % 2 == 0) std::fill_n(values_.pairs + row / 2 * head_.values, head_.values, 0U);
  }
  // The upper half of a float holds all of a code, because codes have at most 8 bits.
  [[nodiscard]] static std::uint32_t upper_half(float code) {
    return std::bit_cast<std::uint32_t>(code) >> 16;
  }

  // 16 lanes, which divide every width, or fewer.
  static constexpr hn::CappedTag<std::uint16_t, 16> shorts{};
  static constexpr hn::Rebind<std::uint16_t, Words> word_shorts{};

  [[nodiscard]] static bool are_finite(hn::Vec<hn::CappedTag<std::uint16_t, 16>> largest) {
    return hn::AllTrue(shorts, hn::Lt(largest, hn::Set(shorts, 0x7f80U)));
  }

  HeadWidth head_;
  PairSide keys_;
  PairSide values_;
  float* numbers_;  // [2, wider side]: codes of two rows
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
