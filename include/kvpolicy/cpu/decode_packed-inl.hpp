// SPDX-License-Identifier: Apache-2.0
//
// Decodes rows of packed codes that stand for equal steps: a number is its code times a scale, plus a zero.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Scales and zeros of one row, one for each channel; refilled only when the next row has others.
class RowParams {
 public:
  /// `scratch` holds 2 * head_dim floats.
  RowParams(float* scratch, std::size_t head_dim)
      : scales_{scratch}, zeros_{scratch + head_dim}, head_dim_{head_dim} {}

  void use(const RowFormat& format, const float16* scales, const float16* zeros) {
    if (scales == current_) return;
    current_ = scales;
    if (format.granularity == Granularity::per_channel) {
      for (std::size_t channel = 0; channel < head_dim_; channel += lanes) {
        hn::StoreU(load_half(scales + channel), floats, scales_ + channel);
        hn::StoreU(load_half(zeros + channel), floats, zeros_ + channel);
      }
    } else {
      for (std::size_t g = 0; g * format.group < head_dim_; ++g) {
        std::fill_n(scales_ + g * format.group, format.group, static_cast<float>(scales[g]));
        std::fill_n(zeros_ + g * format.group, format.group, static_cast<float>(zeros[g]));
      }
    }
  }
  [[nodiscard]] HWY_INLINE FloatVector scales(std::size_t channel) const {
    return hn::LoadU(floats, scales_ + channel);
  }
  [[nodiscard]] HWY_INLINE FloatVector zeros(std::size_t channel) const {
    return hn::LoadU(floats, zeros_ + channel);
  }
  [[nodiscard]] HWY_INLINE FloatVector number(FloatVector code, std::size_t channel) const {
    return hn::MulAdd(code, scales(channel), zeros(channel));
  }

  /// Decodes without vectors, for rows of less than one vector of bytes.
  void decode_short_row(Encoding encoding, const std::byte* codes, const std::byte* lower, float* out) const {
    for (std::size_t channel = 0; channel < head_dim_; ++channel) {
      const auto code = static_cast<float>(load_code(encoding, codes, lower, channel, head_dim_));
      out[channel] = scales_[channel] * code + zeros_[channel];
    }
  }

 private:
  float* scales_;
  float* zeros_;
  std::size_t head_dim_;
  const float16* current_ = nullptr;
};

/// One scale and one zero for the whole row; can replace RowParams.
struct WholeRowParams {
  FloatVector scale, zero;

  [[nodiscard]] HWY_INLINE FloatVector number(FloatVector code, std::size_t) const {
    return hn::MulAdd(code, scale, zero);
  }
};

/// One scale and one zero for each group of a power of two of channels, in which whole vectors lie.
struct GroupParams {
  /// More groups in a row are as well spread over its channels.
  static constexpr std::size_t most_groups = 16;

  const float* group_scales;
  const float* group_zeros;
  int shift;

  [[nodiscard]] static bool fits(const RowFormat& format, std::size_t head_dim) {
    return format.granularity == Granularity::per_token && std::has_single_bit(format.group) &&
           format.group % lanes == 0 && head_dim * code_parts(format.encoding).upper / 8 % lanes == 0 &&
           head_dim / format.group <= most_groups;
  }
  [[nodiscard]] HWY_INLINE FloatVector number(FloatVector code, std::size_t channel) const {
    return hn::MulAdd(code, hn::Set(floats, group_scales[channel >> shift]),
                      hn::Set(floats, group_zeros[channel >> shift]));
  }
};

/// Calls visit(channel, codes as float) for the codes of `Bits` bits of a packed row, a vector at a time. The row
/// is at least one vector of bytes long; the last vectors may overlap.
template <std::size_t Bits, class Visit>
HWY_INLINE void for_each_code_vector(const std::byte* codes, std::size_t head_dim, Visit visit) {
  constexpr std::size_t per_byte = 8 / Bits;
  const std::size_t bytes = head_dim / per_byte;
  const hn::Rebind<std::uint8_t, Floats> byte_tag;
  for (std::size_t step = 0; step < bytes; step += lanes) {
    const std::size_t first = std::min(step, bytes - lanes);
    const auto packed =
        hn::PromoteTo(ints, hn::LoadU(byte_tag, reinterpret_cast<const std::uint8_t*>(codes) + first));
    unroll<per_byte>([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA {
      const auto code = hn::And(hn::ShiftRight<part * Bits>(packed), hn::Set(ints, (1 << Bits) - 1));
      visit(part * bytes + first, hn::ConvertTo(floats, code));
    });
  }
}

/// Writes the lower parts of a row's codes as float [head_dim].
template <std::size_t Bits>
HWY_INLINE void unpack_lower_codes(const std::byte* codes, std::size_t head_dim, float* out) {
  const std::size_t bytes = head_dim * Bits / 8;
  if (bytes >= lanes) {
    for_each_code_vector<Bits>(codes, head_dim,
                               [&](std::size_t channel, FloatVector code)
                                   KVPOLICY_CPU_INLINE_LAMBDA { hn::StoreU(code, floats, out + channel); });
    return;
  }
  for (std::size_t shift = 0; shift < 8; shift += Bits) {
    for (std::size_t byte = 0; byte < bytes; ++byte) {
      *out++ = static_cast<float>((static_cast<unsigned>(codes[byte]) >> shift) & ((1U << Bits) - 1U));
    }
  }
}

/// Writes what the codes of row `row` of a row tile stand for: [head_dim]. Its codes, or the upper parts of them, are
/// at least one vector of bytes long.
template <Encoding E, class Params>
HWY_INLINE void decode_packed_row(const RowTileSide& side, std::size_t row, const Params& params,
                                  std::size_t head_dim, float* out) {
  const std::byte* codes = side.codes[row];
  constexpr CodeParts parts = code_parts(E);
  if constexpr (parts.lower == 0) {
    for_each_code_vector<parts.upper>(codes, head_dim,
                                      [&](std::size_t channel, FloatVector code) KVPOLICY_CPU_INLINE_LAMBDA {
                                        hn::StoreU(params.number(code, channel), floats, out + channel);
                                      });
  } else {
    KVPOLICY_ASSERT(head_dim <= max_head_dim);
    // The lower parts go to memory of their own: what vectors overlap is written twice and must be the same.
    alignas(64) std::array<float, max_head_dim> lower;
    unpack_lower_codes<parts.lower>(codes + side.lower_offset, head_dim, lower.data());
    const auto steps = hn::Set(floats, static_cast<float>(1U << parts.lower));
    for_each_code_vector<parts.upper>(
        codes, head_dim, [&](std::size_t channel, FloatVector upper) KVPOLICY_CPU_INLINE_LAMBDA {
          const auto code = hn::MulAdd(upper, steps, hn::LoadU(floats, lower.data() + channel));
          hn::StoreU(params.number(code, channel), floats, out + channel);
        });
  }
}

/// Writes the scales or zeros of a row tile's rows as float, `groups` of each row.
template <std::size_t N>
HWY_INLINE void gather_params(const std::array<const float16*, max_tile_rows>& from, std::size_t rows,
                              std::size_t groups, std::array<float, N>& to) {
  static_assert(N % lanes == 0);
  std::array<float16, N> halves;
  for (std::size_t row = 0; row < rows; ++row) std::copy_n(from[row], groups, halves.data() + row * groups);
  for (std::size_t i = 0; i < rows * groups; i += lanes) {
    hn::StoreU(load_half(halves.data() + i), floats, to.data() + i);
  }
}

template <Encoding E>
void decode_packed_side(const RowTileSide& side, std::size_t rows, std::size_t head_dim, float* params,
                        float* out) {
  RowParams row_params{params, head_dim};
  if (head_dim * code_parts(E).upper / 8 < lanes) {  // shorter than any real head
    for (std::size_t row = 0; row < rows; ++row) {
      row_params.use(side.format, side.scales[row], side.zeros[row]);
      row_params.decode_short_row(E, side.codes[row], side.codes[row] + side.lower_offset,
                                  out + row * head_dim);
    }
  } else if (side.format.granularity == Granularity::per_token && side.format.group == head_dim) {
    std::array<float, max_tile_rows> scales;
    std::array<float, max_tile_rows> zeros;
    gather_params(side.scales, rows, 1, scales);
    gather_params(side.zeros, rows, 1, zeros);
    for (std::size_t row = 0; row < rows; ++row) {
      decode_packed_row<E>(side, row,
                           WholeRowParams{hn::Set(floats, scales[row]), hn::Set(floats, zeros[row])},
                           head_dim, out + row * head_dim);
    }
  } else if (GroupParams::fits(side.format, head_dim)) {
    const std::size_t groups = head_dim / side.format.group;
    std::array<float, max_tile_rows * GroupParams::most_groups> scales;
    std::array<float, max_tile_rows * GroupParams::most_groups> zeros;
    gather_params(side.scales, rows, groups, scales);
    gather_params(side.zeros, rows, groups, zeros);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t first = row * groups;
      decode_packed_row<E>(
          side, row,
          GroupParams{scales.data() + first, zeros.data() + first, std::countr_zero(side.format.group)},
          head_dim, out + row * head_dim);
    }
  } else {
    for (std::size_t row = 0; row < rows; ++row) {
      row_params.use(side.format, side.scales[row], side.zeros[row]);
      decode_packed_row<E>(side, row, row_params, head_dim, out + row * head_dim);
    }
  }
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
