// SPDX-License-Identifier: Apache-2.0
//
// Attention of many queries, as in prefill. It is bound by arithmetic. The keys and values of a row tile
// are converted to float once for all queries; then both products are register-blocked matrix products.
// Rows stored in bfloat16, and quantised ones, may be multiplied by a unit of the processor for such numbers
// (matrix_unit.hpp). Logits are kept as [row, query]: the lanes are queries, which are
// transposed once per tile, so neither the products nor the softmax sum across lanes.
//
// Where such a unit computes both products, a strip of queries goes through all of them before the next one, as in
// FlashAttention (arXiv:2205.14135), so that its logits never leave first-level cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvpolicy/cpu/decode_rows-inl.hpp>
#include <kvpolicy/cpu/hadamard-inl.hpp>
#include <kvpolicy/cpu/matrix_unit.hpp>
#include <kvpolicy/cpu/pair_product-inl.hpp>
#include <kvpolicy/cpu/partial-inl.hpp>
#include <kvpolicy/cpu/product-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/stream-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// The number of a tile's queries, padded to whole vectors and whole register blocks of every product.
[[nodiscard]] constexpr std::size_t padded_queries(std::size_t queries) {
  constexpr std::size_t unit = std::max({lanes, product_rows, x86::tile_size});
  return (queries + unit - 1) / unit * unit;
}

/// Attention of one tile of queries over a sequence of row tiles. `Tiles` are the processor's tile
/// registers, or a replacement in a test.
template <class Tiles = x86::AmxTiles>
class TilePass {
  using Pairs = PairProducts<Tiles>;

 public:
  [[nodiscard]] static std::size_t scratch_floats(std::size_t queries, const HeadWidth& width) {
    return paneled(queries) * width.keys + padded_queries(queries) * (max_tile_rows + 1) +
           (max_tile_rows + 2) * width.widest() + Pairs::scratch_floats(padded_queries(queries), width);
  }
  /// Words of scratch memory; a plan in float needs none.
  [[nodiscard]] static std::size_t scratch_words(const ProductPlan& plan, std::size_t queries,
                                                 const HeadWidth& width) {
    if (!plan.is_narrow()) return 0;
    return Pairs::scratch_words(padded_queries(queries), width);
  }

  TilePass(const QueryTile& tile, const Partial& partial, const ProductPlan& plan, float* scratch,
           std::uint32_t* word_scratch)
      : tile_{tile},
        partial_{partial},
        head_{tile.width()},
        width_{padded_queries(tile.rows)},
        queries_{scratch},
        logits_{queries_ + paneled(tile.rows) * head_.keys},
        rows_{logits_ + width_ * max_tile_rows},
        params_{rows_ + max_tile_rows * head_.widest()},
        factors_{params_ + 2 * head_.widest()},
        pairs_{plan, width_, head_, word_scratch, factors_ + width_} {}

  [[nodiscard]] std::size_t width() const { return width_; }

  /// Whether rotated keys of this format are rotated back (core/hadamard.hpp), so that the queries need not be.
  [[nodiscard]] bool turns_back(const RowFormat& keys) const {
    return keys.hadamard && has_whole_keys() && pairs_.turns_back(keys);
  }

  /// Sets the queries [tile.rows, width of keys] for the row tiles that follow. They are not scaled yet and
  /// must stay in memory. `rotated`: whether a segment rotates them in any way; `hadamard`: as rotated keys are.
  void set_queries(const float* queries, bool rotated, bool hadamard) {
    given_queries_ = queries;
    queries_are_turned_ = hadamard;
    has_float_queries_ = false;
    pairs_.set_queries(queries, tile_.rows, rotated);
  }

  /// Adds a row tile; `next` is the one after it, which is prefetched and may have no rows.
  void add(const RowTile& row_tile, const RowTile& next) {
    rotate_values(row_tile.values.format.hadamard);
    const bool keys = load_keys(row_tile, {row_tile.values, row_tile.rows, tile_.value_dim});
    const bool values = has_whole_values() && pairs_.load_values(row_tile.values, row_tile.rows,
                                                                 [&] { return decoded_values(row_tile); });
    FetchAhead fetch_values{next.values, next.rows, tile_.value_dim};
    FetchAhead fetch_keys{next.keys, next.rows, tile_.key_dim()};
    if (keys) pairs_.start_with_keys(fetch_values, row_tile.rows);
    if (values) pairs_.start_with_values(fetch_keys, row_tile.rows);
    for_each_strip(keys && values, [&](LogitStrip strip) {
      finish_logits(row_tile, keys, strip, fetch_values);
      update_softmax(row_tile.rows, strip);
      if (values) pairs_.add_values(row_tile.rows, strip, factors_, partial_.values, fetch_keys);
    });
    if (!values) add_float_values(row_tile, fetch_keys);
  }
  /// Must be called after the last row tile that was added.
  void finish() { rotate_values(false); }

  /// Updates only the softmax's state, for sums of exponentials without values.
  void add_keys(const RowTile& row_tile, const RowTile& next) {
    compute_logits(row_tile, next, [&](const LogitStrip& strip) { update_softmax(row_tile.rows, strip); });
  }

  /// exp(logit - log_sum_exp[query]): [block.rows, width()]; 0 for a logit of -infinity.
  const float* compute_probabilities(const RowTile& row_tile, const RowTile& next, const float* log_sum_exp) {
    compute_logits(row_tile, next, [&](const LogitStrip& strip) {
      for (std::size_t row = 0; row < row_tile.rows; ++row) {
        make_probabilities(strip, strip.at(row, 0), log_sum_exp + strip.first);
      }
    });
    return logits_;
  }

 private:
  // Queries rounded up to whole panels of the product.
  [[nodiscard]] static constexpr std::size_t paneled(std::size_t queries) {
    return (padded_queries(queries) + panel_width - 1) / panel_width * panel_width;
  }

  void set_float_queries() {
    if (has_float_queries_) return;
    has_float_queries_ = true;
    for (std::size_t first = 0; first < width_; first += panel_width) {
      float* panel = queries_ + first * head_.keys;
      const std::size_t end = std::clamp(tile_.rows, first, first + panel_width);
      for (std::size_t channel = 0; channel < head_.keys; ++channel) {
        float* numbers = panel + channel * panel_width;
        for (std::size_t m = first; m < end; ++m) {
          *numbers++ = tile_.scale * given_queries_[m * head_.keys + channel];
        }
        std::fill(numbers, panel + (channel + 1) * panel_width, 0.0F);
      }
    }
  }

  [[nodiscard]] bool has_whole_keys() const { return head_.keys == tile_.key_dim(); }
  [[nodiscard]] bool has_whole_values() const { return head_.values == tile_.value_dim; }
  [[nodiscard]] const float* decoded_keys(const RowTile& row_tile) {
    decode_side(row_tile.keys, row_tile.rows, tile_.key_dim(), params_, rows_);
    if (row_tile.keys.format.hadamard && !queries_are_turned_) {
      rotate_rows(rows_, row_tile.rows, head_.keys, tile_.key_dim());
    }
    return rows_;
  }
  [[nodiscard]] const float* decoded_values(const RowTile& row_tile) {
    decode_side(row_tile.values, row_tile.rows, tile_.value_dim, params_, rows_);
    return rows_;
  }

  // Prepares the row tile's keys for finish_logits. Returns false if it has computed all logits, in float.
  bool load_keys(const RowTile& row_tile, FetchAhead ahead) {
    if (has_whole_keys() &&
        pairs_.load_keys(row_tile.keys, row_tile.rows, [&] { return decoded_keys(row_tile); })) {
      return true;
    }
    const float* keys = decoded_keys(row_tile);
    set_float_queries();
    product(keys, head_.keys, 1, {queries_, panel_width * head_.keys, panel_width}, head_.keys, logits_,
            width_, row_tile.rows, width_, nullptr, ahead);
    return false;
  }

  // Calls visit(strip) for each strip of queries: one after another in the same memory, or each in its place of
  // logits_ [rows, width()].
  template <class Visit>
  void for_each_strip(bool in_one_place, Visit visit) {
    for (std::size_t first = 0; first < width_; first += Pairs::strip) {
      const std::size_t count = std::min(Pairs::strip, width_ - first);
      visit(LogitStrip{.first = first,
                       .width = count,
                       .numbers = in_one_place ? logits_ : logits_ + first,
                       .stride = in_one_place ? count : width_});
    }
  }

  // Calls visit(strip) for the logits of each row with each query, [rows, width()].
  template <class Visit>
  void compute_logits(const RowTile& row_tile, const RowTile& next, Visit visit) {
    FetchAhead ahead{next.keys, next.rows, tile_.key_dim()};
    const bool keys = load_keys(row_tile, ahead);
    if (keys) pairs_.start_with_keys(ahead, row_tile.rows);
    for_each_strip(false, [&](LogitStrip strip) {
      finish_logits(row_tile, keys, strip, ahead);
      visit(strip);
    });
  }

  // Multiplies the strip's queries with keys that were loaded, or takes what is there; -infinity where a query does
  // not see the row.
  void finish_logits(const RowTile& row_tile, bool loaded, LogitStrip& strip, FetchAhead& ahead) {
    if (loaded) {
      strip.scale = tile_.scale;
      pairs_.compute_logits(row_tile.rows, strip, ahead);
    }
    if (tile_.softcap > 0.0F || !(strip.scale > 0.0F)) {
      for (std::size_t row = 0; row < row_tile.rows; ++row) {
        scale_row(strip.at(row, 0), strip.width, strip.scale);
        if (tile_.softcap > 0.0F) cap_logits(tile_.softcap, strip.at(row, 0), strip.width);
      }
      strip.scale = 1.0F;
    }
    if (!row_tile.cut) return;
    for (std::size_t row = 0; row < row_tile.rows; ++row) {
      float* logits = strip.at(row, 0);
      // Leaves out the padding after the queries: queries that see nothing take a slow path.
      row_tile.for_each_not_seeing(tile_, row, [&](const QueryTile::Range& unseeing) {
        const auto in_strip = [&](std::size_t m) {
          return std::clamp(m, strip.first, strip.first + strip.width) - strip.first;
        };
        std::fill(logits + in_strip(unseeing.begin), logits + in_strip(unseeing.end),
                  -std::numeric_limits<float>::infinity());
      });
    }
  }
  // exp(logit - log_sum_exp) for the strip's queries of one row; 0 for a logit of -infinity.
  static void make_probabilities(const LogitStrip& strip, float* logits, const float* log_sum_exp) {
    scale_row(logits, strip.width, strip.scale);
    for (std::size_t m = 0; m < strip.width; m += lanes) {
      const auto x = hn::LoadU(floats, logits + m);
      const auto nothing = hn::Eq(x, hn::Set(floats, -std::numeric_limits<float>::infinity()));
      const auto above = hn::Sub(x, hn::LoadU(floats, log_sum_exp + m));
      hn::StoreU(hn::IfThenZeroElse(nothing, exp_nonpositive(above)), floats, logits + m);
    }
  }
  static void scale_row(float* logits, std::size_t width, float factor) {
    const auto scale = hn::Set(floats, factor);
    for (std::size_t m = 0; m < width; m += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(floats, logits + m), scale), floats, logits + m);
    }
  }
  // A logit times the scale, less the largest one, is one rounding: of the large logits below it would leave more than
  // the weights can bear, so these are multiplied first.
  static constexpr float most_scaled_late = 65536.0F;

  void update_softmax(std::size_t rows, const LogitStrip& strip) {
    for (std::size_t m = 0; m < strip.width; m += lanes) {
      const std::size_t query = strip.first + m;
      const auto old = hn::LoadU(floats, partial_.max + query);
      auto largest = hn::Set(floats, -std::numeric_limits<float>::infinity());
      for (std::size_t row = 0; row < rows; ++row) {
        const auto x = hn::LoadU(floats, strip.at(row, m));
        largest = hn::IfThenElse(hn::Gt(x, largest), x, largest);  // ignores NaN
      }
      auto scale = hn::Set(floats, strip.scale);
      const auto own = hn::Mul(largest, scale);
      const auto max = hn::IfThenElse(hn::Gt(own, old), own, old);
      if (!hn::AllTrue(floats, hn::Lt(hn::Abs(max), hn::Set(floats, most_scaled_late)))) {
        for (std::size_t row = 0; row < rows; ++row) scale_row(strip.at(row, m), lanes, strip.scale);
        scale = hn::Set(floats, 1.0F);
      }
      hn::StoreU(max, floats, partial_.max + query);
      auto sums = zero_vector();
      if (all_finite_vector(max)) {
        for (std::size_t row = 0; row < rows; ++row) {
          float* logits = strip.at(row, m);
          const auto weights = exp_nonpositive(hn::MulSub(hn::LoadU(floats, logits), scale, max));
          sums = hn::Add(sums, weights);
          hn::StoreU(weights, floats, logits);
        }
        // Before the first row tile the maximum is -infinity, which gives a factor of 0.
        hn::StoreU(exp_nonpositive(hn::Sub(old, max)), floats, factors_ + query);
      } else {
        sums = special_weights(rows, strip, m, old, max);
      }
      const auto sum = hn::LoadU(floats, partial_.sum + query);
      hn::StoreU(hn::MulAdd(sum, hn::LoadU(floats, factors_ + query), sums), floats, partial_.sum + query);
    }
  }

  [[nodiscard]] static bool all_finite_vector(FloatVector x) {
    return hn::AllTrue(floats, hn::Eq(hn::Sub(x, x), zero_vector()));
  }

  // For queries that have seen no row yet, or an infinite logit; logits are scaled.
  HWY_NOINLINE FloatVector special_weights(std::size_t rows, const LogitStrip& strip, std::size_t m,
                                           FloatVector old, FloatVector max) {
    HWY_ALIGN float old_lanes[lanes];
    HWY_ALIGN float max_lanes[lanes];
    HWY_ALIGN float sums[lanes] = {};
    hn::Store(old, floats, old_lanes);
    hn::Store(max, floats, max_lanes);
    for (std::size_t row = 0; row < rows; ++row) {
      float* logits = strip.at(row, m);
      for (std::size_t i = 0; i < lanes; ++i) {
        logits[i] = special_weight(logits[i], max_lanes[i]);
        sums[i] += logits[i];
      }
    }
    for (std::size_t i = 0; i < lanes; ++i) {
      factors_[strip.first + m + i] = rescale_factor(old_lanes[i], max_lanes[i]);
    }
    return hn::Load(floats, sums);
  }

  // As in StreamPass.
  void rotate_values(bool hadamard) {
    if (hadamard == values_are_rotated_) return;
    partial_.rotate_values(tile_.rows, tile_.value_dim);
    values_are_rotated_ = hadamard;
  }

  // The product of values in float with the weights of all strips.
  void add_float_values(const RowTile& row_tile, FetchAhead& ahead) {
    const std::size_t width = head_.values;
    const float* values = decoded_values(row_tile);
    if (row_tile.cut && !all_finite(values, row_tile.rows * width)) {
      for (std::size_t i = 0; i < tile_.rows * width; ++i) partial_.values[i] *= factors_[i / width];
      return add_seen_values(tile_, row_tile, values, logits_, 1, width_, partial_.values);
    }
    product(logits_, 1, width_, {values, panel_width, width}, row_tile.rows, partial_.values, width,
            tile_.rows, width, factors_, ahead);
  }

  const QueryTile& tile_;
  Partial partial_;
  HeadWidth head_;
  std::size_t width_;  // queries with padding
  float* queries_;     // panels of [width of keys, width]
  float* logits_;      // [max_tile_rows, width]
  float* rows_;        // [max_tile_rows, wider side]
  float* params_;      // [2, wider side]
  float* factors_;     // [width]
  Pairs pairs_;
  const float* given_queries_ = nullptr;
  bool has_float_queries_ = false;
  bool queries_are_turned_ = false;  // as rotated keys are
  bool values_are_rotated_ = false;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
