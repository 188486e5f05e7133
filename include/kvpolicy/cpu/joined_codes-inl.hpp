// SPDX-License-Identifier: Apache-2.0
//
// Codes in two parts (3, 5 and 6 bits, and 8 in halves) as whole codes: rows of a row tile are copied with both parts
// of each code joined, in the layout of the next wider codes that divide a byte. Integer products then read them as
// those.
//
// Relative to its byte, a lower part lies where the upper part that it belongs to does, but for one shift for each
// stretch of the upper row that is as long as the lower row (PageLayout). So shifts and masks join whole vectors.
// Multiplying the parts apart would take each product twice, and with several queries products are most of the work.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>
#include <kvpolicy/cpu/x86/integer_pairs-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Bits from one code to the next after joining: for codes in one part those of a code.
[[nodiscard]] constexpr std::size_t joined_bits(Encoding encoding) {
  const CodeParts parts = code_parts(encoding);
  return parts.lower == 0 ? parts.upper : 2 * parts.upper;
}

/// `size` bytes, repeated to fill a vector, each time shifted right by `Shift` bits more.
template <std::size_t Size, std::size_t Shift, class D>
[[nodiscard]] HWY_INLINE hn::Vec<D> repeat_shifted(D d, const std::byte* from) {
  constexpr std::size_t width = hn::MaxLanes(D{}) * sizeof(hn::TFromD<D>);
  const hn::Repartition<std::uint8_t, D> bytes;
  const auto* source = reinterpret_cast<const std::uint8_t*>(from);
  if constexpr (Size == width) {
    return hn::BitCast(d, hn::LoadU(bytes, source));
  } else {
    const auto repeated = [&]() KVPOLICY_CPU_INLINE_LAMBDA {
      if constexpr (Size == 8) {
        std::uint64_t number;
        std::memcpy(&number, from, sizeof number);
        return hn::BitCast(d, hn::Set(hn::Repartition<std::uint64_t, D>{}, number));
      } else if constexpr (Size == 16) {
        return hn::BitCast(d, hn::LoadDup128(bytes, source));
      } else {
        static_assert(2 * Size == width);
        const auto half = hn::LoadU(hn::Half<decltype(bytes)>{}, source);
        return hn::BitCast(d, hn::Combine(bytes, half, half));
      }
    }();
    static_assert(sizeof(hn::TFromD<D>) == sizeof(std::uint32_t));
    HWY_ALIGN static constexpr auto shifts = [] {
      std::array<std::uint32_t, width / sizeof(std::uint32_t)> counts{};
      for (std::size_t i = 0; i < counts.size(); ++i) {
        counts[i] = static_cast<std::uint32_t>(i * sizeof(std::uint32_t) / Size * Shift);
      }
      return counts;
    }();
    return hn::Shr(repeated, hn::LoadU(d, shifts.data()));
  }
}

/// Joins the codes of a row. Its lower parts are read `Size` bytes at a time; if `Repeats` is more than 1, they are
/// as many bytes.
template <Encoding E, std::size_t Size, std::size_t Repeats>
HWY_INLINE void join_row(const std::byte* codes, const std::byte* lower_codes, std::size_t lower_bytes,
                         std::byte* out) {
  constexpr CodeParts parts = code_parts(E);
  constexpr std::size_t stretches = parts.upper / parts.lower;  // of the upper row
  static_assert(stretches % Repeats == 0);
  constexpr auto in_each_code = [](unsigned mask) {  // in every joined code of a word
    constexpr unsigned places = joined_bits(E) == 4 ? 0x11111111U : 0x01010101U;
    return static_cast<std::uint32_t>(mask * places);
  };
  const hn::FixedTag<std::uint32_t, Size * Repeats / sizeof(std::uint32_t)> d;
  const hn::Repartition<std::uint8_t, decltype(d)> bytes;
  const auto upper_mask = hn::Set(d, in_each_code(((1U << parts.upper) - 1U) << parts.lower));
  const auto lower_mask = hn::Set(d, in_each_code((1U << parts.lower) - 1U));
  const std::size_t upper_bytes = stretches * lower_bytes;
  const auto store = [&](auto joined, std::size_t at) KVPOLICY_CPU_INLINE_LAMBDA {
    hn::StoreU(hn::BitCast(bytes, joined), bytes, reinterpret_cast<std::uint8_t*>(out + at));
  };
  for (std::size_t step = 0; step < lower_bytes; step += Size) {
    const std::size_t first = std::min(step, lower_bytes - Size);  // the last step may overlap
    const auto lower = repeat_shifted<Size, parts.lower>(d, lower_codes + first);
    unroll<stretches / Repeats>([&](auto turn) KVPOLICY_CPU_INLINE_LAMBDA {
      const std::size_t at = turn * Repeats * lower_bytes + first;
      const auto upper = hn::BitCast(d, hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(codes + at)));
      const auto own = hn::ShiftRight<turn * Repeats * parts.lower>(lower);
      // Every second code of a byte goes to the first half of the joined row, the others to the second.
      store(hn::OrAnd(hn::And(hn::ShiftLeft<parts.lower>(upper), upper_mask), own, lower_mask), at);
      store(hn::OrAnd(hn::And(hn::ShiftRight<parts.upper - parts.lower>(upper), upper_mask),
                      hn::ShiftRight<parts.upper>(own), lower_mask),
            upper_bytes + at);
    });
  }
}

/// The codes of a row tile as integer products read them.
class JoinedCodes {
 public:
  /// Lower parts are joined in steps of at least as many bytes.
  static constexpr std::size_t smallest_step = 8;

  [[nodiscard]] static std::size_t scratch_floats(std::size_t head_dim) {
    return max_tile_rows * head_dim / sizeof(float);
  }
  JoinedCodes(std::size_t head_dim, float* scratch)
      : head_dim_{head_dim}, rows_{reinterpret_cast<std::byte*>(scratch)} {}

  /// Whether rows need no joining, or can be joined.
  [[nodiscard]] static bool takes(Encoding encoding, std::size_t head_dim) {
    const std::size_t lower = code_parts(encoding).lower;
    return lower == 0 || head_dim * lower / 8 >= smallest_step;
  }

  /// The rows' codes: where they are, if codes have one part. Valid until the next call.
  [[nodiscard]] const std::byte* const* of(const RowTileSide& side, std::size_t rows) {
    switch (side.format.encoding) {
      case Encoding::uint3: join<Encoding::uint3>(side, rows); break;
      case Encoding::uint5: join<Encoding::uint5>(side, rows); break;
      case Encoding::uint6: join<Encoding::uint6>(side, rows); break;
      case Encoding::uint4x2: join<Encoding::uint4x2>(side, rows); break;
      default: return side.codes.data();
    }
    return joined_.data();
  }

 private:
  static constexpr std::size_t widest = lanes * sizeof(float);  // bytes of a vector

  template <Encoding E>
  void join(const RowTileSide& side, std::size_t rows) {
    constexpr CodeParts parts = code_parts(E);
    constexpr std::size_t stretches = parts.upper / parts.lower;
    const std::size_t bytes = head_dim_ * parts.lower / 8;
    switch (bytes) {
      case 8: return join_rows<E, 8, std::min(stretches, widest / 8)>(side, rows, bytes);
      case 16: return join_rows<E, 16, std::min(stretches, widest / 16)>(side, rows, bytes);
      case 32:
        if constexpr (widest >= 32) {
          return join_rows<E, 32, std::min(stretches, widest / 32)>(side, rows, bytes);
        }
        break;
      default: break;
    }
    if (bytes >= widest) return join_rows<E, widest, 1>(side, rows, bytes);
    if (bytes >= widest / 2) return join_rows<E, widest / 2, 1>(side, rows, bytes);
    join_rows<E, 8, 1>(side, rows, bytes);
  }

  template <Encoding E, std::size_t Size, std::size_t Repeats>
  void join_rows(const RowTileSide& side, std::size_t rows, std::size_t lower_bytes) {
    const std::size_t step = head_dim_ * joined_bits(E) / 8;
    std::byte* to = rows_;
    for (std::size_t row = 0; row < rows; ++row, to += step) {
      join_row<E, Size, Repeats>(side.codes[row], side.codes[row] + side.lower_offset, lower_bytes, to);
      joined_[row] = to;
    }
  }

  std::size_t head_dim_;
  std::byte* rows_;                                     // [max_tile_rows, bytes of a joined row]
  std::array<const std::byte*, max_tile_rows> joined_;  // of rows_
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
