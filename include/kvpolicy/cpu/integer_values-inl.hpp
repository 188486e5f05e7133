// SPDX-License-Identifier: Apache-2.0
//
// Weighted sums of quantised values as integer products, for rows with one scale and zero each. In a row
// tile, with weights p and codes c:
//
//   sum(p * (scale * c + zero)) = s * sum(n * c) + sum(p * zero),  p * scale ~ s * n,
//
// where n has 16 bits and s is the row tile's largest p * scale divided by 32767. Two rows share a pair
// product; codes count from their middle, because sum(p * scale) - s * sum(n) is added exactly.
//
// Error: at worst (one row outweighs the other 63 of its row tile, and none of them vanishes) 2 % of what
// rounding the values to 8 bits cost the output, root mean square, and 0.1 % for 4 bits.
//
// Sums are stored in the order in which codes leave their bytes, from row tile to row tile; `flush` brings
// them into the order of channels.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/cpu/packed_codes-inl.hpp>
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS  // otherwise integer_rows-inl.hpp declares the names
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Pairs of codes of two rows. The codes in the low 16 bits of each 4 bytes come first (pairs 0 to 16 /
/// Bits), then those in the high 16 bits.
template <std::size_t Bits>
struct RowPairs {
  using Codes = CodePairs<Bits>;
  static constexpr std::size_t pairs = 2 * Codes::pairs;

  /// The channel that lane i of a pair belongs to, for a column of bytes that begins at `at`.
  static constexpr std::size_t channel(std::size_t pair, std::size_t i, std::size_t at, std::size_t bytes) {
    const std::size_t code = pair % Codes::pairs;
    return Codes::part(code) * bytes + at + 4 * i + 2 * (pair / Codes::pairs) + Codes::byte(code);
  }

  /// Codes are masked but not shifted inside their byte, so they appear multiplied by this number.
  static constexpr std::size_t times(std::size_t pair) { return std::size_t{1} << pair * Bits % 8; }

  template <std::size_t Pair, class D>
  [[nodiscard]] static HWY_INLINE hn::Vec<D> take(D d, hn::Vec<D> packed) {
    constexpr std::size_t bit = Pair % Codes::pairs * Bits;
    const hn::Repartition<std::uint16_t, D> shorts;
    const auto mask = hn::Set(d, static_cast<std::int32_t>(Codes::levels * times(Pair) * 0x10001U));
    if constexpr (bit < 8) return hn::And(packed, mask);
    return hn::And(hn::BitCast(d, hn::ShiftRight<8>(hn::BitCast(shorts, packed))), mask);
  }
};

/// Rows between two prefetches; a row tile is processed in steps of so many rows.
inline constexpr std::size_t fetch_step = 8;

/// `Fold` consecutive pairs of 16-bit numbers, each repeated in as many lanes.
template <std::size_t Fold, class D>
[[nodiscard]] HWY_INLINE hn::Vec<D> broadcast_pairs(D d, const std::byte* pairs) {
  if constexpr (Fold == 1) {
    return broadcast_pair(d, pairs);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, broadcast_pairs<Fold / 2>(half, pairs + 2 * Fold),
                       broadcast_pairs<Fold / 2>(half, pairs));
  }
}

/// Cuts a vector into parts of the length of `D` and returns their sum.
template <class D, class V>
[[nodiscard]] HWY_INLINE hn::Vec<D> add_parts(D d, V sum) {
  const hn::DFromV<V> whole;
  if constexpr (hn::MaxLanes(whole) == hn::MaxLanes(D{})) {
    return sum;
  } else {
    const hn::Half<decltype(whole)> half;
    return add_parts(d, hn::Add(hn::LowerHalf(half, sum), hn::UpperHalf(half, sum)));
  }
}

/// The 16-bit weights of Q queries, `bytes` apart, for steps of 2 * Fold rows: one pair in all lanes, or
/// several pairs side by side. The latter are prepared here, because every pass over the rows needs them.
/// Weights after the last row, up to a whole fetch_step, must be 0.
template <std::size_t Q, std::size_t Fold>
class StepWeights {
 public:
  StepWeights(const std::byte* weights, std::size_t bytes, std::size_t rows)
      : weights_{weights}, bytes_{bytes} {
    if constexpr (Fold > 1) {
      const std::size_t end = (rows + fetch_step - 1) / fetch_step * fetch_step;
      for (std::size_t q = 0; q < Q; ++q) {
        for (std::size_t row = 0; row < end; row += 2 * Fold) {
          beside_[q][row / (2 * Fold)] = broadcast_pairs<Fold>(ints, weights + q * bytes + 2 * row);
        }
      }
    }
  }
  [[nodiscard]] HWY_INLINE IntVector at(std::size_t q, std::size_t row) const {
    if constexpr (Fold > 1) return beside_[q][row / (2 * Fold)];
    return broadcast_pair(ints, weights_ + q * bytes_ + 2 * row);
  }

 private:
  const std::byte* weights_;
  std::size_t bytes_;
  IntVector beside_[Q][Fold > 1 ? max_tile_rows / (2 * Fold) : 1];
};

/// sums[q][x] = sum over rows of weights x codes for Q queries and N pairs from `First` on, multiplied by
/// RowPairs::times, over the rows' bytes [at, at + 4 * lanes of D). Each step takes two rows, or as many
/// more as fill a vector; there must be row pointers up to a whole fetch_step.
template <std::size_t Bits, std::size_t First, std::size_t Q, std::size_t N, std::size_t Fold, class D>
HWY_INLINE void add_codes(D d, const std::byte* const* rows, std::size_t count, std::size_t at,
                          const StepWeights<Q, Fold>& weights, PrefetchWalk& ahead,
                          hn::Vec<D> (&sums)[Q][N]) {
  static_assert(Fold * hn::MaxLanes(D{}) == lanes);
  static_assert(fetch_step % (2 * Fold) == 0);
  using Pairs = RowPairs<Bits>;
  const hn::Repartition<std::uint16_t, Ints> shorts;
  IntVector all[Q][N];
  KVPOLICY_CPU_UNROLL
  for (auto& of_query : all) {
    KVPOLICY_CPU_UNROLL
    for (IntVector& sum : of_query) sum = hn::Zero(ints);
  }
  const auto merge = [&](auto odd, auto even) KVPOLICY_CPU_INLINE_LAMBDA {
    return hn::BitCast(ints, hn::OddEven(hn::BitCast(shorts, odd), hn::BitCast(shorts, even)));
  };
  const auto add_step = [&](std::size_t row) KVPOLICY_CPU_INLINE_LAMBDA {
    const auto a = load_pieces<Fold>(ints, rows + row, 2, at);
    const auto b = load_pieces<Fold>(ints, rows + row + 1, 2, at);
    IntVector codes[N];
    unroll<N>([&](auto x) KVPOLICY_CPU_INLINE_LAMBDA {
      constexpr std::size_t pair = First + x;
      constexpr bool high = pair >= Pairs::pairs / 2;
      const auto both = high ? merge(b, hn::ShiftRight<16>(a)) : merge(hn::ShiftLeft<16>(b), a);
      codes[x] = Pairs::template take<pair>(ints, both);
    });
    KVPOLICY_CPU_UNROLL
    for (std::size_t q = 0; q < Q; ++q) {
      const auto weight = weights.at(q, row);
      KVPOLICY_CPU_UNROLL
      for (std::size_t x = 0; x < N; ++x) {
        all[q][x] = add_pair_products(ints, all[q][x], codes[x], weight);
      }
    }
  };
  // The inner loop is unrolled, because GCC would copy all sums in each of its iterations.
  for (std::size_t row = 0; row < count; row += fetch_step) {
    ahead.step();
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < fetch_step; i += 2 * Fold) add_step(row + i);
  }
  KVPOLICY_CPU_UNROLL
  for (std::size_t q = 0; q < Q; ++q) {
    KVPOLICY_CPU_UNROLL
    for (std::size_t x = 0; x < N; ++x) sums[q][x] = add_parts(d, all[q][x]);
  }
  static_assert(First + N <= Pairs::pairs);
}

/// The sums over values of a tile's queries, as far as they come from quantised rows.
class IntegerValues {
 public:
  [[nodiscard]] static std::size_t scratch_floats(std::size_t queries, std::size_t head_dim) {
    return queries * (room(head_dim) + weight_bytes / sizeof(float) + 4);
  }

  IntegerValues(std::size_t queries, std::size_t head_dim, float* scratch)
      : count_{queries},
        head_dim_{head_dim},
        sums_{scratch},
        weights_{reinterpret_cast<std::byte*>(sums_ + queries * room(head_dim))},
        offsets_{sums_ + queries * (room(head_dim) + weight_bytes / sizeof(float))},
        added_offsets_{offsets_ + queries},
        steps_{added_offsets_ + queries},
        kept_{steps_ + queries} {}

  /// Multiplies the earlier sums, `out` included, by factors[query], and adds the rows of a row tile with
  /// weights [queries, stride], which must be 0 from `rows` up to a whole vector. Returns false and does
  /// nothing if the rows must be decoded, because they have another format or a number is not finite.
  bool add(const RowTileSide& values, std::size_t rows, const float* weights, std::size_t stride,
           const float* factors, float* out, const Prefetch& next) {
    const RowFormat& format = values.format;
    if (!has_code_steps(format, head_dim_) || format.group != head_dim_ ||
        format.granularity != Granularity::per_token) {
      return false;
    }
    RowTileParams params;
    if (!params.load(values, rows)) return false;
    if (format.encoding != encoding_) flush(out);
    const float middle = 0.5F * static_cast<float>((1U << bits_of(format.encoding)) - 1U);
    for (std::size_t q = 0; q < count_; ++q) {
      if (!round_weights(q, params, rows, weights + q * stride, middle)) return false;
    }
    if (!pending_) start(format.encoding);
    for (std::size_t q = 0; q < count_; ++q) {
      offsets_[q] = offsets_[q] * factors[q] + added_offsets_[q];
      kept_[q] *= factors[q];
    }
    std::array<const std::byte*, max_tile_rows> codes;  // up to a whole fetch_step
    static_assert(max_tile_rows % fetch_step == 0);
    std::copy_n(values.codes.begin(), rows, codes.begin());
    for (std::size_t row = rows; row % fetch_step != 0; ++row) codes[row] = codes[rows - 1];
    with_bits(format.encoding, [&]<std::size_t Bits>() KVPOLICY_CPU_LAMBDA {
      const std::size_t bytes = head_dim_ * Bits / 8;
      std::size_t passes = 0;
      for_each_column(bytes, [&](auto, std::size_t, std::size_t, std::size_t)
                                 KVPOLICY_CPU_LAMBDA { passes += RowPairs<Bits>::pairs / pairs_at_once; });
      passes *= (count_ + query_portion - 1) / query_portion;
      PrefetchWalk ahead{next, (rows + fetch_step - 1) / fetch_step * passes};
      for_each_portion<query_portion>(count_, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
        for_each_column(
            bytes, [&]<class D>(D d, std::size_t at, std::size_t column, std::size_t) KVPOLICY_CPU_LAMBDA {
              add_column<Bits, Q>(d, codes.data(), rows, at, q,
                                  sums_ + q * room(head_dim_) + column * 8 / Bits, factors, ahead);
            });
      });
    });
    return true;
  }

  /// Adds all pending sums to out [queries, head_dim]. Needed before other code rescales or reads `out`.
  void flush(float* out) {
    if (!pending_) return;
    pending_ = false;
    for (std::size_t i = 0; i < count_ * head_dim_; ++i) {
      out[i] = out[i] * kept_[i / head_dim_] + offsets_[i / head_dim_];
    }
    with_bits(encoding_, [&]<std::size_t Bits>() KVPOLICY_CPU_LAMBDA {
      const std::size_t bytes = head_dim_ * Bits / 8;
      for_each_column(
          bytes, [&]<class D>(D, std::size_t at, std::size_t column, std::size_t taken) KVPOLICY_CPU_LAMBDA {
            constexpr std::size_t width = hn::MaxLanes(D{});
            for (std::size_t pair = 0; pair < RowPairs<Bits>::pairs; ++pair) {
              for (std::size_t i = 0; i < width; ++i) {
                const std::size_t channel = RowPairs<Bits>::channel(pair, i, at, bytes);
                if (channel % bytes < taken) continue;
                const float* sum = sums_ + column * 8 / Bits + pair * width + i;
                for (std::size_t q = 0; q < count_; ++q) {
                  out[q * head_dim_ + channel] += sum[q * room(head_dim_)];
                }
              }
            }
          });
    });
  }

 private:
  static constexpr std::size_t weight_bytes = max_tile_rows * sizeof(std::int16_t);
  static constexpr std::size_t query_portion = 4;
  static constexpr std::size_t pairs_at_once = many_registers ? 4 : 2;

  /// Room for every code of a row, and for those that an overlapping last step takes twice.
  [[nodiscard]] static std::size_t room(std::size_t head_dim) { return head_dim + 4 * code_step; }

  void start(Encoding encoding) {
    pending_ = true;
    encoding_ = encoding;
    std::fill_n(sums_, count_ * room(head_dim_), 0.0F);
    std::fill_n(offsets_, count_, 0.0F);
    std::fill_n(kept_, count_, 1.0F);
  }

  // Rounds query q's weights times the rows' scales to 16 bits; false if one is not finite.
  bool round_weights(std::size_t q, const RowTileParams& params, std::size_t rows, const float* weights,
                     float middle) {
    std::array<float, max_tile_rows> scaled;
    auto highest = zero_vector();
    auto sums = zero_vector();
    auto zeros = zero_vector();
    for (std::size_t row = 0; row < rows; row += lanes) {
      const auto weight = hn::LoadU(floats, weights + row);
      const auto x = hn::Mul(weight, hn::LoadU(floats, params.scales.data() + row));
      hn::StoreU(x, floats, scaled.data() + row);
      highest = hn::Max(highest, hn::Abs(x));
      sums = hn::Add(sums, x);
      zeros = hn::MulAdd(weight, hn::LoadU(floats, params.zeros.data() + row), zeros);
    }
    const float sum = hn::GetLane(hn::SumOfLanes(floats, sums));
    const float zero = hn::GetLane(hn::SumOfLanes(floats, zeros));
    if (!std::isfinite(sum) || !std::isfinite(zero)) return false;
    const float most = hn::GetLane(hn::MaxOfLanes(floats, highest));
    const bool counts = most > 1e-30F;  // so that its inverse is finite
    const auto inverse = hn::Set(floats, counts ? 32767.0F / most : 0.0F);
    steps_[q] = counts ? most / 32767.0F : 0.0F;
    auto rounded_sums = hn::Zero(ints);
    const hn::Rebind<std::int16_t, Floats> shorts;
    auto* out = reinterpret_cast<std::int16_t*>(weights_ + q * weight_bytes);
    for (std::size_t row = rows; row % fetch_step != 0; ++row) out[row] = 0;
    for (std::size_t row = 0; row < rows; row += lanes) {
      const auto x = hn::NearestInt(hn::Mul(hn::LoadU(floats, scaled.data() + row), inverse));
      rounded_sums = hn::Add(rounded_sums, x);
      hn::StoreU(hn::DemoteTo(shorts, x), shorts, out + row);
    }
    const auto rounded_sum = static_cast<float>(hn::GetLane(hn::SumOfLanes(ints, rounded_sums)));
    added_offsets_[q] = zero + middle * (sum - steps_[q] * rounded_sum);
    return true;
  }

  // Calls visit(tag, first byte, bytes of all columns before, bytes of the row that those have covered):
  // for whole vectors as long as they fit, then for shorter ones, then for one that overlaps.
  template <class Visit>
  static HWY_INLINE void for_each_column(std::size_t bytes, Visit visit) {
    std::size_t at = 0;
    const auto take = [&]<class D>(D d) KVPOLICY_CPU_LAMBDA {
      constexpr std::size_t width = 4 * hn::MaxLanes(D{});
      for (; at + width <= bytes; at += width) visit(d, at, at, at);
    };
    take(ints);
    if constexpr (lanes > 8) take(hn::CappedTag<std::int32_t, 8>{});
    if constexpr (lanes > 4) take(hn::CappedTag<std::int32_t, 4>{});
    if (at < bytes) visit(hn::CappedTag<std::int32_t, 4>{}, bytes - code_step, at, at);
  }

  template <std::size_t Bits, std::size_t Q, class D>
  HWY_INLINE void add_column(D d, const std::byte* const* codes, std::size_t rows, std::size_t at,
                             std::size_t q, float* sums, const float* factors, PrefetchWalk& ahead) const {
    constexpr std::size_t width = hn::MaxLanes(D{});
    constexpr std::size_t at_once = pairs_at_once;
    const hn::Rebind<float, D> numbers;
    const StepWeights<Q, lanes / width> weights{weights_ + q * weight_bytes, weight_bytes, rows};
    unroll<RowPairs<Bits>::pairs / at_once>([&](auto pass) KVPOLICY_CPU_INLINE_LAMBDA {
      constexpr std::size_t first = pass * at_once;
      hn::Vec<D> products[Q][at_once];
      add_codes<Bits, first>(d, codes, rows, at, weights, ahead, products);
      KVPOLICY_CPU_UNROLL
      for (std::size_t i = 0; i < Q; ++i) {
        const auto factor = hn::Set(numbers, factors[q + i]);
        float* own = sums + i * room(head_dim_) + first * width;
        KVPOLICY_CPU_UNROLL
        for (std::size_t x = 0; x < at_once; ++x) {
          const auto times = static_cast<float>(RowPairs<Bits>::times(first + x));
          const auto step = hn::Set(numbers, steps_[q + i] / times);
          const auto old = hn::Mul(hn::LoadU(numbers, own + x * width), factor);
          hn::StoreU(hn::MulAdd(hn::ConvertTo(numbers, products[i][x]), step, old), numbers, own + x * width);
        }
      }
    });
  }

  std::size_t count_;
  std::size_t head_dim_;
  bool pending_ = false;
  Encoding encoding_ = Encoding::uint8;  // of the pending sums
  float* sums_;                          // [queries, room]: columns of pairs of lanes
  std::byte* weights_;                   // [queries, max_tile_rows] of 16 bits
  float* offsets_;                       // [queries]: added to every channel
  float* added_offsets_;                 // [queries], of the current row tile
  float* steps_;                         // [queries]: one unit of the rounded weights
  float* kept_;                          // [queries]: what remains to be multiplied into `out`
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
