// SPDX-License-Identifier: Apache-2.0
//
// Decodes rows whose codes stand for other numbers than equal steps (core/codebook.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/small_floats.hpp>
#include <kvpolicy/cpu/decode_packed-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

#if HWY_TARGET != HWY_SCALAR
/// A codebook of integers times a factor, one for each channel (core/codebook.hpp); can replace RowParams.
class CodebookParams {
 public:
  /// `scratch` holds head_dim floats.
  CodebookParams(const RowFormat& format, std::size_t head_dim, float* scratch)
      : format_{format},
        table_{hn::LoadDup128(bytes, code_numbers(format.codebook, bits_of(format.encoding)).data())},
        factors_{scratch},
        head_dim_{head_dim} {}

  void use(const std::byte* scales) {
    for (std::size_t channel = 0; channel < head_dim_; channel += format_.group) {
      std::fill_n(factors_ + channel, format_.group, code_factor(format_.codebook, scales, format_.scale));
      scales += scale_bytes(format_.codebook);
    }
  }
  [[nodiscard]] HWY_INLINE FloatVector number(FloatVector code, std::size_t channel) const {
    // The code is the lowest byte of its lane; what the other three look up is shifted out.
    const auto found = hn::TableLookupBytes(table_, hn::BitCast(bytes, hn::ConvertTo(ints, code)));
    const auto number = hn::ShiftRight<24>(hn::ShiftLeft<24>(hn::BitCast(ints, found)));
    return hn::Mul(hn::ConvertTo(floats, number), hn::LoadU(floats, factors_ + channel));
  }

 private:
  static constexpr hn::Repartition<std::int8_t, Floats> bytes{};

  const RowFormat& format_;
  hn::Vec<hn::Repartition<std::int8_t, Floats>> table_;
  float* factors_;
  std::size_t head_dim_;
};

/// Looks up the numbers of a row's codes of `Bits` bits, 16 of a part of each byte at once: [bytes * 8 / Bits]. There
/// are at least 16 bytes; the last ones may be looked up twice.
template <std::size_t Bits>
HWY_INLINE void look_up_codes(const std::byte* codes, std::size_t bytes,
                              const std::array<std::uint8_t, 16>& table, std::uint8_t* out) {
  static_assert(Bits == 2 || Bits == 4);
  constexpr hn::FixedTag<std::uint8_t, 16> tag;
  const hn::Repartition<std::uint16_t, decltype(tag)> shorts;
  const auto numbers = hn::LoadU(tag, table.data());
  const auto mask = hn::Set(tag, static_cast<std::uint8_t>((1U << Bits) - 1U));
  for (std::size_t step = 0; step < bytes; step += 16) {
    const std::size_t first = std::min(step, bytes - 16);
    const auto packed = hn::LoadU(tag, reinterpret_cast<const std::uint8_t*>(codes + first));
    unroll<8 / Bits>([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA {
      const auto shifted = hn::BitCast(tag, hn::ShiftRight<part * Bits>(hn::BitCast(shorts, packed)));
      hn::StoreU(hn::TableLookupBytes(numbers, hn::And(shifted, mask)), tag, out + part * bytes + first);
    });
  }
}

/// Rows of a codebook of integers whose groups are whole vectors: integers are looked up, and then multiplied.
class LookedUpRows {
 public:
  [[nodiscard]] static bool take(const RowFormat& format, std::size_t head_dim) {
    const CodeParts parts = code_parts(format.encoding);
    return parts.lower == 0 && parts.upper <= 4 && head_dim * parts.upper / 8 >= 16 &&
           format.group % lanes == 0;
  }
  explicit LookedUpRows(const RowFormat& format) : format_{format} {
    const CodeNumbers numbers = code_numbers(format.codebook, bits_of(format.encoding));
    std::ranges::copy(numbers, reinterpret_cast<std::int8_t*>(table_.data()));
  }

  /// `scratch` holds 2 * head_dim floats.
  void decode(const RowTileSide& side, std::size_t rows, std::size_t head_dim, float* scratch,
              float* out) const {
    auto* numbers = reinterpret_cast<std::int8_t*>(scratch);
    auto* bytes = reinterpret_cast<std::uint8_t*>(scratch);
    const hn::Rebind<std::int8_t, Floats> byte_tag;
    for (std::size_t row = 0; row < rows; ++row) {
      if (format_.encoding == Encoding::uint2) {
        look_up_codes<2>(side.codes[row], head_dim / 4, table_, bytes);
      } else {
        look_up_codes<4>(side.codes[row], head_dim / 2, table_, bytes);
      }
      const std::byte* scale = side.code_scales[row];
      for (std::size_t channel = 0; channel < head_dim; scale += scale_bytes(format_.codebook)) {
        const auto factor = hn::Set(floats, code_factor(format_.codebook, scale, format_.scale));
        for (const std::size_t end = channel + format_.group; channel < end; channel += lanes) {
          const auto number = hn::PromoteTo(ints, hn::LoadU(byte_tag, numbers + channel));
          hn::StoreU(hn::Mul(factor, hn::ConvertTo(floats, number)), floats, out + channel);
        }
      }
      out += head_dim;
    }
  }

 private:
  const RowFormat& format_;
  std::array<std::uint8_t, 16> table_;  // the bits of signed numbers
};
#endif

/// The numbers of E4M3 codes, but for this factor.
inline constexpr float e4m3_factor = 0x1p8F;

/// `lanes` codes of E4M3 as float, divided by `e4m3_factor`: shifted into place a code's exponent and mantissa are
/// those of a half whose exponent is too small by 8, which holds for half's subnormal numbers as well.
[[nodiscard]] HWY_INLINE FloatVector load_e4m3(const std::byte* codes) {
  const hn::Rebind<std::uint8_t, Floats> byte_tag;
  const auto code =
      hn::PromoteTo(half_bits, hn::LoadU(byte_tag, reinterpret_cast<const std::uint8_t*>(codes)));
  const auto magnitude = hn::And(code, hn::Set(half_bits, 0x7f));
  const auto sign = hn::ShiftLeft<8>(hn::Xor(code, magnitude));
  const auto is_nan = hn::Eq(magnitude, hn::Set(half_bits, E4m3::nan));
  const auto size = hn::IfThenElse(is_nan, hn::Set(half_bits, 0x7e00), hn::ShiftLeft<7>(magnitude));
  return half_to_float(hn::Or(size, sign));
}

/// `decode_side` for codebooks other than `even`.
HWY_NOINLINE inline void decode_codebook_side(const RowTileSide& side, std::size_t rows, std::size_t head_dim,
                                              [[maybe_unused]] float* params, float* out) {
  const RowFormat& format = side.format;
  if (format.codebook == Codebook::fp8) {
    const auto factor = hn::Set(floats, e4m3_factor * format.scale);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t channel = 0; channel < head_dim; channel += lanes, out += lanes) {
        hn::StoreU(hn::Mul(factor, load_e4m3(side.codes[row] + channel)), floats, out);
      }
    }
    return;
  }
#if HWY_TARGET != HWY_SCALAR
  if (LookedUpRows::take(format, head_dim))
    return LookedUpRows{format}.decode(side, rows, head_dim, params, out);
  if (head_dim * code_parts(format.encoding).upper / 8 >= lanes) {
    CodebookParams codebook_params{format, head_dim, params};
    for (std::size_t row = 0; row < rows; ++row, out += head_dim) {
      codebook_params.use(side.code_scales[row]);
      switch (format.encoding) {
        case Encoding::uint2:
          decode_packed_row<Encoding::uint2>(side, row, codebook_params, head_dim, out);
          break;
        case Encoding::uint3:
          decode_packed_row<Encoding::uint3>(side, row, codebook_params, head_dim, out);
          break;
        default: decode_packed_row<Encoding::uint4>(side, row, codebook_params, head_dim, out);
      }
    }
    return;
  }
#endif
  for (std::size_t row = 0; row < rows; ++row, out += head_dim) {
    load_numbers(format, side.codes[row], side.codes[row] + side.lower_offset, side.code_scales[row],
                 {out, head_dim});
  }
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
