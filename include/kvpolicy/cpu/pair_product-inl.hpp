// SPDX-License-Identifier: Apache-2.0
//
// A tile's products in the processor's units for bfloat16, for some of its queries at a time. Queries and weights are
// packed in pairs along the dimension that is summed, rows as pair_rows-inl.hpp has them. Scales and zeros of codes are
// applied after the product with the keys and before the product with the values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include <kvpolicy/cpu/bfloat16_pairs-inl.hpp>
#include <kvpolicy/cpu/matrix_unit.hpp>
#include <kvpolicy/cpu/pair_rows-inl.hpp>
#include <kvpolicy/cpu/product-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>
#include <kvpolicy/cpu/x86/tile_product.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Logits of neighbouring queries of a tile with the rows of a row tile, or what a softmax makes of them. They are
/// those numbers times `scale`.
struct LogitStrip {
  std::size_t first;   ///< query of the tile
  std::size_t width;   ///< queries: whole vectors
  float* numbers;      ///< [rows, width]
  std::size_t stride;  ///< floats from one row to the next
  float scale = 1.0F;

  [[nodiscard]] HWY_INLINE float* at(std::size_t row, std::size_t m) const {
    return numbers + row * stride + m;
  }
};

/// The products of one tile. `Tiles` are the tile registers or a replacement.
template <class Tiles>
class PairProducts {
 public:
  /// Queries that are multiplied at a time: what a strip takes of keys, queries and logits fits into first-level cache.
  static constexpr std::size_t strip = 4 * x86::tile_size;

  /// Words of scratch memory for `width` queries; `width` is a multiple of 16.
  [[nodiscard]] static std::size_t scratch_words(std::size_t width, const HeadWidth& head) {
    return PairRows::scratch_words(head) +
           most_terms * (paneled(width) * PairRows::channel_pairs(head.keys) + weight_term());
  }

  /// Floats of scratch memory for `width` queries.
  [[nodiscard]] static std::size_t scratch_floats(std::size_t width, const HeadWidth& head) {
    return width + strip + PairRows::scratch_floats(head);
  }

  /// `scratch` may be null if the plan is not narrow.
  PairProducts(const ProductPlan& plan, std::size_t width, const HeadWidth& head, std::uint32_t* scratch,
               float* floats_scratch)
      : plan_{plan}, width_{width}, head_{head}, query_sums_{floats_scratch}, shifts_{query_sums_ + width} {
    if (!plan.is_narrow()) return;
    queries_ = scratch;
    weights_ = queries_ + most_terms * query_term();
    rows_.emplace(head, weights_ + most_terms * weight_term(), shifts_ + strip);
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
      std::uint32_t* column = queries_ + m / columns * panel() + m % columns;
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

  /// Whether it pays to rotate decoded keys back, once for all queries: these then stay exact in one term, which saves
  /// one product of three.
  [[nodiscard]] bool turns_back(const RowFormat& keys) const {
    return tiles_ && plan_.query_terms < plan_.rotated_terms && !PairRows::takes(keys, head_.keys);
  }

  /// Packs the keys of a row tile for the strips that follow, as they are stored or as `decode` returns them in float,
  /// [rows, width of keys]. Returns false if the product must be computed in float.
  template <class Decode>
  bool load_keys(const RowTileSide& keys, std::size_t rows, Decode decode) {
    if (!has_queries_) return false;
    if (rows_->load_keys(keys, rows)) return true;
    return tiles_ && fits_terms(keys.format.encoding) &&
           rows_->load_keys(decode(), rows, keys.format.encoding == Encoding::float16);
  }
  /// The same for values, which are split into as many terms as weights are: rounded where those are.
  template <class Decode>
  bool load_values(const RowTileSide& values, std::size_t rows, Decode decode) {
    if (!plan_.is_narrow()) return false;
    if (rows_->load_values(values, rows)) return true;
    const std::size_t terms = values.format.encoding == Encoding::float16 ? most_terms : plan_.weight_terms;
    return (tiles_ || terms == 1) && fits_terms(values.format.encoding) &&
           rows_->load_values(decode(), rows, terms);
  }

  /// Fills a strip: row . query. Rows are written up to the next multiple of 16. It multiplies the strip's scale into
  /// the logits where that costs nothing.
  void compute_logits(std::size_t rows, LogitStrip& logits, FetchAhead& ahead) {
    const PairSide& keys = rows_->keys();
    const std::size_t pairs = PairRows::channel_pairs(head_.keys);
    x86::PairMatrices matrices{
        .a = keys.pairs,
        .a_row = pairs,
        .a_step = 1,
        .b = queries_ + logits.first / columns * panel(),
        .b_row = columns,
        .pairs = pairs,
        .terms = {keys.terms, rows_->key_term(), query_terms_, query_term(), keys.exact}};
    for (std::size_t m = 0; m < logits.width; m += columns, matrices.b += panel()) {
      multiply(matrices, {logits.at(0, m), logits.stride, false}, rows, std::min(columns, logits.width - m),
               ahead);
    }
    if (!keys.coded) return;
    for (std::size_t row = 0; row < rows; ++row) {
      const auto row_scale = hn::Set(floats, logits.scale * keys.codes.scales[row]);
      const auto row_zero = hn::Set(floats, logits.scale * keys.codes.zeros[row]);
      for (std::size_t m = 0; m < logits.width; m += lanes) {
        float* to = logits.at(row, m);
        const auto shift = hn::Mul(row_zero, hn::LoadU(floats, query_sums_ + logits.first + m));
        hn::StoreU(hn::MulAdd(row_scale, hn::LoadU(floats, to), shift), floats, to);
      }
    }
    logits.scale = 1.0F;
  }

  /// values[m] = factors[m] * values[m] + sum over rows of weights[row, m] * row, for the strip's queries; both arrays
  /// begin with the tile's first query.
  void add_values(std::size_t rows, const LogitStrip& weights, const float* factors, float* out,
                  FetchAhead& ahead) {
    const PairSide& values = rows_->values();
    if (values.coded) {
      pair_weights(weights, rows, [&](std::size_t row) KVPOLICY_CPU_LAMBDA {
        return hn::Set(floats, values.codes.scales[row]);
      });
      sum_shifts(weights, rows, values.codes.zeros.data());
    } else {
      pair_weights(weights, rows, [](std::size_t) KVPOLICY_CPU_LAMBDA { return hn::Set(floats, 1.0F); });
    }
    out += weights.first * head_.values;
    scale_values(factors + weights.first, values.coded ? shifts_ : nullptr, out, weights.width);
    x86::PairMatrices matrices{
        .a = weights_,
        .a_row = tiles_ ? PairRows::row_pairs : 1,
        .a_step = tiles_ ? 1 : strip,
        .b = values.pairs,
        .b_row = head_.values,
        .pairs = PairRows::padded_pairs(rows),
        .terms = {plan_.weight_terms, weight_term(), values.terms, rows_->value_term(), false}};
    for (std::size_t channel = 0; channel < head_.values; channel += columns, matrices.b += columns) {
      multiply(matrices, {out + channel, head_.values, true}, weights.width,
               std::min(columns, head_.values - channel), ahead);
    }
  }

  /// Prepares to fetch rows while keys, or values, are multiplied with all strips.
  void start_with_keys(FetchAhead& ahead, std::size_t rows) const {
    ahead.start(blocks(rows) * panels(width_), query_terms_ * PairRows::channel_pairs(head_.keys));
  }
  void start_with_values(FetchAhead& ahead, std::size_t rows) const {
    ahead.start(blocks(width_) * panels(head_.values), plan_.weight_terms * PairRows::padded_pairs(rows));
  }

 private:
  static constexpr std::size_t most_terms = PairRows::most_terms;
  static_assert(max_tile_rows % (2 * x86::tile_size) == 0);

  static constexpr std::size_t columns = 2 * x86::tile_size;  // of a panel
  static_assert(strip % columns == 0);

  static std::size_t panels(std::size_t width) { return (width + columns - 1) / columns; }
  static std::size_t paneled(std::size_t width) { return panels(width) * columns; }
  [[nodiscard]] static constexpr std::size_t weight_term() { return PairRows::row_pairs * strip; }
  [[nodiscard]] std::size_t panel() const { return columns * PairRows::channel_pairs(head_.keys); }
  [[nodiscard]] std::size_t query_term() const {
    return paneled(width_) * PairRows::channel_pairs(head_.keys);
  }
  // Register blocks of a product with so many rows.
  [[nodiscard]] std::size_t blocks(std::size_t rows) const {
    const std::size_t block = tiles_ ? 2 * x86::tile_size : x86::BFloat16Vectors::rows;
    return (rows + block - 1) / block;
  }

  // Whether decoded rows are as exact in two terms of bfloat16. Rows in float are not, and those in bfloat16 were not
  // finite.
  [[nodiscard]] static bool fits_terms(Encoding encoding) {
    return is_quantized(encoding) || encoding == Encoding::float16;
  }

  // The even and the odd ones of 2 * lanes channels of query m, with zeros after the last channel and query.
  void load_query(const float* queries, std::size_t rows, std::size_t m, std::size_t channel,
                  FloatVector& even, FloatVector& odd) const {
    load_pairs(queries + std::min(m, rows - 1) * head_.keys + channel, m < rows ? head_.keys - channel : 0,
               even, odd);
  }

  // For up to a panel's columns.
  void multiply(const x86::PairMatrices& matrices, const x86::ProductTarget& target, std::size_t rows,
                std::size_t width, FetchAhead& ahead) {
    if (tiles_) {
      const std::size_t whole = (rows + x86::tile_size - 1) / x86::tile_size * x86::tile_size;
      x86::tile_product(*tiles_, matrices, target, whole, width, ahead);
    } else {
      x86::BFloat16Vectors::product(matrices, target, rows, width, ahead);
    }
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

  // Sums the part of each query's values that the rows' zeros contribute.
  void sum_shifts(const LogitStrip& weights, std::size_t rows, const float* zeros) {
    for (std::size_t m = 0; m < weights.width; m += lanes) {
      auto sum = zero_vector();
      for (std::size_t row = 0; row < rows; ++row) {
        sum = hn::MulAdd(hn::LoadU(floats, weights.at(row, m)), hn::Set(floats, zeros[row]), sum);
      }
      hn::StoreU(sum, floats, shifts_ + m);
    }
  }

  // Stores the weights times row_factor(row) in pairs of rows, with zeros after the last row: [pairs,
  // strip] for vectors, [strip, pairs] for tiles.
  template <class RowFactor>
  void pair_weights(const LogitStrip& weights, std::size_t rows, RowFactor row_factor) {
    const auto weights_of = [&](std::size_t row, std::size_t m) KVPOLICY_CPU_INLINE_LAMBDA {
      return row < rows ? hn::Mul(hn::LoadU(floats, weights.at(row, m)), row_factor(row)) : zero_vector();
    };
    const std::size_t pairs = PairRows::padded_pairs(rows);
    for (std::size_t m = 0; m < weights.width; m += lanes) {
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
          std::uint32_t* to = weights_ + term * weight_term();
          if (tiles_) {
            store_as_columns(packed[term], to + m * PairRows::row_pairs + first, PairRows::row_pairs);
          } else {
            for (std::size_t i = 0; i < 4; ++i) {
              hn::StoreU(packed[term][i], words, to + (first + i) * strip + m);
            }
          }
        }
      }
    }
  }

  ProductPlan plan_;
  std::size_t width_;
  HeadWidth head_;
  std::size_t query_terms_ = 1;
  bool has_queries_ = false;
  std::uint32_t* queries_ = nullptr;  // [terms] of panels of [channel pairs, columns]
  std::uint32_t* weights_ = nullptr;  // [terms] of [row_pairs, strip] or [strip, row_pairs]
  float* query_sums_;                 // [width]
  float* shifts_;                     // [strip]
  std::optional<PairRows> rows_;
  std::optional<Tiles> tiles_;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
