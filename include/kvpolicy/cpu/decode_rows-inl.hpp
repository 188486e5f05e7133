// SPDX-License-Identifier: Apache-2.0
//
// Decodes one side of a row tile to float rows in the first-level cache. Quantised rows need that before
// any other work, and a tile of many queries decodes them once for all queries.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Calls f.operator()<E>() for the dense encoding `encoding`.
template <class F>
HWY_INLINE void with_dense_encoding(Encoding encoding, F&& f) {
  switch (encoding) {
    case Encoding::float32: return f.template operator()<Encoding::float32>();
    case Encoding::float16: return f.template operator()<Encoding::float16>();
    case Encoding::bfloat16: return f.template operator()<Encoding::bfloat16>();
    default: KVPOLICY_ASSERT(false && "quantised rows are decoded first");
  }
}

/// Scales and zeros of one row, one for each channel; refilled only when the next row has others.
class RowParams {
 public:
  /// `scratch` holds 2 * head_dim floats.
  RowParams(float* scratch, std::size_t head_dim)
      : scales_{scratch}, zeros_{scratch + head_dim}, head_dim_{head_dim} {}

  void use(const RowFormat& format, const half* scales, const half* zeros) {
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

  /// Decodes without vectors, for rows of less than one vector of bytes.
  void decode_short_row(Encoding encoding, const std::byte* codes, float* out) const {
    for (std::size_t channel = 0; channel < head_dim_; ++channel) {
      const auto code = static_cast<float>(load_code(encoding, codes, channel, head_dim_));
      out[channel] = scales_[channel] * code + zeros_[channel];
    }
  }

 private:
  float* scales_;
  float* zeros_;
  std::size_t head_dim_;
  const half* current_ = nullptr;
};

/// One scale and one zero for the whole row; can replace RowParams.
struct WholeRowParams {
  FloatVector scale, zero;

  [[nodiscard]] HWY_INLINE FloatVector scales(std::size_t) const { return scale; }
  [[nodiscard]] HWY_INLINE FloatVector zeros(std::size_t) const { return zero; }
};

/// Writes scale * code + zero for a packed row: [head_dim], at least one vector of bytes long.
template <Encoding E, class Params>
HWY_INLINE void decode_packed_row(const std::byte* codes, const Params& params, std::size_t head_dim,
                                  float* out) {
  constexpr std::size_t bits = bits_of(E);
  constexpr std::size_t per_byte = 8 / bits;
  const std::size_t bytes = head_dim / per_byte;
  const hn::Rebind<std::uint8_t, Floats> byte_tag;
  for (std::size_t step = 0; step < bytes; step += lanes) {
    const std::size_t first = std::min(step, bytes - lanes);  // the last vectors may overlap
    const auto packed =
        hn::PromoteTo(ints, hn::LoadU(byte_tag, reinterpret_cast<const std::uint8_t*>(codes) + first));
    unroll<per_byte>([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA {
      const std::size_t channel = part * bytes + first;
      const auto code = hn::And(hn::ShiftRight<part * bits>(packed), hn::Set(ints, (1 << bits) - 1));
      hn::StoreU(hn::MulAdd(hn::ConvertTo(floats, code), params.scales(channel), params.zeros(channel)),
                 floats, out + channel);
    });
  }
}

template <Encoding E>
void decode_packed_side(const RowTileSide& side, std::size_t rows, std::size_t head_dim, float* params,
                        float* out) {
  RowParams row_params{params, head_dim};
  if (head_dim * bits_of(E) / 8 < lanes) {  // shorter than any real head
    for (std::size_t row = 0; row < rows; ++row) {
      row_params.use(side.format, side.scales[row], side.zeros[row]);
      row_params.decode_short_row(E, side.codes[row], out + row * head_dim);
    }
  } else if (side.format.granularity == Granularity::per_token && side.format.group == head_dim) {
    std::array<half, max_tile_rows> halves;
    std::array<float, max_tile_rows> scales;
    std::array<float, max_tile_rows> zeros;
    const auto gather = [&](const auto& from, auto& to) KVPOLICY_CPU_LAMBDA {
      for (std::size_t row = 0; row < rows; ++row) halves[row] = *from[row];
      for (std::size_t row = 0; row < rows; row += lanes) {
        hn::StoreU(load_half(halves.data() + row), floats, to.data() + row);
      }
    };
    gather(side.scales, scales);
    gather(side.zeros, zeros);
    for (std::size_t row = 0; row < rows; ++row) {
      decode_packed_row<E>(side.codes[row],
                           WholeRowParams{hn::Set(floats, scales[row]), hn::Set(floats, zeros[row])},
                           head_dim, out + row * head_dim);
    }
  } else {
    for (std::size_t row = 0; row < rows; ++row) {
      row_params.use(side.format, side.scales[row], side.zeros[row]);
      decode_packed_row<E>(side.codes[row], row_params, head_dim, out + row * head_dim);
    }
  }
}

/// `decode_side` for rows that do not fill whole vectors: it reads nothing after them and writes zeros
/// after them.
HWY_NOINLINE inline void decode_padded_side(const RowTileSide& side, std::size_t rows, std::size_t channels,
                                            float* out) {
  const RowFormat& format = side.format;
  const std::size_t width = padded_channels(channels);
  for (std::size_t row = 0; row < rows; ++row, out += width) {
    std::fill(out + channels, out + width, 0.0F);
    if (!is_quantized(format.encoding)) {
      load_dense(format.encoding, side.codes[row], {out, channels});
      continue;
    }
    const std::size_t group = format.granularity == Granularity::per_token ? format.group : 1;
    load_codes(format.encoding, side.codes[row], side.scales[row], side.zeros[row], group, {out, channels});
  }
}

/// Writes the rows of a row tile as float: [rows, padded_channels(head_dim)]. `params` holds 2 * head_dim
/// floats.
inline void decode_side(const RowTileSide& side, std::size_t rows, std::size_t head_dim, float* params,
                        float* out) {
  if (padded_channels(head_dim) != head_dim) return decode_padded_side(side, rows, head_dim, out);
  switch (side.format.encoding) {
    case Encoding::uint8: return decode_packed_side<Encoding::uint8>(side, rows, head_dim, params, out);
    case Encoding::uint4: return decode_packed_side<Encoding::uint4>(side, rows, head_dim, params, out);
    case Encoding::uint2: return decode_packed_side<Encoding::uint2>(side, rows, head_dim, params, out);
    default:
      with_dense_encoding(side.format.encoding, [&]<Encoding E>() KVPOLICY_CPU_LAMBDA {
        for (std::size_t row = 0; row < rows; ++row) {
          for (std::size_t channel = 0; channel < head_dim; channel += lanes) {
            hn::StoreU(load_numbers<E>(side.codes[row], channel), floats, out + row * head_dim + channel);
          }
        }
      });
  }
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
