// SPDX-License-Identifier: Apache-2.0
//
// Logits of quantised keys as integer products: the query is rounded to 16 bits once, and the codes are not
// changed. With one scale and zero per row (q, c: query and codes, n: the rounded query)
//
//   q . (scale * c + zero) = scale * (q . c) + zero * sum(q),  q . c ~ s * (n . c),  q ~ s * n,
//
// and with several groups in a row the same for each group (grouped_keys-inl.hpp). If rows share a scale and zero
// per channel (KIVI), these are multiplied into the query first, once for each run of rows that shares them. The
// lanes are 16 or 8 rows, so no sum crosses lanes.
//
// Error: rounding changes a channel of the query by s / 2 at most, where s is its largest channel divided
// by 32767; codes count from their middle, because sum(q) - s * sum(n) is added exactly. The error of a
// logit is less than 3 % of what rounding the keys to 8 bits cost it (root mean square, at worst, for a
// head of 128; 0.2 % for 4 bits), about 2e-5 for numbers of standard deviation 1. No sum exceeds 32 bits:
// for heads with more than 257 channels the query is rounded to fewer bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvpolicy/cpu/byte_codes-inl.hpp>
#include <kvpolicy/cpu/grouped_keys-inl.hpp>
#include <kvpolicy/cpu/packed_codes-inl.hpp>
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_params-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS  // otherwise integer_rows-inl.hpp declares the names
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// sums[q][r], lane i = query q . codes of row r * lanes + i, for Q queries and R * lanes rows. Queries are
/// 16-bit numbers, `query_bytes` apart; in each group of four the middle two are exchanged.
template <std::size_t Bits, std::size_t Q, std::size_t R>
HWY_INLINE void dot_codes(const std::byte* const* rows, std::size_t bytes, const std::byte* queries,
                          std::size_t query_bytes, PrefetchWalk& ahead, IntVector (&sums)[Q][R]) {
  using Pairs = CodePairs<Bits>;
  KVPOLICY_CPU_UNROLL
  for (auto& of_query : sums) {
    KVPOLICY_CPU_UNROLL
    for (IntVector& sum : of_query) sum = hn::Zero(ints);
  }
  for (std::size_t step = 0; step < bytes; step += code_step) {
    ahead.step();
    const std::size_t at = std::min(step, bytes - code_step);
    IntVector columns[R][4];
    KVPOLICY_CPU_UNROLL
    for (std::size_t r = 0; r < R; ++r) load_columns(rows + r * lanes, at, columns[r]);
    if (HWY_UNLIKELY(at != step)) {  // these columns were taken in the step before
      KVPOLICY_CPU_UNROLL
      for (std::size_t k = 0; k < 3; ++k) {
        if (at + 4 * k >= step) continue;
        KVPOLICY_CPU_UNROLL
        for (std::size_t r = 0; r < R; ++r) columns[r][k] = hn::Zero(ints);
      }
    }
    KVPOLICY_CPU_UNROLL
    for (std::size_t k = 0; k < 4; ++k) {
      unroll<Pairs::pairs>([&](auto pair) KVPOLICY_CPU_INLINE_LAMBDA {
        IntVector codes[R];
        KVPOLICY_CPU_UNROLL
        for (std::size_t r = 0; r < R; ++r) codes[r] = Pairs::template take<pair>(ints, columns[r][k]);
        // A number has two bytes; the pair of bytes 0 and 2 comes before that of bytes 1 and 3.
        const std::byte* numbers =
            queries + 2 * (Pairs::part(pair) * bytes + at + 4 * k) + 4 * Pairs::byte(pair);
        KVPOLICY_CPU_UNROLL
        for (std::size_t q = 0; q < Q; ++q) {
          const auto number = broadcast_pair(ints, numbers + q * query_bytes);
          KVPOLICY_CPU_UNROLL
          for (std::size_t r = 0; r < R; ++r) {
            sums[q][r] = add_pair_products(ints, sums[q][r], codes[r], number);
          }
        }
      });
    }
  }
}

/// Multiplies the queries of a tile with row tiles of quantised keys.
class IntegerKeys {
 public:
  [[nodiscard]] static std::size_t scratch_floats(std::size_t queries, std::size_t head_dim) {
    return RowTileParams::scratch_floats(head_dim) + GroupedKeys::scratch_floats(queries, head_dim) +
           whole_lines(JoinedCodes::scratch_floats(head_dim)) +
           whole_lines(ByteCodes::scratch_floats(head_dim)) + 2 * queries * head_dim +
           query_portion * head_dim + whole_lines(2 * rounded_floats * queries);
  }

  IntegerKeys(std::size_t queries, std::size_t head_dim, float* scratch)
      : count_{queries},
        head_dim_{head_dim},
        params_{head_dim, scratch},
        grouped_{queries, head_dim, scratch + RowTileParams::scratch_floats(head_dim)},
        codes_{head_dim, scratch + RowTileParams::scratch_floats(head_dim) +
                             GroupedKeys::scratch_floats(queries, head_dim)},
        byte_codes_{head_dim, scratch + RowTileParams::scratch_floats(head_dim) +
                                  GroupedKeys::scratch_floats(queries, head_dim) +
                                  whole_lines(JoinedCodes::scratch_floats(head_dim))} {
    scratch += RowTileParams::scratch_floats(head_dim) + GroupedKeys::scratch_floats(queries, head_dim) +
               whole_lines(JoinedCodes::scratch_floats(head_dim)) +
               whole_lines(ByteCodes::scratch_floats(head_dim));
    const auto take = [&](std::size_t floats_taken) {
      float* taken = scratch;
      scratch += floats_taken;
      return taken;
    };
    deinterleaved_ = take(queries * head_dim);
    products_ = take(query_portion * head_dim);
    for (Set* set : {&plain_, &scaled_}) {
      set->numbers = reinterpret_cast<std::byte*>(take(queries * head_dim / 2));
    }
    for (Set* set : {&plain_, &scaled_}) set->rounded = take(queries * rounded_floats);
  }

  /// Sets the queries [queries, head_dim] for the row tiles that follow. Null: there are none, and
  /// `compute_logits` returns false.
  void set_queries(const float* queries) {
    queries_ = queries;
    state_ = queries == nullptr ? State::unusable : State::unknown;
    has_deinterleaved_ = false;
    grouped_.forget_queries();
  }

  /// Writes logits[q * stride + row], which needs room up to a multiple of the lanes after `rows`. Returns
  /// false if the rows must be decoded first, because they have another format or a number is not finite.
  bool compute_logits(const RowTileSide& given, std::size_t rows, float* logits, std::size_t stride,
                      const Prefetch& values) {
    if (state_ == State::unusable) return false;
    const RowTileSide& keys = byte_codes_.of(given, rows, codes_);
    if (!has_code_steps(keys.format, head_dim_)) return false;
    const std::size_t vectors = (rows + lanes - 1) / lanes;
    const std::size_t steps = code_bytes(keys.format.encoding, head_dim_) / code_step;
    const std::size_t portions = (count_ + query_portion - 1) / query_portion;
    PrefetchWalk ahead{values, (many_registers ? (vectors + 1) / 2 : vectors) * steps * portions};
    bool done = false;
    with_bits(keys.format.encoding, [&]<std::size_t Bits>() KVPOLICY_CPU_LAMBDA {
      if (keys.format.granularity == Granularity::per_channel) {
        if (keys.format.group < fewest_rows) return;
        done = per_channel<Bits>(keys, rows, logits, stride, ahead);
      } else if (keys.format.group == head_dim_) {
        done = per_token<Bits>(keys, rows, logits, stride, ahead);
      } else if (GroupedKeys::takes(keys.format, head_dim_)) {
        done = per_group<Bits>(keys, rows, logits, stride, values);
      }
    });
    return done;
  }

 private:
  static constexpr std::size_t query_portion = 4;

  /// If fewer rows share a scale, decoding them is less work than rounding the queries for each run.
  static constexpr std::size_t fewest_rows = 8;

  enum class State { unknown, usable, unusable };

  // One query in 16 bits: number ~ scale * rounded number.
  struct Rounded {
    float scale;
    float sum;          // of the numbers; per channel: of their products with middle codes and zeros
    float rounded_sum;  // of scale * rounded numbers
  };
  static constexpr std::size_t rounded_floats = 3;
  // All queries: numbers [queries, head_dim] of 16 bits, and a Rounded for each query.
  struct Set {
    std::byte* numbers;
    float* rounded;

    [[nodiscard]] Rounded query(std::size_t q) const {
      const float* at = rounded + rounded_floats * q;
      return {at[0], at[1], at[2]};
    }
    void set(std::size_t q, const Rounded& query) const {
      const float all[rounded_floats] = {query.scale, query.sum, query.rounded_sum};
      std::copy_n(all, rounded_floats, rounded + rounded_floats * q);
    }
  };

  // Demoting two vectors of 32 bits to one of 16 bits interleaves their groups of four. For a result in
  // order the channels must be deinterleaved before: of each 2 * lanes channels the even groups of four
  // first, then the odd ones. Channels after the last whole two vectors stay in order.
  [[nodiscard]] std::size_t deinterleaved_channels() const { return head_dim_ / (2 * lanes) * (2 * lanes); }

  void deinterleave_queries() {
    if (has_deinterleaved_) return;
    has_deinterleaved_ = true;
    for (std::size_t q = 0; q < count_; ++q) {
      const float* from = queries_ + q * head_dim_;
      float* to = deinterleaved_ + q * head_dim_;
      std::copy(from + deinterleaved_channels(), from + head_dim_, to + deinterleaved_channels());
      for (std::size_t channel = 0; channel < deinterleaved_channels(); channel += 4) {
        const std::size_t four = channel % (2 * lanes) / 4;
        const std::size_t to_channel = (four / 2 + four % 2 * (lanes / 4)) * 4;
        std::copy_n(from + channel, 4, to + channel / (2 * lanes) * (2 * lanes) + to_channel);
      }
    }
  }
  [[nodiscard]] static HWY_INLINE VectorPair load_deinterleaved(const float16* from) {
    const hn::ScalableTag<std::uint64_t> fours;
    const auto all = hn::LoadU(fours, reinterpret_cast<const std::uint64_t*>(from));
    alignas(64) std::uint64_t even[hn::MaxLanes(fours)];
    alignas(64) std::uint64_t odd[hn::MaxLanes(fours)];
    hn::Store(hn::ConcatEven(fours, all, all), fours, even);
    hn::Store(hn::ConcatOdd(fours, all, all), fours, odd);
    return {load_half(even), load_half(odd)};
  }

  // Writes queries [q, q + Q) into `set`; if Scaled, times the scales of a run of rows. Returns false if a
  // number is not finite. It works on Q queries at once, because a single one would wait for its own sums.
  template <bool Scaled, std::size_t Q>
  HWY_INLINE bool round_queries(const Set& set, std::size_t q, const float16* row_scales,
                                const float16* row_zeros, float middle) const {
    const std::size_t head_dim = head_dim_;
    const std::size_t whole = deinterleaved_channels();
    const float* queries = deinterleaved_ + q * head_dim;
    FloatVector highest[Q];
    FloatVector sums[4];
    KVPOLICY_CPU_UNROLL
    for (FloatVector& most : highest) most = zero_vector();
    KVPOLICY_CPU_UNROLL
    for (FloatVector& sum : sums) sum = zero_vector();
    const auto look_at = [&](std::size_t channel, auto scale, auto zero) KVPOLICY_CPU_INLINE_LAMBDA {
      const auto at_middle = hn::MulAdd(scale, hn::Set(floats, middle), zero);
      KVPOLICY_CPU_UNROLL
      for (std::size_t i = 0; i < Q; ++i) {
        const auto number = hn::LoadU(floats, queries + i * head_dim + channel);
        auto product = number;
        if constexpr (Scaled) {
          product = hn::Mul(number, scale);
          hn::StoreU(product, floats, products_ + i * head_dim + channel);
          sums[i] = hn::MulAdd(number, at_middle, sums[i]);
        } else {
          sums[i] = hn::Add(sums[i], number);
        }
        highest[i] = hn::Max(highest[i], hn::Abs(product));
      }
    };
    for (std::size_t channel = 0; channel < whole; channel += 2 * lanes) {
      VectorPair scales{zero_vector(), zero_vector()};
      VectorPair zeros = scales;
      if constexpr (Scaled) {
        scales = load_deinterleaved(row_scales + channel);
        zeros = load_deinterleaved(row_zeros + channel);
      }
      look_at(channel, scales.first, zeros.first);
      look_at(channel + lanes, scales.second, zeros.second);
    }
    if (whole < head_dim) {
      look_at(whole, Scaled ? load_half(row_scales + whole) : zero_vector(),
              Scaled ? load_half(row_zeros + whole) : zero_vector());
    }
    float sum[4];
    store_sums(sums[0], sums[1], sums[2], sums[3], sum);
    const float amplitude = static_cast<float>(
        std::min<std::size_t>(32767, std::numeric_limits<std::int32_t>::max() / (255 * head_dim)));
    float scale[Q];
    FloatVector inverse[Q];
    IntVector rounded_sums[Q];
    bool finite = true;
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < Q; ++i) {
      finite = finite && std::isfinite(sum[i]);
      const float most = hn::GetLane(hn::MaxOfLanes(floats, highest[i]));
      const bool counts = most > 1e-30F;  // so that its inverse is finite
      inverse[i] = hn::Set(floats, counts ? amplitude / most : 0.0F);
      scale[i] = counts ? most / amplitude : 0.0F;
      rounded_sums[i] = hn::Zero(ints);
    }
    if (!finite) return false;
    const float* products = Scaled ? products_ : queries;
    auto* numbers = set.numbers + 2 * q * head_dim;
    const auto round = [&](std::size_t at, std::size_t i) KVPOLICY_CPU_INLINE_LAMBDA {
      return hn::NearestInt(hn::Mul(hn::LoadU(floats, products + at), inverse[i]));
    };
    for (std::size_t channel = 0; channel < whole; channel += 2 * lanes) {
      KVPOLICY_CPU_UNROLL
      for (std::size_t i = 0; i < Q; ++i) {
        const std::size_t at = i * head_dim + channel;
        const hn::Repartition<std::int16_t, Ints> shorts;
        const auto narrow = hn::ReorderDemote2To(shorts, round(at, i), round(at + lanes, i));
        rounded_sums[i] =
            add_pair_products(ints, rounded_sums[i], hn::BitCast(ints, narrow), hn::Set(ints, 0x10001));
        store_exchanged(shorts, narrow, numbers + 2 * at);
      }
    }
    if (whole < head_dim) {
      KVPOLICY_CPU_UNROLL
      for (std::size_t i = 0; i < Q; ++i) {
        const hn::Rebind<std::int16_t, Floats> shorts;
        const auto x = round(i * head_dim + whole, i);
        rounded_sums[i] = hn::Add(rounded_sums[i], x);
        store_exchanged(shorts, hn::DemoteTo(shorts, x), numbers + 2 * (i * head_dim + whole));
      }
    }
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < Q; ++i) {
      const auto rounded_sum = static_cast<float>(hn::GetLane(hn::SumOfLanes(ints, rounded_sums[i])));
      set.set(q + i, {scale[i], sum[i], scale[i] * rounded_sum});
    }
    return true;
  }

  // Stores numbers with the middle two of each group of four exchanged.
  template <class D>
  static HWY_INLINE void store_exchanged(D, hn::Vec<D> numbers, std::byte* to) {
    const hn::Repartition<std::uint8_t, D> bytes;
    alignas(16) static constexpr std::uint8_t exchange[16] = {0, 1, 4,  5,  2,  3,  6,  7,
                                                              8, 9, 12, 13, 10, 11, 14, 15};
    const auto order = hn::LoadDup128(bytes, exchange);
    hn::StoreU(hn::TableLookupBytes(hn::BitCast(bytes, numbers), order), bytes,
               reinterpret_cast<std::uint8_t*>(to));
  }

  template <bool Scaled>
  bool round_all_queries(const Set& set, const float16* row_scales, const float16* row_zeros, float middle) {
    deinterleave_queries();
    bool finite = true;
    for_each_portion<query_portion>(count_, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
      finite = finite && round_queries<Scaled, Q>(set, q, row_scales, row_zeros, middle);
    });
    return finite;
  }

  // Rounds the queries, not scaled, and loads the scales of the rows; returns false if a number is not finite.
  bool prepare(const RowTileSide& keys, std::size_t rows) {
    if (state_ == State::unknown) {
      state_ = round_all_queries<false>(plain_, nullptr, nullptr, 0.0F) ? State::usable : State::unusable;
    }
    return state_ == State::usable &&
           params_.load(keys, rows, head_dim_ / keys.format.group, middle_code(keys.format.encoding));
  }

  template <std::size_t Bits>
  bool per_token(const RowTileSide& keys, std::size_t rows, float* logits, std::size_t stride,
                 PrefetchWalk& ahead) {
    if (!prepare(keys, rows)) return false;
    multiply<Bits>(plain_, codes_.of(keys, rows), rows, middle_code(keys.format.encoding), &params_, logits,
                   stride, ahead);
    return true;
  }

  template <std::size_t Bits>
  bool per_group(const RowTileSide& keys, std::size_t rows, float* logits, std::size_t stride,
                 const Prefetch& next) {
    if (!prepare(keys, rows)) return false;
    grouped_.multiply<Bits>(
        keys.format, codes_.of(keys, rows), rows, params_, queries_, plain_.numbers,
        [&](std::size_t q) { return plain_.query(q).scale; }, logits, stride, next);
    return true;
  }

  template <std::size_t Bits>
  bool per_channel(const RowTileSide& keys, std::size_t rows, float* logits, std::size_t stride,
                   PrefetchWalk& ahead) {
    const std::byte* const* codes = codes_.of(keys, rows);
    const float middle = middle_code(keys.format.encoding);
    for (std::size_t first = 0; first < rows;) {
      const std::size_t end = end_of_equal(keys.scales.data(), first, rows);
      if (!round_all_queries<true>(scaled_, keys.scales[first], keys.zeros[first], middle)) {
        return false;
      }
      // A vector may write past the run's rows; the next run overwrites that.
      multiply<Bits>(scaled_, codes + first, end - first, middle, nullptr, logits + first, stride, ahead);
      first = end;
    }
    return true;
  }

  // The end of the pointers that equal pointers[first].
  [[nodiscard]] static HWY_INLINE std::size_t end_of_equal(const float16* const* pointers, std::size_t first,
                                                           std::size_t count) {
    const hn::ScalableTag<std::uint64_t> longs;
    static_assert(sizeof(pointers) == sizeof(std::uint64_t));
    const auto wanted = hn::Set(longs, reinterpret_cast<std::uint64_t>(pointers[first]));
    const auto equal = [&](std::size_t at) KVPOLICY_CPU_INLINE_LAMBDA {
      const auto* some = reinterpret_cast<const std::uint64_t*>(pointers + at);
      return hn::AllTrue(longs, hn::Eq(hn::LoadU(longs, some), wanted));
    };
    std::size_t end = first;
    while (end + hn::MaxLanes(longs) <= count && equal(end)) end += hn::MaxLanes(longs);
    while (end < count && pointers[end] == pointers[first]) ++end;
    return end;
  }

  // out[q * stride + row] = query q . row; codes count from `middle`. `params` are the scales and zeros of the rows;
  // null: they were multiplied into the query. Rows are processed in whole vectors.
  template <std::size_t Bits>
  void multiply(const Set& set, const std::byte* const* rows, std::size_t count, float middle,
                const RowTileParams* params, float* out, std::size_t stride, PrefetchWalk& ahead) const {
    const std::size_t bytes = head_dim_ * Bits / 8;
    std::array<const std::byte*, max_tile_rows + lanes> padded;
    if (count % lanes != 0) {  // pads the pointers to a whole vector with the last row
      std::copy_n(rows, count, padded.begin());
      std::fill_n(padded.begin() + static_cast<std::ptrdiff_t>(count), lanes - 1, rows[count - 1]);
      rows = padded.data();
    }
    for_each_portion<query_portion>(count_, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
      const auto take_rows = [&]<std::size_t R>(std::size_t row) KVPOLICY_CPU_LAMBDA {
        IntVector sums[Q][R];
        dot_codes<Bits>(rows + row, bytes, set.numbers + 2 * q * head_dim_, 2 * head_dim_, ahead, sums);
        KVPOLICY_CPU_UNROLL
        for (std::size_t i = 0; i < Q; ++i) {
          const Rounded query = set.query(q + i);
          const auto scale = hn::Set(floats, query.scale);
          // Of scaled queries the sum has the middle codes and zeros in it.
          const auto offset =
              hn::Set(floats, (params == nullptr ? query.sum : 0.0F) - middle * query.rounded_sum);
          KVPOLICY_CPU_UNROLL
          for (std::size_t r = 0; r < R; ++r) {
            const std::size_t at = row + r * lanes;
            auto logits = hn::MulAdd(hn::ConvertTo(floats, sums[i][r]), scale, offset);
            if (params != nullptr) {
              const auto middles = hn::LoadU(floats, params->middles(0) + at);
              logits = hn::MulAdd(logits, hn::LoadU(floats, params->scales(0) + at),
                                  hn::Mul(middles, hn::Set(floats, query.sum)));
            }
            hn::StoreU(logits, floats, out + (q + i) * stride + at);
          }
        }
      };
      std::size_t row = 0;
      if constexpr (many_registers) {
        for (; row + lanes < count; row += 2 * lanes) take_rows.template operator()<2>(row);
      }
      for (; row < count; row += lanes) take_rows.template operator()<1>(row);
    });
  }

  std::size_t count_;
  std::size_t head_dim_;
  RowTileParams params_;
  GroupedKeys grouped_;
  JoinedCodes codes_;
  ByteCodes byte_codes_;
  const float* queries_ = nullptr;
  float* deinterleaved_ = nullptr;  // [queries, head_dim], if has_deinterleaved_
  float* products_ = nullptr;       // [query_portion, head_dim]
  bool has_deinterleaved_ = false;
  State state_ = State::unusable;
  Set plain_;
  Set scaled_;
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
