// SPDX-License-Identifier: Apache-2.0
//
// Logits of quantised keys as integer products: the query is rounded to 16 bits once, the codes
// stay what they are. With one scale and zero per row (q, c: query and codes, n: the rounded query)
//
//   q . (scale * c + zero) = scale * (q . c) + zero * sum(q),  q . c ~ s * (n . c),  q ~ s * n,
//
// and where rows share a scale and zero per channel (KIVI), these go into the query first, once for
// each such run of rows. 16 or 8 rows are the lanes, so no sum ever crosses lanes.
//
// Error: rounding moves a channel of the query by s / 2 at most, s being its largest divided by
// 32767; codes count from their middle, since sum(q) - s * sum(n) is made good. A logit is off by
// less than 3 % of what rounding the keys to 8 bits cost it (root mean square, at worst, for a head
// of 128; 0.2 % for 4 bits), about 2e-5 for numbers of a deviation of 1. No sum leaves 32 bits: for
// heads beyond 257 channels the query is rounded to fewer bits accordingly.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvpolicy/cpu/packed_codes-inl.hpp>
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_block-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS  // elsewhere integer_rows-inl.hpp has the names, for nothing
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// sums[q][r], lane i = query q . codes of row r * lanes + i, for Q queries of R * lanes rows.
/// Queries are 16-bit numbers, in each four the middle ones exchanged, `query_bytes` apart.
template <std::size_t Bits, std::size_t Q, std::size_t R>
HWY_INLINE void dot_codes(const std::byte* const* rows, std::size_t bytes, const std::byte* queries,
                          std::size_t query_bytes, PrefetchWalk& ahead, IntVector (&sums)[Q][R]) {
  using Pairs = CodePairs<Bits>;
  unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
    unroll<R>([&](auto r) KVPOLICY_CPU_INLINE_LAMBDA { sums[q][r] = hn::Zero(ints); });
  });
  for (std::size_t step = 0; step < bytes; step += code_step) {
    ahead.step();
    const std::size_t at = std::min(step, bytes - code_step);
    IntVector columns[R][4];
    unroll<R>([&](auto r) KVPOLICY_CPU_INLINE_LAMBDA {
      load_columns(rows + r * lanes, at, columns[r]);
    });
    if (HWY_UNLIKELY(at != step)) {  // columns that the step before has taken
      unroll<3>([&](auto k) KVPOLICY_CPU_INLINE_LAMBDA {
        if (at + 4 * k >= step) return;
        unroll<R>([&](auto r) KVPOLICY_CPU_INLINE_LAMBDA { columns[r][k] = hn::Zero(ints); });
      });
    }
    unroll<4>([&](auto k) KVPOLICY_CPU_INLINE_LAMBDA {
      unroll<Pairs::pairs>([&](auto pair) KVPOLICY_CPU_INLINE_LAMBDA {
        IntVector codes[R];
        unroll<R>([&](auto r) KVPOLICY_CPU_INLINE_LAMBDA {
          codes[r] = Pairs::template take<pair>(ints, columns[r][k]);
        });
        // Two bytes a channel; the pair of bytes 0 and 2 comes before that of 1 and 3.
        const std::byte* numbers = queries + 2 * (Pairs::part(pair) * bytes + at + 4 * k) +
                                   4 * Pairs::byte(pair);
        unroll<Q>([&](auto q) KVPOLICY_CPU_INLINE_LAMBDA {
          const auto number = broadcast_pair(ints, numbers + q * query_bytes);
          unroll<R>([&](auto r) KVPOLICY_CPU_INLINE_LAMBDA {
            sums[q][r] = add_pair_products(ints, sums[q][r], codes[r], number);
          });
        });
      });
    });
  }
}

/// The queries of a tile against blocks of quantised keys.
class IntegerKeys {
 public:
  [[nodiscard]] static std::size_t scratch_floats(std::size_t queries, std::size_t head_dim) {
    return queries * (2 * (head_dim / 2) + 2 * sizeof(Rounded) / sizeof(float));
  }

  IntegerKeys(std::size_t queries, std::size_t head_dim, float* scratch)
      : count_{queries}, head_dim_{head_dim} {
    const auto take = [&](std::size_t floats_taken) {
      float* taken = scratch;
      scratch += floats_taken;
      return taken;
    };
    for (Set* set : {&plain_, &scaled_}) {
      set->numbers = reinterpret_cast<std::byte*>(take(queries * head_dim / 2));
      set->rounded = take(queries * sizeof(Rounded) / sizeof(float));
    }
  }

  /// Of the blocks that follow: [queries, head_dim]. Null: none, every block is left to others.
  void set_queries(const float* queries) {
    queries_ = queries;
    state_ = queries == nullptr ? State::unusable : State::unknown;
  }

  /// logits[q * stride + row], with room up to a multiple of the lanes behind `rows`. False where
  /// the block must be decoded first: another format, or some number is not finite.
  bool compute_logits(const BlockSide& keys, std::size_t rows, float* logits, std::size_t stride,
                      const Prefetch& values) {
    if (state_ == State::unusable || !has_code_steps(keys.format, head_dim_)) return false;
    const std::size_t vectors = (rows + lanes - 1) / lanes;
    const std::size_t steps = head_dim_ * bits_of(keys.format.encoding) / 8 / code_step;
    const std::size_t portions = (count_ + query_portion - 1) / query_portion;
    PrefetchWalk ahead{values, (many_registers ? (vectors + 1) / 2 : vectors) * steps * portions};
    bool done = false;
    with_bits(keys.format.encoding, [&]<std::size_t Bits>() {
      if (keys.format.granularity == Granularity::per_channel) {
        if (keys.format.group < fewest_rows) return;
        done = per_channel<Bits>(keys, rows, logits, stride, ahead);
      } else if (keys.format.group == head_dim_) {
        done = per_token<Bits>(keys, rows, logits, stride, ahead);
      }
    });
    return done;
  }

 private:
  static constexpr std::size_t query_portion = 4;

  /// With fewer that share a scale, decoding them is less work than rounding the queries for each.
  static constexpr std::size_t fewest_rows = 8;

  enum class State { unknown, usable, unusable };

  // One query in 16 bits: number ~ scale * rounded number.
  struct Rounded {
    float scale;
    float sum;   // of the numbers, before they were rounded
    float rest;  // by which scale * rounded sum falls short of it
    float zero;  // per channel: query . zeros
  };
  // All of them: numbers [queries, head_dim] of 16 bits, and a Rounded for each.
  struct Set {
    std::byte* numbers;
    float* rounded;

    [[nodiscard]] Rounded query(std::size_t q) const {
      const float* at = rounded + 4 * q;
      return {at[0], at[1], at[2], at[3]};
    }
    void set(std::size_t q, const Rounded& query) const {
      const float all[4] = {query.scale, query.sum, query.rest, query.zero};
      std::copy_n(all, 4, rounded + 4 * q);
    }
  };
  static_assert(sizeof(Rounded) == 4 * sizeof(float));

  // Queries [q, q + Q) into `set`, Scaled: times the scales of a run of rows; false if a number is not
  // finite. Side by side, for each alone would wait for its own sums.
  template <bool Scaled, std::size_t Q>
  HWY_INLINE bool round_queries(const Set& set, std::size_t q, const half* row_scales,
                                const half* row_zeros) const {
    const std::size_t head_dim = head_dim_;
    const float* queries = queries_ + q * head_dim;
    const float amplitude = static_cast<float>(std::min<std::size_t>(
        32767, std::numeric_limits<std::int32_t>::max() / (255 * head_dim)));
    FloatVector highest[Q];
    FloatVector sums[4];
    FloatVector zeros[4];
    unroll<Q>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA { highest[i] = zero_vector(); });
    unroll<4>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA { sums[i] = zeros[i] = zero_vector(); });
    for (std::size_t channel = 0; channel < head_dim; channel += lanes) {
      const auto row_scale = Scaled ? load_half(row_scales + channel) : zero_vector();
      const auto row_zero = Scaled ? load_half(row_zeros + channel) : zero_vector();
      unroll<Q>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
        const auto number = hn::LoadU(floats, queries + i * head_dim + channel);
        const auto x = Scaled ? hn::Mul(number, row_scale) : number;
        highest[i] = hn::Max(highest[i], hn::Abs(x));
        sums[i] = hn::Add(sums[i], x);
        if constexpr (Scaled) zeros[i] = hn::MulAdd(number, row_zero, zeros[i]);
      });
    }
    float sum[4];
    float zero[4];
    store_sums(sums[0], sums[1], sums[2], sums[3], sum);
    store_sums(zeros[0], zeros[1], zeros[2], zeros[3], zero);
    float scale[Q];
    FloatVector inverse[Q];
    IntVector rounded_sums[Q];
    bool finite = true;
    unroll<Q>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
      finite = finite && std::isfinite(sum[i]) && std::isfinite(zero[i]);
      const float most = hn::GetLane(hn::MaxOfLanes(floats, highest[i]));
      const bool counts = most > 1e-30F;  // where its inverse exists
      inverse[i] = hn::Set(floats, counts ? amplitude / most : 0.0F);
      scale[i] = counts ? most / amplitude : 0.0F;
      rounded_sums[i] = hn::Zero(ints);
    });
    if (!finite) return false;
    const hn::Rebind<std::int16_t, Floats> shorts;
    const hn::Repartition<std::uint8_t, decltype(shorts)> bytes;
    alignas(16) static constexpr std::uint8_t exchange[16] = {0, 1, 4,  5,  2,  3,  6,  7,
                                                              8, 9, 12, 13, 10, 11, 14, 15};
    const auto order = hn::LoadDup128(bytes, exchange);
    auto* numbers = reinterpret_cast<std::uint8_t*>(set.numbers + 2 * q * head_dim);
    for (std::size_t channel = 0; channel < head_dim; channel += lanes) {
      const auto row_scale = Scaled ? load_half(row_scales + channel) : zero_vector();
      unroll<Q>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
        const auto number = hn::LoadU(floats, queries + i * head_dim + channel);
        const auto scaled = Scaled ? hn::Mul(number, row_scale) : number;
        const auto x = hn::NearestInt(hn::Mul(scaled, inverse[i]));
        rounded_sums[i] = hn::Add(rounded_sums[i], x);
        const auto narrow = hn::BitCast(bytes, hn::DemoteTo(shorts, x));
        hn::StoreU(hn::TableLookupBytes(narrow, order), bytes,
                   numbers + 2 * (i * head_dim + channel));
      });
    }
    unroll<Q>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
      const auto rounded_sum =
          static_cast<float>(hn::GetLane(hn::SumOfLanes(ints, rounded_sums[i])));
      set.set(q + i, {scale[i], sum[i], sum[i] - scale[i] * rounded_sum, zero[i]});
    });
    return true;
  }

  template <bool Scaled>
  bool round_all_queries(const Set& set, const half* row_scales, const half* row_zeros) const {
    bool finite = true;
    for_each_portion<4>(count_, [&]<std::size_t Q>(std::size_t q) {
      finite = finite && round_queries<Scaled, Q>(set, q, row_scales, row_zeros);
    });
    return finite;
  }

  template <std::size_t Bits>
  bool per_token(const BlockSide& keys, std::size_t rows, float* logits, std::size_t stride,
                 PrefetchWalk& ahead) {
    if (state_ == State::unknown) {
      state_ = round_all_queries<false>(plain_, nullptr, nullptr) ? State::usable : State::unusable;
      if (state_ == State::unusable) return false;
    }
    BlockParams params;
    if (!params.load(keys, rows)) return false;
    multiply<Bits>(plain_, keys.codes.data(), rows, ahead, [&](std::size_t q) KVPOLICY_CPU_INLINE_LAMBDA {
      const Rounded query = plain_.query(q);
      const auto scale = hn::Set(floats, query.scale);
      const auto middle = hn::Set(floats, middle_of<Bits> * query.rest);
      const auto sum = hn::Set(floats, query.sum);
      float* out = logits + q * stride;
      return [=, &params](std::size_t row, IntVector codes) KVPOLICY_CPU_INLINE_LAMBDA {
        const auto product = hn::MulAdd(hn::ConvertTo(floats, codes), scale, middle);
        const auto zero = hn::Mul(hn::LoadU(floats, params.zeros.data() + row), sum);
        hn::StoreU(hn::MulAdd(product, hn::LoadU(floats, params.scales.data() + row), zero), floats,
                   out + row);
      };
    });
    return true;
  }

  template <std::size_t Bits>
  bool per_channel(const BlockSide& keys, std::size_t rows, float* logits, std::size_t stride,
                   PrefetchWalk& ahead) {
    for (std::size_t first = 0; first < rows;) {
      std::size_t end = first + 1;
      while (end < rows && keys.scales[end] == keys.scales[first]) ++end;
      if (!round_all_queries<true>(scaled_, keys.scales[first], keys.zeros[first])) return false;
      // What is written behind a run's rows, the next run overwrites.
      multiply<Bits>(scaled_, keys.codes.data() + first, end - first, ahead,
                     [&](std::size_t q) KVPOLICY_CPU_INLINE_LAMBDA {
        const Rounded query = scaled_.query(q);
        const auto scale = hn::Set(floats, query.scale);
        const auto offset = hn::Set(floats, middle_of<Bits> * query.rest + query.zero);
        float* out = logits + q * stride + first;
        return [=](std::size_t row, IntVector codes) KVPOLICY_CPU_INLINE_LAMBDA {
          hn::StoreU(hn::MulAdd(hn::ConvertTo(floats, codes), scale, offset), floats, out + row);
        };
      });
      first = end;
    }
    return true;
  }

  template <std::size_t Bits>
  static constexpr float middle_of = 0.5F * static_cast<float>(CodePairs<Bits>::levels);

  // writer_of(q)(row, products of query q with the codes of `lanes` rows from there on).
  template <std::size_t Bits, class WriterOf>
  HWY_INLINE void multiply(const Set& set, const std::byte* const* rows, std::size_t count,
                           PrefetchWalk& ahead, WriterOf writer_of) const {
    const std::size_t bytes = head_dim_ * Bits / 8;
    // Pointers up to a whole vector: of the last row.
    std::array<const std::byte*, max_block_rows + lanes> padded;
    std::copy_n(rows, count, padded.begin());
    std::fill_n(padded.begin() + static_cast<std::ptrdiff_t>(count), lanes - 1, rows[count - 1]);
    for_each_portion<query_portion>(count_, [&]<std::size_t Q>(std::size_t q) {
      const auto take_rows = [&]<std::size_t R>(std::size_t row) {
        IntVector sums[Q][R];
        dot_codes<Bits>(padded.data() + row, bytes, set.numbers + 2 * q * head_dim_, 2 * head_dim_,
                        ahead, sums);
        unroll<Q>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
          const auto write = writer_of(q + i);
          unroll<R>([&](auto r) KVPOLICY_CPU_INLINE_LAMBDA { write(row + r * lanes, sums[i][r]); });
        });
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
  const float* queries_ = nullptr;
  State state_ = State::unusable;
  Set plain_;
  Set scaled_;
};

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
