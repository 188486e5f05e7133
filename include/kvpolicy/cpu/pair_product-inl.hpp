// SPDX-License-Identifier: Apache-2.0
//
// A tile's products in the processor's units for bfloat16. Queries, rows and weights are packed in pairs
// along the dimension that is summed. Rows stored in bfloat16 are used as they are. Of quantised rows with
// one scale each, the codes are used, which bfloat16 represents exactly: scales and zeros are applied after
// the product with the keys and before the product with the values. Other quantised rows are decoded to float
// first: keys are then split into two terms, and values as weights are. Numbers that are not finite are left to
// the products in float, because here they would meet padding of zeros.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include <kvpolicy/cpu/bfloat16_pairs-inl.hpp>
#include <kvpolicy/cpu/decode_rows-inl.hpp>
#include <kvpolicy/cpu/matrix_unit.hpp>
#include <kvpolicy/cpu/product-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>
#include <kvpolicy/cpu/x86/tile_product.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// The products of one tile. `Tiles` are the tile registers or a replacement.
template <class Tiles>
class PairProducts {
 public:
  /// Words of scratch memory for `width` queries; `width` is a multiple of 16.
  [[nodiscard]] static std::size_t scratch_words(std::size_t width, const HeadWidth& head) {
    return most_terms * (paneled(width) + max_tile_rows) * channel_pairs(head.keys) +
           most_terms * row_pairs * (head.values + width);
  }

  /// Floats of scratch memory for `width` queries.
  [[nodiscard]] static std::size_t scratch_floats(std::size_t width, const HeadWidth& head) {
    return 2 * width + 2 * head.widest();
  }

  /// `scratch` may be null if the plan is not narrow.
  PairProducts(const ProductPlan& plan, std::size_t width, const HeadWidth& head, std::uint32_t* scratch,
               float* floats_scratch)
      : plan_{plan},
        width_{width},
        head_{head},
        query_sums_{floats_scratch},
        shifts_{query_sums_ + width},
        numbers_{shifts_ + width} {
    if (!plan.is_narrow()) return;
    queries_ = scratch;
    keys_ = queries_ + most_terms * query_term();
    values_ = keys_ + most_terms * key_term();
    weights_ = values_ + most_terms * value_term();
    // Channels that pad the last tile's pairs are never written again.
    std::fill_n(keys_, most_terms * key_term(), 0U);
    if (plan.unit == MatrixUnit::tiles) tiles_.emplace();
  }

  /// Sets the queries [rows, width of keys] for the row tiles that follow. `rotated`: whether a segment
  /// rotates them.
  void set_queries(const float* queries, std::size_t rows, bool rotated) {
    query_terms_ = rotated ? plan_.rotated_terms : plan_.query_terms;
    has_queries_ = plan_.pays(query_terms_);
    if (!has_queries_) return;
    std::fill_n(queries_, query_terms_ * query_term(), 0U);
    std::fill_n(query_sums_, width_, 0.0F);
    auto zeros = zero_vector();  // NaN after a number that is not finite, or becomes infinite by rounding
    for (std::size_t m = 0; m < rows; m += 4) {
      FloatVector sums[4] = {zero_vector(), zero_vector(), zero_vector(), zero_vector()};
      std::uint32_t* column = queries_ + m / columns * columns * channel_pairs(head_.keys) + m % columns;
      for (std::size_t pair = 0; pair < head_.keys / 2; pair += lanes) {
        FloatVector low[4], high[4];
        for (std::size_t i = 0; i < 4; ++i) {
          load_query(queries, rows, m + i, 2 * pair, low[i], high[i]);
          sums[i] = hn::Add(sums[i], hn::Add(low[i], high[i]));
        }
        for (std::size_t term = 0; term < query_terms_; ++term) {
          WordVector packed[4];
          for (std::size_t i = 0; i < 4; ++i) {
            const PairVector both = pair_up(low[i], high[i]);
            packed[i] = both.pairs;
            low[i] = both.rest_low;
            high[i] = both.rest_high;
            zeros = hn::MulAdd(hn::Add(low[i], high[i]), zero_vector(), zeros);
          }
          store_as_columns(packed, column + term * query_term() + pair * columns, columns);
        }
      }
      store_sums(sums[0], sums[1], sums[2], sums[3], query_sums_ + m);
    }
    has_queries_ = hn::AllTrue(floats, hn::Eq(zeros, zero_vector()));
  }

  /// logits[row, m] = scale * (row . query m), as [rows, width]; rows are written up to the next multiple
  /// of 16. Returns false and does nothing if the product must be computed in float.
  bool compute_logits(const RowTileSide& keys, std::size_t rows, float scale, float* logits,
                      FetchAhead& ahead) {
    if (!has_queries_ || !takes(keys.format, head_.keys)) return false;
    const bool quantized = is_quantized(keys.format.encoding);
    if (quantized ? !take_codes(keys, rows, head_.keys,
                                [&](std::size_t row) KVPOLICY_CPU_LAMBDA { copy_codes(row); })
                  : !copy_rows(keys, rows)) {
      return false;
    }
    multiply_keys(query_terms_, 1, {logits, width_, false, quantized ? 1.0F : scale}, rows, ahead);
    for (std::size_t row = 0; quantized && row < rows; ++row) {
      const auto row_scale = hn::Set(floats, scale * scales_[row]);
      const auto row_zero = hn::Set(floats, scale * zeros_[row]);
      for (std::size_t m = 0; m < width_; m += lanes) {
        float* to = logits + row * width_ + m;
        const auto shift = hn::Mul(row_zero, hn::LoadU(floats, query_sums_ + m));
        hn::StoreU(hn::MulAdd(row_scale, hn::LoadU(floats, to), shift), floats, to);
      }
    }
    return true;
  }

  /// The same for keys that were decoded to float, [rows, width of keys].
  bool compute_logits(const float* keys, std::size_t rows, float scale, float* logits, FetchAhead& ahead) {
    if (!has_queries_ || !tiles_ || !split_rows(keys, rows)) return false;
    multiply_keys(query_terms_, most_terms, {logits, width_, false, scale}, rows, ahead);
    return true;
  }

  /// values[m] = factors[m] * values[m] + sum over rows of weights[row, m] * row, for `queries` queries,
  /// rounded up to 16. Returns false and does nothing if the product must be computed in float.
  bool add_values(const RowTileSide& values, std::size_t rows, const float* weights, const float* factors,
                  float* out, std::size_t queries, FetchAhead& ahead) {
    if (!plan_.is_narrow() || !takes(values.format, head_.values)) return false;
    const bool quantized = is_quantized(values.format.encoding);
    if (quantized ? !take_codes(values, rows, head_.values,
                                [&](std::size_t row) KVPOLICY_CPU_LAMBDA { pair_codes(row); })
                  : !pair_rows(values, rows)) {
      return false;
    }
    if (quantized) {
      for (std::size_t row = rows; row < 2 * padded_pairs(rows); ++row) pair_codes_of_nothing(row);
      pair_weights(weights, rows,
                   [&](std::size_t row) KVPOLICY_CPU_LAMBDA { return hn::Set(floats, scales_[row]); });
      sum_shifts(weights, rows);
    } else {
      pair_weights(weights, rows, [](std::size_t) KVPOLICY_CPU_LAMBDA { return hn::Set(floats, 1.0F); });
    }
    scale_values(factors, quantized ? shifts_ : nullptr, out, queries);
    multiply_values(1, rows, out, queries, ahead);
    return true;
  }

  /// The same for values that were decoded to float, [rows, width of values]. They are split into as many terms as
  /// weights are: rounded where those are.
  bool add_values(const float* values, std::size_t rows, const float* weights, const float* factors,
                  float* out, std::size_t queries, FetchAhead& ahead) {
    if (!plan_.is_narrow() || !pair_decoded_rows(values, rows)) return false;
    pair_weights(weights, rows, [](std::size_t) KVPOLICY_CPU_LAMBDA { return hn::Set(floats, 1.0F); });
    scale_values(factors, nullptr, out, queries);
    multiply_values(plan_.weight_terms, rows, out, queries, ahead);
    return true;
  }

 private:
  static constexpr std::size_t most_terms = 2;
  static constexpr std::size_t row_pairs = max_tile_rows / 2;
  static constexpr std::size_t columns = 2 * x86::tile_size;  // of a panel of queries
  static_assert(max_tile_rows % (2 * x86::tile_size) == 0);

  static std::size_t paneled(std::size_t width) { return (width + columns - 1) / columns * columns; }
  // Pairs of channels of a row, rounded up to whole tiles.
  static std::size_t channel_pairs(std::size_t head_dim) {
    return (head_dim / 2 + x86::tile_size - 1) / x86::tile_size * x86::tile_size;
  }
  static std::size_t padded_pairs(std::size_t rows) {
    return (rows + 2 * x86::tile_size - 1) / (2 * x86::tile_size) * x86::tile_size;
  }
  [[nodiscard]] std::size_t key_term() const { return max_tile_rows * channel_pairs(head_.keys); }
  [[nodiscard]] std::size_t value_term() const { return row_pairs * head_.values; }
  [[nodiscard]] std::size_t query_term() const { return paneled(width_) * channel_pairs(head_.keys); }

  // The even and the odd ones of 2 * lanes channels of query m, with zeros after the last channel and query.
  void load_query(const float* queries, std::size_t rows, std::size_t m, std::size_t channel,
                  FloatVector& even, FloatVector& odd) const {
    load_pairs(queries + std::min(m, rows - 1) * head_.keys + channel, m < rows ? head_.keys - channel : 0,
               even, odd);
  }
  // The even and the odd ones of the next 2 * lanes numbers, of which there are `left`; zeros come after them.
  static HWY_INLINE void load_pairs(const float* numbers, std::size_t left, FloatVector& even,
                                    FloatVector& odd) {
    HWY_ALIGN float padded[2 * lanes];
    if (left < 2 * lanes) {
      std::fill(std::copy_n(numbers, left, padded), padded + 2 * lanes, 0.0F);
      numbers = padded;
    }
    hn::LoadInterleaved2(floats, numbers, even, odd);
  }

  void multiply(x86::PairMatrices matrices, std::size_t b_panel, x86::ProductTarget target, std::size_t rows,
                std::size_t width, FetchAhead& ahead) {
    const std::size_t unit = tiles_ ? x86::tile_size : x86::BFloat16Vectors::rows;
    const std::size_t block = tiles_ ? 2 * unit : unit;
    const std::size_t panels = (width + columns - 1) / columns;
    ahead.start((rows + block - 1) / block * panels, matrices.terms.count * matrices.pairs);
    for (std::size_t x = 0; x < width; x += columns) {
      const std::size_t count = std::min(columns, width - x);
      if (tiles_) {
        x86::tile_product(*tiles_, matrices, target, (rows + unit - 1) / unit * unit, count, ahead);
      } else {
        x86::BFloat16Vectors::product(matrices, target, rows, count, ahead);
      }
      matrices.b += b_panel;
      target.c += columns;
    }
  }

  // The product of keys_ with the queries.
  void multiply_keys(std::size_t query_terms, std::size_t key_terms, const x86::ProductTarget& target,
                     std::size_t rows, FetchAhead& ahead) {
    const x86::PairMatrices matrices{.a = keys_,
                                     .a_row = channel_pairs(head_.keys),
                                     .a_step = 1,
                                     .b = queries_,
                                     .b_row = columns,
                                     .pairs = channel_pairs(head_.keys),
                                     .terms = {key_terms, key_term(), query_terms, query_term()}};
    multiply(matrices, columns * channel_pairs(head_.keys), target, rows, width_, ahead);
  }

  // Adds the product of weights_ with values_ to `out`.
  void multiply_values(std::size_t value_terms, std::size_t rows, float* out, std::size_t queries,
                       FetchAhead& ahead) {
    const bool tiles = plan_.unit == MatrixUnit::tiles;
    const x86::PairMatrices matrices{
        .a = weights_,
        .a_row = tiles ? row_pairs : 1,
        .a_step = tiles ? 1 : width_,
        .b = values_,
        .b_row = head_.values,
        .pairs = padded_pairs(rows),
        .terms = {plan_.weight_terms, row_pairs * width_, value_terms, value_term()}};
    multiply(matrices, columns, {out, head_.values, true, 1.0F}, queries, head_.values, ahead);
  }

  // out[m] = factors[m] * out[m] + shifts[m] in every channel; null: no shifts.
  void scale_values(const float* factors, const float* shifts, float* out, std::size_t queries) const {
    for (std::size_t m = 0; m < queries; ++m) {
      // Most factors are 1: the largest logit comes early.
      if (factors[m] == 1.0F && shifts == nullptr) continue;
      const auto factor = hn::Set(floats, factors[m]);
      const auto shift = hn::Set(floats, shifts != nullptr ? shifts[m] : 0.0F);
      for (std::size_t channel = 0; channel < head_.values; channel += lanes) {
        float* numbers = out + m * head_.values + channel;
        hn::StoreU(hn::MulAdd(hn::LoadU(floats, numbers), factor, shift), floats, numbers);
      }
    }
  }

  // Stores decoded keys in two terms; returns false if a number is not finite.
  bool split_rows(const float* keys, std::size_t rows) {
    auto zeros = zero_vector();  // NaN after a number that is not finite, or becomes infinite by rounding
    for (std::size_t row = 0; row < rows; ++row) {
      const float* from = keys + row * head_.keys;
      std::uint32_t* to = keys_ + row * channel_pairs(head_.keys);
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

  // Stores decoded values in pairs of rows, up to whole tiles, in as many terms as weights have; returns false if a
  // number is not finite.
  bool pair_decoded_rows(const float* values, std::size_t rows) {
    const std::size_t terms = plan_.weight_terms;
    auto zeros = zero_vector();
    for (std::size_t pair = 0; pair < padded_pairs(rows); ++pair) {
      std::uint32_t* to = values_ + pair * head_.values;
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
      auto* to = reinterpret_cast<std::byte*>(keys_ + row * channel_pairs(head_.keys));
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
      std::uint32_t* to = values_ + pair * head_.values;
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

  [[nodiscard]] static bool takes(const RowFormat& format, std::size_t channels) {
    if (format.encoding == Encoding::bfloat16) return true;
    return is_quantized(format.encoding) && format.codebook == Codebook::even &&
           format.granularity == Granularity::per_token && format.group == channels &&
           channels * code_parts(format.encoding).upper / 8 >= lanes;
  }

  // Reads the row tile's scales and zeros, and calls take(row) for each row with its codes in numbers_.
  // Codes count from the middle one, so that less cancels. Returns false if a scale or zero is not finite.
  template <class Take>
  bool take_codes(const RowTileSide& side, std::size_t rows, std::size_t channels, Take take) {
    const Encoding encoding = side.format.encoding;
    const float middle = static_cast<float>(1U << (bits_of(encoding) - 1));
    for (std::size_t row = 0; row < rows; ++row) {
      scales_[row] = static_cast<float>(*side.scales[row]);
      zeros_[row] = static_cast<float>(*side.zeros[row]) + middle * scales_[row];
      if (!(zeros_[row] - zeros_[row] == 0.0F)) return false;
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
    std::uint32_t* to = keys_ + row * channel_pairs(head_.keys);
    for (std::size_t pair = 0; pair < head_.keys / 2; ++pair) {
      to[pair] = upper_half(numbers[2 * pair]) | upper_half(numbers[2 * pair + 1]) << 16;
    }
  }
  // Called for the first row of a pair alone, then for the second one, which completes the pair.
  void pair_codes(std::size_t row) {
    std::uint32_t* to = values_ + row / 2 * head_.values;
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
    if (row % 2 == 0) std::fill_n(values_ + row / 2 * head_.values, head_.values, 0U);
  }
  // The upper half of a float holds all of a code, because codes have at most 8 bits.
  [[nodiscard]] static std::uint32_t upper_half(float code) {
    return std::bit_cast<std::uint32_t>(code) >> 16;
  }

  // Sums the part of each query's values that the rows' zeros contribute.
  void sum_shifts(const float* weights, std::size_t rows) {
    for (std::size_t m = 0; m < width_; m += lanes) {
      auto sum = zero_vector();
      for (std::size_t row = 0; row < rows; ++row) {
        sum = hn::MulAdd(hn::LoadU(floats, weights + row * width_ + m), hn::Set(floats, zeros_[row]), sum);
      }
      hn::StoreU(sum, floats, shifts_ + m);
    }
  }

  // Stores the weights times row_factor(row) in pairs of rows, with zeros after the last row: [pairs,
  // width] for vectors, [width, pairs] for tiles.
  template <class RowFactor>
  void pair_weights(const float* weights, std::size_t rows, RowFactor row_factor) {
    const auto weights_of = [&](std::size_t row, std::size_t m) KVPOLICY_CPU_INLINE_LAMBDA {
      return row < rows ? hn::Mul(hn::LoadU(floats, weights + row * width_ + m), row_factor(row))
                        : zero_vector();
    };
    const std::size_t pairs = padded_pairs(rows);
    for (std::size_t m = 0; m < width_; m += lanes) {
      for (std::size_t first = 0; first < pairs; first += 4) {
        WordVector packed[most_terms][4];
        for (std::size_t i = 0; i < 4; ++i) {
          const std::size_t row = 2 * (first + i);
          auto low = weights_of(row, m);
          auto high = weights_of(row + 1, m);
          for (std::size_t term = 0; term < plan_.weight_terms; ++term) {
            const PairVector pair = pair_up(low, high);
            packed[term][i] = pair.pairs;
            low = pair.rest_low;
            high = pair.rest_high;
          }
        }
        for (std::size_t term = 0; term < plan_.weight_terms; ++term) {
          std::uint32_t* to = weights_ + term * row_pairs * width_;
          if (tiles_) {
            store_as_columns(packed[term], to + m * row_pairs + first, row_pairs);
          } else {
            for (std::size_t i = 0; i < 4; ++i) {
              hn::StoreU(packed[term][i], words, to + (first + i) * width_ + m);
            }
          }
        }
      }
    }
  }

  // 16 lanes, which divide every width, or fewer.
  static constexpr hn::CappedTag<std::uint16_t, 16> shorts{};
  static constexpr hn::Rebind<std::uint16_t, Words> word_shorts{};

  [[nodiscard]] static bool are_finite(hn::Vec<hn::CappedTag<std::uint16_t, 16>> largest) {
    return hn::AllTrue(shorts, hn::Lt(largest, hn::Set(shorts, 0x7f80U)));
  }

  ProductPlan plan_;
  std::size_t width_;
  HeadWidth head_;
  std::size_t query_terms_ = 1;
  bool has_queries_ = false;
  std::uint32_t* queries_ = nullptr;         // [terms] of panels of [channel pairs, columns]
  std::uint32_t* keys_ = nullptr;            // [terms] of [max_tile_rows, channel pairs]
  std::uint32_t* values_ = nullptr;          // [terms] of [row_pairs, width of values]
  std::uint32_t* weights_ = nullptr;         // [terms] of [row_pairs, width] or [width, row_pairs]
  float* query_sums_;                        // [width]
  float* shifts_;                            // [width]
  float* numbers_;                           // [2, wider side]
  std::array<float, max_tile_rows> scales_;  // of the current rows; zeros_ are
  std::array<float, max_tile_rows> zeros_;   // the values of the middle code
  std::optional<Tiles> tiles_;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
