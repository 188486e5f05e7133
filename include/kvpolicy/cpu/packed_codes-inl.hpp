// SPDX-License-Identifier: Apache-2.0
//
// Quantised rows as operands of 16-bit pair products, without a conversion to float: packed bytes of
// several rows are loaded into lanes, and a shift and a mask extract two codes at a time.
// integer_keys-inl.hpp and integer_values-inl.hpp use them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cpu/joined_codes-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>
#include <kvpolicy/cpu/x86/integer_pairs-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Bytes of a row that one step processes.
inline constexpr std::size_t code_step = 16;

/// Bytes of a row's codes, joined if they are in two parts.
[[nodiscard]] inline std::size_t code_bytes(Encoding encoding, std::size_t head_dim) {
  return head_dim * joined_bits(encoding) / 8;
}

/// Whether rows can be read in whole steps; the last one may overlap.
[[nodiscard]] inline bool has_code_steps(const RowFormat& format, std::size_t head_dim) {
  return is_quantized(format.encoding) && format.codebook == Codebook::even &&
         JoinedCodes::takes(format.encoding, head_dim) && code_bytes(format.encoding, head_dim) >= code_step;
}

/// Half of the largest code.
[[nodiscard]] constexpr float middle_code(Encoding encoding) {
  return 0.5F * static_cast<float>((1U << bits_of(encoding)) - 1U);
}

/// Calls f.operator()<joined bits>() for a quantised encoding.
template <class F>
HWY_INLINE void with_bits(Encoding encoding, F&& f) {
  switch (joined_bits(encoding)) {
    case 8: return f.template operator()<8>();
    case 4: return f.template operator()<4>();
    default: KVPOLICY_ASSERT(encoding == Encoding::uint2); return f.template operator()<2>();
  }
}

/// What one shift and one mask extract from 4 packed bytes: the codes of bytes 0 and 2, or 1 and 3.
template <std::size_t Bits>
struct CodePairs {
  static constexpr std::size_t parts = 8 / Bits;   ///< codes in a byte
  static constexpr std::size_t pairs = 2 * parts;  ///< in 4 bytes
  static constexpr std::size_t levels = (1U << Bits) - 1U;
  /// Pair p: the codes of part `part(p)` of bytes `byte(p)` and `byte(p)` + 2.
  static constexpr std::size_t part(std::size_t pair) { return pair % parts; }
  static constexpr std::size_t byte(std::size_t pair) { return pair / parts; }

  /// The pair in each lane, as two 16-bit numbers.
  template <std::size_t Pair, class D>
  [[nodiscard]] static HWY_INLINE hn::Vec<D> take(D d, hn::Vec<D> packed) {
    const auto mask = hn::Set(d, static_cast<std::int32_t>(levels * 0x10001U));
    if constexpr (Pair == 0) {
      return hn::And(packed, mask);
    } else {
      const hn::Repartition<std::uint16_t, D> shorts;
      const auto shifted = hn::BitCast(d, hn::ShiftRight<Pair * Bits>(hn::BitCast(shorts, packed)));
      if constexpr (Pair + 1 == pairs) return shifted;
      return hn::And(shifted, mask);
    }
  }
};

/// Loads a pair of 16-bit numbers from memory into every lane.
template <class D>
[[nodiscard]] HWY_INLINE hn::Vec<D> broadcast_pair(D d, const std::byte* pair) {
  std::int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return hn::Set(d, bits);
}

/// Fills a vector with `Pieces` pieces of equal length: the bytes from `at` on of rows[0], rows[apart] and
/// so on.
template <std::size_t Pieces, class D>
[[nodiscard]] HWY_INLINE hn::Vec<D> load_pieces(D d, const std::byte* const* rows, std::size_t apart,
                                                std::size_t at) {
  if constexpr (Pieces == 1) {
    return hn::BitCast(d, hn::LoadU(hn::Repartition<std::uint8_t, D>{},
                                    reinterpret_cast<const std::uint8_t*>(rows[0] + at)));
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_pieces<Pieces / 2>(half, rows + apart * (Pieces / 2), apart, at),
                       load_pieces<Pieces / 2>(half, rows, apart, at));
  }
}

/// columns[k], lane i: the 4 bytes from `at` + 4 * k on of row i.
HWY_INLINE void load_columns(const std::byte* const* rows, std::size_t at, IntVector (&columns)[4]) {
  const hn::Repartition<std::int64_t, Ints> longs;
  const auto a = load_pieces<lanes / 4>(ints, rows, 4, at);
  const auto b = load_pieces<lanes / 4>(ints, rows + 1, 4, at);
  const auto c = load_pieces<lanes / 4>(ints, rows + 2, 4, at);
  const auto d = load_pieces<lanes / 4>(ints, rows + 3, 4, at);
  const auto ab01 = hn::BitCast(longs, hn::InterleaveLower(ints, a, b));
  const auto ab23 = hn::BitCast(longs, hn::InterleaveUpper(ints, a, b));
  const auto cd01 = hn::BitCast(longs, hn::InterleaveLower(ints, c, d));
  const auto cd23 = hn::BitCast(longs, hn::InterleaveUpper(ints, c, d));
  columns[0] = hn::BitCast(ints, hn::InterleaveLower(longs, ab01, cd01));
  columns[1] = hn::BitCast(ints, hn::InterleaveUpper(longs, ab01, cd01));
  columns[2] = hn::BitCast(ints, hn::InterleaveLower(longs, ab23, cd23));
  columns[3] = hn::BitCast(ints, hn::InterleaveUpper(longs, ab23, cd23));
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
