// SPDX-License-Identifier: Apache-2.0
//
// Weighted sums of quantised values as integer products, for rows with a scale and zero each, or with one for
// each group of channels. In a row tile, with weights p and codes c:
//
//   sum(p * (scale * c + zero)) = s * sum(n * (c - middle)) + sum(p * at_middle),  p * scale ~ s * n,
//
// where n has 16 bits, at_middle = scale * middle + zero, and s is the row tile's largest p * scale divided by
// 32767. Each group of channels has its own n and s. Two rows share a pair product.
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

#include <kvpolicy/cpu/byte_codes-inl.hpp>
#include <kvpolicy/cpu/packed_codes-inl.hpp>
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_params-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS  // otherwise integer_rows-inl.hpp declares the names
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Pairs of codes of two rows. The codes in the low 16 bits of each 4 bytes come first (pairs 0 to 16 /
/// Bits), then those in the high 16 bits; in each half, part by part, because those of one part have one scale.
template <std::size_t Bits>
struct RowPairs {
  using Codes = CodePairs<Bits>;
  static constexpr std::size_t pairs = 2 * Codes::pairs;
  static constexpr std::size_t pairs_of_part = 2;

  static constexpr std::size_t part(std::size_t pair) { return pair / pairs_of_part % Codes::parts; }

  /// The channel that lane i of a pair belongs to, for a column of bytes that begins at `at`.
  static constexpr std::size_t channel(std::size_t pair, std::size_t i, std::size_t at, std::size_t bytes) {
    return part(pair) * bytes + at + 4 * i + 2 * (pair / Codes::pairs) + pair % pairs_of_part;
  }

  /// Codes are masked but not shifted inside their byte, so they appear multiplied by this number.
  static constexpr std::size_t times(std::size_t pair) { return std::size_t{1} << part(pair) * Bits; }

  template <std::size_t Pair, class D>
  [[nodiscard]] static HWY_INLINE hn::Vec<D> take(D d, hn::Vec<D> packed) {
    const hn::Repartition<std::uint16_t, D> shorts;
    const auto mask = hn::Set(d, static_cast<std::int32_t>(Codes::levels * times(Pair) * 0x10001U));
    if constexpr (Pair % pairs_of_part == 0) return hn::And(packed, mask);
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
/// more as fill a vector; there must be row pointers up to a whole fetch_step. `weights` are those of the
/// first two pairs, which are codes of one part, `second` those of the next two, if there are any.
template <std::size_t Bits, std::size_t First, std::size_t Q, std::size_t N, std::size_t Fold, class D>
HWY_INLINE void add_codes(D d, const std::byte* const* rows, std::size_t count, std::size_t at,
                          const StepWeights<Q, Fold>& weights, const StepWeights<Q, Fold>& second,
                          PrefetchWalk& ahead, hn::Vec<D> (&sums)[Q][N]) {
  static_assert(Fold * hn::MaxLanes(D{}) == lanes);
  static_assert(fetch_step % (2 * Fold) == 0);
  using Pairs = RowPairs<Bits>;
  static_assert(First % Pairs::pairs_of_part == 0 && (N == 2 || N == 4));
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
      KVPOLICY_CPU_UNROLL
      for (std::size_t x = 0; x < N; x += Pairs::pairs_of_part) {
        const auto weight = (x == 0 ? weights : second).at(q, row);
        KVPOLICY_CPU_UNROLL
        for (std::size_t y = x; y < x + Pairs::pairs_of_part; ++y) {
          all[q][y] = add_pair_products(ints, all[q][y], codes[y], weight);
        }
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
    const std::size_t groups = most_groups(head_dim);
    return RowTileParams::scratch_floats(head_dim) + whole_lines(JoinedCodes::scratch_floats(head_dim)) +
           whole_lines(ByteCodes::scratch_floats(head_dim)) +
           queries * (room(head_dim) + groups * (weight_bytes / sizeof(float))) +
           whole_lines(queries * (3 * groups + 1));
  }

  IntegerValues(std::size_t queries, std::size_t head_dim, float* scratch)
      : count_{queries},
        head_dim_{head_dim},
        params_{head_dim, scratch},
        codes_{head_dim, scratch + RowTileParams::scratch_floats(head_dim)},
        byte_codes_{head_dim, scratch + RowTileParams::scratch_floats(head_dim) +
                                  whole_lines(JoinedCodes::scratch_floats(head_dim))} {
    const std::size_t groups = most_groups(head_dim);
    sums_ = scratch + RowTileParams::scratch_floats(head_dim) +
            whole_lines(JoinedCodes::scratch_floats(head_dim)) +
            whole_lines(ByteCodes::scratch_floats(head_dim));
    weights_ = reinterpret_cast<std::byte*>(sums_ + queries * room(head_dim));
    offsets_ = sums_ + queries * (room(head_dim) + groups * (weight_bytes / sizeof(float)));
    added_offsets_ = offsets_ + queries * groups;
    steps_ = added_offsets_ + queries * groups;
    kept_ = steps_ + queries * groups;
  }

  /// Multiplies the earlier sums, `out` included, by factors[query], and adds the rows of a row tile with
  /// weights [queries, stride], which must be 0 from `rows` up to a whole vector. Returns false and does
  /// nothing if the rows must be decoded, because they have another format or a number is not finite.
  bool add(const RowTileSide& given, std::size_t rows, const float* weights, std::size_t stride,
           const float* factors, float* out, const Prefetch& next) {
    const RowTileSide& values = byte_codes_.of(given, rows, codes_);
    const RowFormat& format = values.format;
    const std::size_t width = column_bytes(format);
    if (width == 0) return false;
    const float middle = middle_code(format.encoding);
    const std::size_t groups = head_dim_ / format.group;
    if (!params_.load(values, rows, groups, middle)) return false;
    if (format != format_) flush(out);
    for (std::size_t q = 0; q < count_; ++q) {
      if (!round_weights(q, groups, rows, weights + q * stride, middle)) return false;
    }
    if (!pending_) start(format);
    for (std::size_t q = 0; q < count_; ++q) {
      for (std::size_t g = 0; g < groups; ++g) {
        float& offset = offsets_[q * groups + g];
        offset = offset * factors[q] + added_offsets_[q * groups + g];
      }
      kept_[q] *= factors[q];
    }
    std::array<const std::byte*, max_tile_rows> codes;  // up to a whole fetch_step
    static_assert(max_tile_rows % fetch_step == 0);
    std::copy_n(codes_.of(values, rows), rows, codes.begin());
    for (std::size_t row = rows; row % fetch_step != 0; ++row) codes[row] = codes[rows - 1];
    with_bits(format.encoding, [&]<std::size_t Bits>() KVPOLICY_CPU_LAMBDA {
      const std::size_t bytes = head_dim_ * Bits / 8;
      std::size_t passes = 0;
      for_each_column(bytes, width, [&](auto, std::size_t, std::size_t) KVPOLICY_CPU_LAMBDA {
        passes += RowPairs<Bits>::pairs / pairs_at_once;
      });
      passes *= (count_ + query_portion - 1) / query_portion;
      PrefetchWalk ahead{next, (rows + fetch_step - 1) / fetch_step * passes};
      const auto add_columns = [&]<std::size_t Q, std::size_t Weights>(std::size_t q) KVPOLICY_CPU_LAMBDA {
        for_each_column(
            bytes, width, [&]<class D>(D d, std::size_t at, std::size_t covered) KVPOLICY_CPU_LAMBDA {
              add_column<Bits, Q, Weights>(d, codes.data(), rows, at, q,
                                           sums_ + q * room(head_dim_) + covered * 8 / Bits, factors, ahead);
            });
      };
      for_each_portion<query_portion>(count_, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
        if (groups == 1) {
          add_columns.template operator()<Q, 1>(q);
        } else {
          add_columns.template operator()<Q, 8 / Bits>(q);
        }
      });
    });
    return true;
  }

  /// Adds all pending sums to out [queries, head_dim]. Needed before other code rescales or reads `out`.
  void flush(float* out) {
    if (!pending_) return;
    pending_ = false;
    const std::size_t groups = head_dim_ / format_.group;
    for (std::size_t q = 0; q < count_; ++q) {
      for (std::size_t i = 0; i < head_dim_; ++i) {
        float& number = out[q * head_dim_ + i];
        number = number * kept_[q] + offsets_[q * groups + i / format_.group];
      }
    }
    with_bits(format_.encoding, [&]<std::size_t Bits>() KVPOLICY_CPU_LAMBDA {
      const std::size_t bytes = head_dim_ * Bits / 8;
      for_each_column(bytes, column_bytes(format_),
                      [&]<class D>(D, std::size_t at, std::size_t covered)
                          KVPOLICY_CPU_LAMBDA { flush_column<Bits>(hn::MaxLanes(D{}), at, covered, out); });
    });
  }

 private:
  static constexpr std::size_t weight_bytes = max_tile_rows * sizeof(std::int16_t);
  static constexpr std::size_t query_portion = 4;
  static constexpr std::size_t pairs_at_once = many_registers ? 4 : 2;

  /// Room for every code of a row, and for those that an overlapping last step takes twice.
  [[nodiscard]] static std::size_t room(std::size_t head_dim) { return head_dim + 4 * code_step; }
  [[nodiscard]] static std::size_t most_groups(std::size_t head_dim) {
    return std::max<std::size_t>(head_dim / RowTileParams::smallest_group, 1);
  }

  // Bytes of the widest column whose codes have one scale in each part of their bytes; 0 if there is none, or
  // another reason to decode such rows.
  [[nodiscard]] std::size_t column_bytes(const RowFormat& format) const {
    if (!has_code_steps(format, head_dim_) || format.granularity != Granularity::per_token) return 0;
    if (format.group == head_dim_) return 4 * lanes;
    const std::size_t bytes = code_bytes(format.encoding, head_dim_);
    for (std::size_t width = 4 * lanes; width >= code_step; width /= 2) {
      if (format.group % width == 0 && bytes % width == 0) return width;
    }
    return 0;
  }

  void start(const RowFormat& format) {
    pending_ = true;
    format_ = format;
    std::fill_n(sums_, count_ * room(head_dim_), 0.0F);
    std::fill_n(offsets_, count_ * (head_dim_ / format.group), 0.0F);
    std::fill_n(kept_, count_, 1.0F);
  }

  // Rounds query q's weights times the rows' scales to 16 bits, for each group; false if one is not finite. Four
  // groups at once share the loads, and the sums across lanes at the end.
  bool round_weights(std::size_t q, std::size_t groups, std::size_t rows, const float* weights,
                     float middle) {
    bool finite = true;
    for (std::size_t g = 0; g < groups; g += 4) {
      const auto round = [&]<std::size_t N>() KVPOLICY_CPU_LAMBDA {
        finite = finite && round_groups<N>(q, groups, g, rows, weights, middle);
      };
      switch (groups - g) {
        case 1: round.template operator()<1>(); break;
        case 2: round.template operator()<2>(); break;
        case 3: round.template operator()<3>(); break;
        default: round.template operator()<4>();
      }
    }
    return finite;
  }

  template <std::size_t N>
  HWY_INLINE bool round_groups(std::size_t q, std::size_t groups, std::size_t g, std::size_t rows,
                               const float* weights, float middle) {
    FloatVector highest[4];
    FloatVector at_middle[4];
    FloatVector rounded_sums[4];
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < 4; ++i) highest[i] = at_middle[i] = rounded_sums[i] = zero_vector();
    for (std::size_t row = 0; row < rows; row += lanes) {
      const auto weight = hn::LoadU(floats, weights + row);
      KVPOLICY_CPU_UNROLL
      for (std::size_t i = 0; i < N; ++i) {
        const auto x = hn::Mul(weight, hn::LoadU(floats, params_.scales(g + i) + row));
        highest[i] = hn::Max(highest[i], hn::Abs(x));
        at_middle[i] = hn::MulAdd(weight, hn::LoadU(floats, params_.middles(g + i) + row), at_middle[i]);
      }
    }
    float most[4];
    float added[4];
    store_sums(at_middle[0], at_middle[1], at_middle[2], at_middle[3], added);
    store_highest(highest[0], highest[1], highest[2], highest[3], most);
    FloatVector inverse[N];
    float* steps = steps_ + q * groups + g;
    for (std::size_t i = 0; i < N; ++i) {
      if (!std::isfinite(added[i])) return false;
      const bool counts = most[i] > 1e-30F;  // so that its inverse is finite
      inverse[i] = hn::Set(floats, counts ? 32767.0F / most[i] : 0.0F);
      steps[i] = counts ? most[i] / 32767.0F : 0.0F;
    }
    const hn::Rebind<std::int16_t, Floats> shorts;
    const auto weights_of = [&](std::size_t i) KVPOLICY_CPU_LAMBDA {
      return reinterpret_cast<std::int16_t*>(weights_ + (q + (g + i) * count_) * weight_bytes);
    };
    for (std::size_t i = 0; i < N; ++i) {
      for (std::size_t row = rows; row % fetch_step != 0; ++row) weights_of(i)[row] = 0;
    }
    // Added to a number, it leaves the nearest whole one in the lowest bits. (hn::NearestInt also saturates.)
    const auto magic = hn::Set(floats, 0x1.8p23F);
    for (std::size_t row = 0; row < rows; row += lanes) {
      const auto weight = hn::LoadU(floats, weights + row);
      KVPOLICY_CPU_UNROLL
      for (std::size_t i = 0; i < N; ++i) {
        // In the order of the first loop: a product of the weight and the inverse might overflow.
        const auto x = hn::Mul(weight, hn::LoadU(floats, params_.scales(g + i) + row));
        const auto shifted = hn::MulAdd(x, inverse[i], magic);
        rounded_sums[i] = hn::Add(rounded_sums[i], hn::Sub(shifted, magic));
        const auto rounded = hn::Sub(hn::BitCast(ints, shifted), hn::BitCast(ints, magic));
        hn::StoreU(hn::DemoteTo(shorts, rounded), shorts, weights_of(i) + row);
      }
    }
    float rounded_sum[4];
    store_sums(rounded_sums[0], rounded_sums[1], rounded_sums[2], rounded_sums[3], rounded_sum);
    for (std::size_t i = 0; i < N; ++i) {
      added_offsets_[q * groups + g + i] = added[i] - middle * (steps[i] * rounded_sum[i]);
    }
    return true;
  }

  // Calls visit(tag, first byte, bytes of the row that earlier columns have covered): for columns of `widest` bytes
  // as long as they fit, then for shorter ones; the last column overlaps the one before where no whole one is left.
  template <class Visit>
  static HWY_INLINE void for_each_column(std::size_t bytes, std::size_t widest, Visit visit) {
    std::size_t at = 0;
    const auto take = [&]<class D>(D d) KVPOLICY_CPU_LAMBDA {
      constexpr std::size_t width = 4 * hn::MaxLanes(D{});
      if (width > widest) return;
      for (; at + width <= bytes; at += width) visit(d, at, at);
    };
    if constexpr (lanes > 8) take(ints);
    if constexpr (lanes > 4) take(hn::CappedTag<std::int32_t, 8>{});
    for (; at < bytes; at += code_step) {
      visit(hn::CappedTag<std::int32_t, 4>{}, std::min(at, bytes - code_step), at);
    }
  }

  // Adds a column of bytes. `Weights` is 1 if all codes of a byte have the same scale, else their number.
  template <std::size_t Bits, std::size_t Q, std::size_t Weights, class D>
  HWY_INLINE void add_column(D d, const std::byte* const* codes, std::size_t rows, std::size_t at,
                             std::size_t q, float* sums, const float* factors, PrefetchWalk& ahead) const {
    constexpr std::size_t width = hn::MaxLanes(D{});
    constexpr std::size_t at_once = pairs_at_once;
    const hn::Rebind<float, D> numbers;
    using Own = StepWeights<Q, lanes / width>;
    const std::size_t groups = head_dim_ / format_.group;
    std::size_t group_of[Weights];
    for (std::size_t part = 0; part < Weights; ++part) {
      group_of[part] = groups == 1 ? 0 : (part * (head_dim_ * Bits / 8) + at) / format_.group;
    }
    const auto weights_of = [&](std::size_t part) KVPOLICY_CPU_INLINE_LAMBDA {
      return Own{weights_ + (q + group_of[part] * count_) * weight_bytes, weight_bytes, rows};
    };
    const auto add = [&](auto weights) KVPOLICY_CPU_INLINE_LAMBDA {
      unroll<RowPairs<Bits>::pairs / at_once>([&](auto pass) KVPOLICY_CPU_INLINE_LAMBDA {
        constexpr std::size_t first = pass * at_once;
        hn::Vec<D> products[Q][at_once];
        constexpr std::integral_constant<std::size_t, RowPairs<Bits>::part(first)> part;
        constexpr std::integral_constant<std::size_t, RowPairs<Bits>::part(first + at_once - 1)> last_part;
        add_codes<Bits, first>(d, codes, rows, at, weights(part), weights(last_part), ahead, products);
        KVPOLICY_CPU_UNROLL
        for (std::size_t i = 0; i < Q; ++i) {
          const auto factor = hn::Set(numbers, factors[q + i]);
          float* own = sums + i * room(head_dim_) + first * width;
          KVPOLICY_CPU_UNROLL
          for (std::size_t x = 0; x < at_once; ++x) {
            const auto times = static_cast<float>(RowPairs<Bits>::times(first + x));
            const std::size_t group = group_of[Weights == 1 ? 0 : RowPairs<Bits>::part(first + x)];
            const float unit = steps_[(q + i) * groups + group];
            const auto step = hn::Set(numbers, unit / times);
            const auto old = hn::Mul(hn::LoadU(numbers, own + x * width), factor);
            hn::StoreU(hn::MulAdd(hn::ConvertTo(numbers, products[i][x]), step, old), numbers,
                       own + x * width);
          }
        }
      });
    };
    const Own own = weights_of(0);
    if constexpr (Weights == 1) {
      add([&](auto) KVPOLICY_CPU_INLINE_LAMBDA -> const Own& { return own; });
    } else if constexpr (Weights == 2) {
      const Own second = weights_of(1);
      add([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA -> const Own& { return part == 0 ? own : second; });
    } else {
      static_assert(Weights == 4);
      const Own second = weights_of(1);
      const Own third = weights_of(2);
      const Own fourth = weights_of(3);
      add([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA -> const Own& {
        return part == 0 ? own : part == 1 ? second : part == 2 ? third : fourth;
      });
    }
  }

  // Adds the sums of a column of `width` vector lanes to the channels that no earlier column has covered.
  template <std::size_t Bits>
  HWY_NOINLINE void flush_column(std::size_t width, std::size_t at, std::size_t covered, float* out) const {
    const std::size_t bytes = head_dim_ * Bits / 8;
    for (std::size_t pair = 0; pair < RowPairs<Bits>::pairs; ++pair) {
      for (std::size_t i = 0; i < width; ++i) {
        const std::size_t channel = RowPairs<Bits>::channel(pair, i, at, bytes);
        if (channel % bytes < covered) continue;
        const float* sum = sums_ + covered * 8 / Bits + pair * width + i;
        for (std::size_t q = 0; q < count_; ++q) {
          out[q * head_dim_ + channel] += sum[q * room(head_dim_)];
        }
      }
    }
  }

  std::size_t count_;
  std::size_t head_dim_;
  RowTileParams params_;
  JoinedCodes codes_;
  ByteCodes byte_codes_;
  bool pending_ = false;
  RowFormat format_ = {};  // of the pending sums
  float* sums_;            // [queries, room]: columns of pairs of lanes
  std::byte* weights_;     // [groups, queries, max_tile_rows] of 16 bits
  float* offsets_;         // [queries, groups]: added to every channel of the group
  float* added_offsets_;   // [queries, groups], of the current row tile
  float* steps_;           // [queries, groups]: one unit of the rounded weights
  float* kept_;            // [queries]: what remains to be multiplied into `out`
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
