// SPDX-License-Identifier: Apache-2.0
//
// Attention of few queries, as in decoding. It is bound by memory, so every key and value byte is read
// once, in its stored format, for all queries of the tile. While the keys of a row tile are read, its
// values are prefetched, and while those are read, the next row tile's keys are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include <kvpolicy/cpu/decode_rows-inl.hpp>
#include <kvpolicy/cpu/integer_rows-inl.hpp>
#include <kvpolicy/cpu/partial-inl.hpp>
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_params-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// The channels that load_pair loads in pairs of vectors; a last vector after them is loaded alone.
[[nodiscard]] constexpr std::size_t paired_channels(std::size_t head_dim) {
  return head_dim / (2 * lanes) * (2 * lanes);
}

/// logits[q * stride + row] = queries[q] . rows[row] for Q queries, whose pairs of vectors are in the order
/// of deinterleave_pair<E>. It takes four rows at once, so `rows` must have pointers, and `logits` room, up
/// to a multiple of four.
template <Encoding E, std::size_t Q>
HWY_INLINE void dot_rows(const std::byte* const* rows, std::size_t count, const float* queries,
                         std::size_t head_dim, float* logits, std::size_t stride, const Prefetch& prefetch) {
  const std::size_t paired = paired_channels(head_dim);
  const std::size_t steps = std::max<std::size_t>(paired / (2 * lanes), 1);
  for (std::size_t row = 0; row < count; row += 4) {
    FourRowPrefetch ahead{prefetch, row, steps};
    FloatVector sums[Q][4];
    unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
      unroll<4>([&](auto j) KVPOLICY_CPU_INLINE_LAMBDA { sums[q][j] = zero_vector(); });
    });
    const auto add = [&](std::size_t channel, auto key0, auto key1, auto key2, auto key3)
                         KVPOLICY_CPU_INLINE_LAMBDA {
                           unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
                             const auto query = hn::LoadU(floats, queries + q * head_dim + channel);
                             sums[q][0] = hn::MulAdd(query, key0, sums[q][0]);
                             sums[q][1] = hn::MulAdd(query, key1, sums[q][1]);
                             sums[q][2] = hn::MulAdd(query, key2, sums[q][2]);
                             sums[q][3] = hn::MulAdd(query, key3, sums[q][3]);
                           });
                         };
    const std::byte* row0 = rows[row];
    const std::byte* row1 = rows[row + 1];
    const std::byte* row2 = rows[row + 2];
    const std::byte* row3 = rows[row + 3];
    for (std::size_t channel = 0; channel < paired; channel += 2 * lanes) {
      ahead.step();
      const VectorPair keys0 = load_pair<E>(row0, channel);
      const VectorPair keys1 = load_pair<E>(row1, channel);
      const VectorPair keys2 = load_pair<E>(row2, channel);
      const VectorPair keys3 = load_pair<E>(row3, channel);
      add(channel, keys0.first, keys1.first, keys2.first, keys3.first);
      add(channel + lanes, keys0.second, keys1.second, keys2.second, keys3.second);
    }
    if (paired < head_dim) {
      if (paired == 0) ahead.step();
      add(paired, load_numbers<E>(row0, paired), load_numbers<E>(row1, paired), load_numbers<E>(row2, paired),
          load_numbers<E>(row3, paired));
    }
    unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
      store_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3], logits + q * stride + row);
    });
  }
}

/// values[q] = factors[q] * values[q] + sum over rows of weights[q * stride + row] * rows[row], for Q
/// queries and N vectors of channels, single ones or pairs, which stay in registers throughout.
template <Encoding E, std::size_t Q, std::size_t N>
HWY_INLINE void add_rows(const std::byte* const* rows, std::size_t count, const float* weights,
                         std::size_t stride, const float* factors, float* values, std::size_t channel,
                         std::size_t head_dim, const Prefetch& prefetch) {
  static_assert(N == 1 || N % 2 == 0);
  FloatVector sums[Q][N];
  unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
    const auto factor = hn::Set(floats, factors[q]);
    const float* from = values + q * head_dim + channel;
    if constexpr (N == 1) {
      sums[q][0] = hn::Mul(hn::LoadU(floats, from), factor);
    } else {
      unroll<N / 2>([&](auto n) KVPOLICY_CPU_INLINE_LAMBDA {
        const VectorPair pair = deinterleave_pair<E>(from + 2 * n * lanes);
        sums[q][2 * n] = hn::Mul(pair.first, factor);
        sums[q][2 * n + 1] = hn::Mul(pair.second, factor);
      });
    }
  });
  for (std::size_t row = 0; row < count; ++row) {
    prefetch.row(row);
    FloatVector numbers[N];
    if constexpr (N == 1) {
      numbers[0] = load_numbers<E>(rows[row], channel);
    } else {
      unroll<N / 2>([&](auto n) KVPOLICY_CPU_INLINE_LAMBDA {
        const VectorPair pair = load_pair<E>(rows[row], channel + 2 * n * lanes);
        numbers[2 * n] = pair.first;
        numbers[2 * n + 1] = pair.second;
      });
    }
    unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
      const auto weight = hn::Set(floats, weights[q * stride + row]);
      unroll<N>([&](auto n)
                    KVPOLICY_CPU_INLINE_LAMBDA { sums[q][n] = hn::MulAdd(weight, numbers[n], sums[q][n]); });
    });
  }
  unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
    float* to = values + q * head_dim + channel;
    if constexpr (N == 1) {
      hn::StoreU(sums[q][0], floats, to);
    } else {
      unroll<N / 2>([&](auto n) KVPOLICY_CPU_INLINE_LAMBDA {
        interleave_pair<E>({sums[q][2 * n], sums[q][2 * n + 1]}, to + 2 * n * lanes);
      });
    }
  });
}

/// The number of queries whose sums fill the registers.
inline constexpr std::size_t query_portion = many_registers ? 4 : 2;

/// softcap * tanh(logit / softcap).
inline void cap_logits(float softcap, float* logits, std::size_t count) {
  const auto cap = hn::Set(floats, softcap);
  const auto inverse = hn::Set(floats, 1.0F / softcap);
  for (std::size_t i = 0; i < count; i += lanes) {
    const auto x = hn::LoadU(floats, logits + i);
    hn::StoreU(hn::Mul(cap, tanh(hn::Mul(x, inverse))), floats, logits + i);
  }
}

/// Whether all numbers are finite.
[[nodiscard]] inline bool all_finite(const float* numbers, std::size_t count) {
  auto sum = zero_vector();
  for (std::size_t i = 0; i < count; i += lanes) {
    const auto x = hn::LoadU(floats, numbers + i);
    sum = hn::Add(sum, hn::Sub(x, x));  // 0, or NaN
  }
  return hn::AllTrue(floats, hn::Eq(sum, zero_vector()));
}

/// Attention of one tile of queries over a sequence of row tiles.
class StreamPass {
 public:
  /// Floats between the logits of two queries; after the logits of a row tile there is room for a vector.
  static constexpr std::size_t stride = max_tile_rows + lanes;

  [[nodiscard]] static std::size_t scratch_floats(std::size_t queries, const HeadWidth& width) {
    return queries * (stride + width.keys) + (max_tile_rows + 2) * width.widest() + whole_lines(queries) +
           IntegerKeys::scratch_floats(queries, width.keys) +
           IntegerValues::scratch_floats(queries, width.values);
  }

  StreamPass(const QueryTile& tile, const Partial& partial, float* scratch)
      : tile_{tile},
        partial_{partial},
        width_{tile.width()},
        logits_{scratch},
        rows_{logits_ + tile.rows * stride},
        params_{rows_ + max_tile_rows * width_.widest()},
        deinterleaved_{params_ + 2 * width_.widest()},
        factors_{deinterleaved_ + tile.rows * width_.keys},
        integer_keys_{tile.rows, width_.keys, factors_ + whole_lines(tile.rows)},
        integer_values_{
            tile.rows, width_.values,
            factors_ + whole_lines(tile.rows) + IntegerKeys::scratch_floats(tile.rows, width_.keys)} {}

  /// Sets the queries [tile.rows, width().keys] for the row tiles that follow.
  void set_queries(const float* queries) {
    queries_ = queries;
    has_deinterleaved_ = false;
    integer_keys_.set_queries(queries);
  }

  /// Adds a row tile; `next` is the one after it, which is prefetched.
  void add(const RowTile& row_tile, const RowTile& next) {
    fetch_params(next.keys, next.rows, tile_.key_dim());
    fetch_params(next.values, next.rows, tile_.value_dim);
    compute_logits(row_tile, prefetch_of(row_tile.values, row_tile.rows, tile_.value_dim));
    if (tile_.softcap > 0.0F) cap_logits(tile_.softcap, logits_, tile_.rows * stride);
    if (row_tile.cut) hide_unseen(row_tile);
    for (std::size_t m = 0; m < tile_.rows; ++m) update_softmax(m, row_tile.rows);
    add_values(row_tile, next);
  }

  /// Must be called after the last row tile: until then the partial result lacks some of the values.
  void finish() {
    integer_values_.flush(partial_.values);
    rotate_values(false);
  }

  /// The logits of each query with each row: [queries, stride]; `ahead` is needed next and is prefetched.
  float* compute_logits(const RowTile& row_tile, const Prefetch& ahead) {
    const bool whole = width_.keys == tile_.key_dim();
    if (whole && integer_keys_.compute_logits(row_tile.keys, row_tile.rows, logits_, stride, ahead)) {
      return logits_;
    }
    const auto keys = readable_rows(row_tile.keys, row_tile.rows, tile_.key_dim(), true);
    const std::size_t passes = (tile_.rows + query_portion - 1) / query_portion;
    with_dense_encoding(keys.encoding, [&]<Encoding E>() KVPOLICY_CPU_LAMBDA {
      const float* queries = queries_for<E>();
      for_each_portion<query_portion>(tile_.rows, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
        dot_rows<E, Q>(keys.rows.data(), row_tile.rows, queries + q * width_.keys, width_.keys,
                       logits_ + q * stride, stride, ahead.share(q / query_portion, passes));
      });
    });
    return logits_;
  }

 private:
  struct Rows {
    Encoding encoding;
    std::array<const std::byte*, max_tile_rows + 3> rows;
  };

  // The queries in the order in which rows of encoding E are loaded.
  template <Encoding E>
  [[nodiscard]] const float* queries_for() {
    if constexpr (deinterleaves_pairs<E>) {
      if (!has_deinterleaved_) deinterleave_queries<E>();
      return deinterleaved_;
    } else {
      return queries_;
    }
  }

  template <Encoding E>
  void deinterleave_queries() {
    has_deinterleaved_ = true;
    const std::size_t paired = paired_channels(width_.keys);
    for (std::size_t m = 0; m < tile_.rows; ++m) {
      const float* from = queries_ + m * width_.keys;
      float* to = deinterleaved_ + m * width_.keys;
      for (std::size_t channel = 0; channel < paired; channel += 2 * lanes) {
        const VectorPair pair = deinterleave_pair<E>(from + channel);
        hn::StoreU(pair.first, floats, to + channel);
        hn::StoreU(pair.second, floats, to + channel + lanes);
      }
      std::copy(from + paired, from + width_.keys, to + paired);
    }
  }

  // Pointers to dense rows: the stored rows, or decoded ones if they are quantised or do not fill vectors.
  [[nodiscard]] Rows readable_rows(const RowTileSide& side, std::size_t count, std::size_t channels,
                                   bool padded) {
    Rows result;
    const std::size_t width = padded_channels(channels);
    if (is_quantized(side.format.encoding) || width != channels) {
      decode_side(side, count, channels, params_, rows_);
      result.encoding = Encoding::float32;
      for (std::size_t i = 0; i < count; ++i) {
        result.rows[i] = reinterpret_cast<const std::byte*>(rows_ + i * width);
      }
    } else {
      result.encoding = side.format.encoding;
      std::copy_n(side.codes.begin(), count, result.rows.begin());
    }
    if (padded) std::fill_n(result.rows.begin() + static_cast<std::ptrdiff_t>(count), 3, result.rows[0]);
    return result;
  }

  void hide_unseen(const RowTile& row_tile) {
    for (std::size_t row = 0; row < row_tile.rows; ++row) {
      row_tile.for_each_not_seeing(tile_, row, [&](const QueryTile::Range& unseeing) {
        for (std::size_t m = unseeing.begin; m < unseeing.end; ++m) {
          logits_[m * stride + row] = -std::numeric_limits<float>::infinity();
        }
      });
    }
  }

  // Turns query m's logits into weights relative to its new maximum.
  void update_softmax(std::size_t m, std::size_t rows) {
    float* logits = logits_ + m * stride;
    const std::size_t padded = (rows + lanes - 1) / lanes * lanes;
    std::fill(logits + rows, logits + padded, -std::numeric_limits<float>::infinity());
    auto highest = hn::Set(floats, partial_.max[m]);
    for (std::size_t i = 0; i < padded; i += lanes) {
      const auto x = hn::LoadU(floats, logits + i);
      highest = hn::IfThenElse(hn::Gt(x, highest), x, highest);  // ignores NaN
    }
    const float max = hn::GetLane(hn::MaxOfLanes(floats, highest));
    factors_[m] = rescale_factor(partial_.max[m], max);
    partial_.max[m] = max;
    float sum = 0.0F;
    if (std::isfinite(max)) {
      const auto top = hn::Set(floats, max);
      auto sums = zero_vector();
      for (std::size_t i = 0; i < padded; i += lanes) {
        const auto weights = exp_nonpositive(hn::Sub(hn::LoadU(floats, logits + i), top));
        sums = hn::Add(sums, weights);
        hn::StoreU(weights, floats, logits + i);
      }
      sum = hn::GetLane(hn::SumOfLanes(floats, sums));
    } else {
      for (std::size_t i = 0; i < rows; ++i) {
        logits[i] = special_weight(logits[i], max);
        sum += logits[i];
      }
      std::fill(logits + rows, logits + padded, 0.0F);
    }
    partial_.sum[m] = partial_.sum[m] * factors_[m] + sum;
  }

  // Sums of values are rotated as the rows are that come next (core/hadamard.hpp).
  void rotate_values(bool hadamard) {
    if (hadamard == values_are_rotated_) return;
    integer_values_.flush(partial_.values);
    partial_.rotate_values(tile_.rows, tile_.value_dim);
    values_are_rotated_ = hadamard;
  }

  void add_values(const RowTile& row_tile, const RowTile& next) {
    rotate_values(row_tile.values.format.hadamard);
    const Prefetch ahead = prefetch_of(next.keys, next.rows, tile_.key_dim());
    const std::size_t width = width_.values;
    if (width == tile_.value_dim && integer_values_.add(row_tile.values, row_tile.rows, logits_, stride,
                                                        factors_, partial_.values, ahead)) {
      return;
    }
    integer_values_.flush(partial_.values);
    if (row_tile.cut) {
      decode_side(row_tile.values, row_tile.rows, tile_.value_dim, params_, rows_);
      if (!all_finite(rows_, row_tile.rows * width)) {
        for (std::size_t i = 0; i < tile_.rows * width; ++i) partial_.values[i] *= factors_[i / width];
        return add_seen_values(tile_, row_tile, rows_, logits_, stride, 1, partial_.values);
      }
    }
    const auto values = readable_rows(row_tile.values, row_tile.rows, tile_.value_dim, false);
    const std::size_t columns = width / lanes;
    const std::size_t passes =
        (tile_.rows + query_portion - 1) / query_portion * (columns / 4 + columns % 4 / 2 + columns % 2);
    std::size_t pass = 0;
    with_dense_encoding(values.encoding, [&]<Encoding E>() KVPOLICY_CPU_LAMBDA {
      for_each_portion<query_portion>(tile_.rows, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
        const auto add = [&]<std::size_t N>(std::size_t channel) KVPOLICY_CPU_LAMBDA {
          add_rows<E, Q, N>(values.rows.data(), row_tile.rows, logits_ + q * stride, stride, factors_ + q,
                            partial_.values + q * width, channel, width, ahead.share(pass++, passes));
          return channel + N * lanes;
        };
        std::size_t channel = 0;
        while (channel + 4 * lanes <= width) channel = add.template operator()<4>(channel);
        if (channel + 2 * lanes <= width) channel = add.template operator()<2>(channel);
        if (channel < width) add.template operator()<1>(channel);
      });
    });
  }

  const QueryTile& tile_;
  Partial partial_;
  HeadWidth width_;
  float* logits_;         // [queries, stride]
  float* rows_;           // [max_tile_rows, wider side]
  float* params_;         // [2, wider side]
  float* deinterleaved_;  // [queries, width of keys], see queries_for
  float* factors_;        // [queries]
  IntegerKeys integer_keys_;
  IntegerValues integer_values_;
  const float* queries_ = nullptr;
  bool has_deinterleaved_ = false;
  bool values_are_rotated_ = false;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
