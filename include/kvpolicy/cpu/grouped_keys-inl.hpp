// SPDX-License-Identifier: Apache-2.0
//
// Logits of quantised keys with a scale and a zero for each group of a row's channels, as integer products
// (integer_keys-inl.hpp has the formula). The sum of a group is multiplied by the row's scale before the next
// group begins:
//
//   q . x ~ s * sum over groups of (scale * (n . c - middle * sum(n)) + at_middle * sum(q) / s)
//
// A byte holds codes that are a half or a quarter of the row apart, so of different groups. The bytes of a vector
// of rows are therefore arranged in lanes first, and read once for each code of a byte: channels come in
// their order, and only one group has open sums.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvpolicy/cpu/packed_codes-inl.hpp>
#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_params-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS  // otherwise integer_rows-inl.hpp declares the names
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Calls visit(first byte, end, group) for the pieces of one part of a row's codes: the channels from
/// part * bytes on, cut where a group ends.
template <class Visit>
HWY_INLINE void for_each_piece(std::size_t part, std::size_t bytes, std::size_t group, Visit&& visit) {
  std::size_t g = part * bytes / group;
  std::size_t end = (g + 1) * group - part * bytes;
  for (std::size_t first = 0; first < bytes; ++g, end += group) {
    const std::size_t last = std::min(end, bytes);
    visit(first, last, g);
    first = last;
  }
}

/// Multiplies queries that are rounded already with row tiles of such keys.
class GroupedKeys {
 public:
  [[nodiscard]] static std::size_t scratch_floats(std::size_t queries, std::size_t head_dim) {
    return head_dim / 4 * rows_at_once * lanes + whole_lines(most_pieces(head_dim) * table_step(queries));
  }
  GroupedKeys(std::size_t queries, std::size_t head_dim, float* scratch)
      : count_{queries},
        head_dim_{head_dim},
        columns_{scratch},
        table_{columns_ + head_dim / 4 * rows_at_once * lanes} {}

  /// Whether rows are cut into groups that this code can multiply: two words of codes at once are of one group.
  [[nodiscard]] static bool takes(const RowFormat& format, std::size_t head_dim) {
    return has_code_steps(format, head_dim) && format.granularity == Granularity::per_token &&
           format.group >= RowTileParams::smallest_group && format.group % words_at_once == 0 &&
           code_bytes(format.encoding, head_dim) % words_at_once == 0;
  }

  /// To be called when the queries have changed.
  void forget_queries() { table_of_ = {}; }

  /// Writes logits[q * stride + row], up to a whole vector of rows. `keys` are the rows' joined codes, `params` their
  /// scales, `numbers` the rounded queries [queries, head_dim], in 16 bits as dot_codes wants them; `scale_of(q)` is
  /// one unit of query q's numbers.
  template <std::size_t Bits, class ScaleOf>
  void multiply(const RowFormat& format, const std::byte* const* keys, std::size_t rows,
                const RowTileParams& params, const float* queries, const std::byte* numbers, ScaleOf scale_of,
                float* logits, std::size_t stride, const Prefetch& next) {
    const std::size_t bytes = head_dim_ * Bits / 8;
    if (format != table_of_) fill_table<Bits>(format, queries, numbers, scale_of);
    std::array<const std::byte*, max_tile_rows + rows_at_once * lanes> codes;
    std::fill_n(std::copy_n(keys, rows, codes.begin()), rows_at_once * lanes - 1, keys[rows - 1]);
    const std::size_t portions = (count_ + query_portion - 1) / query_portion;
    const std::size_t turns = (rows + rows_at_once * lanes - 1) / (rows_at_once * lanes);
    PrefetchWalk ahead{next, turns * portions * pieces_};
    const auto take_rows = [&]<std::size_t R>(std::size_t row) KVPOLICY_CPU_LAMBDA {
      arrange<R>(codes.data() + row, bytes);
      for_each_portion<query_portion>(count_, [&]<std::size_t Q>(std::size_t q) KVPOLICY_CPU_LAMBDA {
        FloatVector sums[Q][R];
        dot_pieces<Bits>(bytes, format.group, params, row, numbers + 2 * q * head_dim_, table_ + 2 * q, ahead,
                         sums);
        KVPOLICY_CPU_UNROLL
        for (std::size_t i = 0; i < Q; ++i) {
          const auto scale = hn::Set(floats, unit_of(scale_of(q + i)));
          KVPOLICY_CPU_UNROLL
          for (std::size_t r = 0; r < R; ++r) {
            hn::StoreU(hn::Mul(sums[i][r], scale), floats, logits + (q + i) * stride + row + r * lanes);
          }
        }
      });
    };
    std::size_t row = 0;
    if constexpr (rows_at_once == 2) {
      for (; row + lanes < rows; row += 2 * lanes) take_rows.template operator()<2>(row);
    }
    for (; row < rows; row += lanes) take_rows.template operator()<1>(row);
  }

 private:
  static constexpr std::size_t query_portion = 4;
  static constexpr std::size_t rows_at_once = many_registers ? 2 : 1;  // vectors of them
  // Bytes. The loop over them is unrolled by as much, because GCC copies all sums in each of its iterations.
  static constexpr std::size_t words_at_once = 8;

  // The groups, and one more for each part of a row that begins inside a group.
  static std::size_t most_pieces(std::size_t head_dim) {
    return head_dim / RowTileParams::smallest_group + 4;
  }
  static std::size_t table_step(std::size_t queries) { return 2 * queries; }

  // A query without a number that counts has zeros as its numbers, and any unit will do: one whose inverse is
  // finite.
  static float unit_of(float scale) { return scale > 0.0F ? scale : 1e-34F; }

  // Of each piece and query: middle * sum(n), and sum(q) in units of the query's numbers.
  template <std::size_t Bits, class ScaleOf>
  void fill_table(const RowFormat& format, const float* queries, const std::byte* numbers, ScaleOf scale_of) {
    table_of_ = format;
    const float middle = middle_code(format.encoding);
    const std::size_t bytes = head_dim_ * Bits / 8;
    pieces_ = 0;
    for (std::size_t part = 0; part < CodePairs<Bits>::parts; ++part) {
      for_each_piece(part, bytes, format.group, [&](std::size_t first, std::size_t end, std::size_t) {
        float* to = table_ + pieces_++ * table_step(count_);
        for (std::size_t q = 0; q < count_; ++q) {
          const std::size_t channel = q * head_dim_ + part * bytes;
          float sum = 0.0F;
          std::int32_t rounded_sum = 0;
          for (std::size_t i = channel + first; i < channel + end; ++i) {
            std::int16_t number;
            std::memcpy(&number, numbers + 2 * i, sizeof number);
            rounded_sum += number;
            sum += queries[i];
          }
          to[2 * q] = middle * static_cast<float>(rounded_sum);
          to[2 * q + 1] = sum / unit_of(scale_of(q));
        }
      });
    }
  }

  // Stores the words of R vectors of rows with a row in each lane: columns_[word][r].
  template <std::size_t R>
  HWY_INLINE void arrange(const std::byte* const* rows, std::size_t bytes) const {
    for (std::size_t step = 0; step < bytes; step += code_step) {
      const std::size_t at = std::min(step, bytes - code_step);  // the last step may overlap
      KVPOLICY_CPU_UNROLL
      for (std::size_t r = 0; r < R; ++r) {
        IntVector columns[4];
        load_columns(rows + r * lanes, at, columns);
        KVPOLICY_CPU_UNROLL
        for (std::size_t k = 0; k < 4; ++k) {
          hn::StoreU(hn::BitCast(floats, columns[k]), floats, columns_ + ((at / 4 + k) * R + r) * lanes);
        }
      }
    }
  }

  // sums[q][r], lane i: in units of query q's numbers, its product with row `row` + r * lanes + i of the arranged
  // ones.
  template <std::size_t Bits, std::size_t Q, std::size_t R>
  HWY_INLINE void dot_pieces(std::size_t bytes, std::size_t group, const RowTileParams& params,
                             std::size_t row, const std::byte* numbers, const float* table,
                             PrefetchWalk& ahead, FloatVector (&sums)[Q][R]) const {
    using Pairs = CodePairs<Bits>;
    KVPOLICY_CPU_UNROLL
    for (auto& of_query : sums) {
      KVPOLICY_CPU_UNROLL
      for (FloatVector& sum : of_query) sum = zero_vector();
    }
    unroll<Pairs::parts>([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA {
      for_each_piece(
          part, bytes, group,
          [&](std::size_t first, std::size_t end, std::size_t g) KVPOLICY_CPU_INLINE_LAMBDA {
            ahead.step();
            IntVector products[Q][R];
            KVPOLICY_CPU_UNROLL
            for (auto& of_query : products) {
              KVPOLICY_CPU_UNROLL
              for (IntVector& product : of_query) product = hn::Zero(ints);
            }
            const float* columns = columns_ + first / 4 * R * lanes;
            const std::byte* own = numbers + 2 * (part * bytes + first);
            for (std::size_t at = first; at < end; at += words_at_once) {
              unroll<words_at_once / 2>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
                constexpr std::size_t word = i / 2;
                constexpr std::size_t byte = i % 2;
                constexpr std::size_t pair = part + Pairs::parts * byte;
                static_assert(Pairs::part(pair) == part && Pairs::byte(pair) == byte);
                IntVector codes[R];
                KVPOLICY_CPU_UNROLL
                for (std::size_t r = 0; r < R; ++r) {
                  const auto packed = hn::BitCast(ints, hn::LoadU(floats, columns + (word * R + r) * lanes));
                  codes[r] = Pairs::template take<pair>(ints, packed);
                }
                KVPOLICY_CPU_UNROLL
                for (std::size_t q = 0; q < Q; ++q) {
                  const auto number = broadcast_pair(ints, own + q * 2 * head_dim_ + 8 * word + 4 * byte);
                  KVPOLICY_CPU_UNROLL
                  for (std::size_t r = 0; r < R; ++r) {
                    products[q][r] = add_pair_products(ints, products[q][r], codes[r], number);
                  }
                }
              });
              columns += words_at_once / 4 * R * lanes;
              own += 2 * words_at_once;
            }
            KVPOLICY_CPU_UNROLL
            for (std::size_t r = 0; r < R; ++r) {
              const auto scales = hn::LoadU(floats, params.scales(g) + row + r * lanes);
              const auto middles = hn::LoadU(floats, params.middles(g) + row + r * lanes);
              KVPOLICY_CPU_UNROLL
              for (std::size_t q = 0; q < Q; ++q) {
                const auto product =
                    hn::Sub(hn::ConvertTo(floats, products[q][r]), hn::Set(floats, table[2 * q]));
                sums[q][r] = hn::MulAdd(product, scales, sums[q][r]);
                sums[q][r] = hn::MulAdd(middles, hn::Set(floats, table[2 * q + 1]), sums[q][r]);
              }
            }
            table += table_step(count_);
          });
    });
  }

  std::size_t count_;
  std::size_t head_dim_;
  float* columns_;           // [words of a row, rows_at_once, lanes]
  float* table_;             // [pieces, queries, 2], for rows of table_of_
  std::size_t pieces_ = 0;   // of a row of table_of_
  RowFormat table_of_ = {};  // dense: the table has not been filled
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
