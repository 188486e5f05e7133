// SPDX-License-Identifier: Apache-2.0
//
// One side of a block as float rows in first-level cache: what quantised rows need before anything
// else, and what a tile of many queries shares.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cpu/row_block.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// f.operator()<E>() for the dense encoding `encoding`.
template <class F>
HWY_INLINE void with_dense_encoding(Encoding encoding, F&& f) {
  switch (encoding) {
    case Encoding::float32: return f.template operator()<Encoding::float32>();
    case Encoding::float16: return f.template operator()<Encoding::float16>();
    case Encoding::bfloat16: return f.template operator()<Encoding::bfloat16>();
    default: KVPOLICY_ASSERT(false && "quantised rows are decoded first");
  }
}

/// Channel-wise scales and zeros of one row; refilled only when the row's own lie elsewhere.
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
  [[nodiscard]] const float* scales() const { return scales_; }
  [[nodiscard]] const float* zeros() const { return zeros_; }

 private:
  float* scales_;
  float* zeros_;
  std::size_t head_dim_;
  const half* current_ = nullptr;
};

/// Writes scale * code + zero for a packed row: [head_dim].
template <Encoding E>
HWY_INLINE void decode_packed_row(const std::byte* codes, const RowParams& params,
                                  std::size_t head_dim, float* out) {
  constexpr std::size_t bits = bits_of(E);
  constexpr std::size_t per_byte = 8 / bits;
  const std::size_t bytes = head_dim / per_byte;
  const hn::Rebind<std::uint8_t, Floats> byte_tag;
  const hn::Rebind<std::int32_t, Floats> ints;
  if (bytes < lanes) {  // shorter than any real head
    for (std::size_t channel = 0; channel < head_dim; ++channel) {
      const auto code = static_cast<float>(load_code(E, codes, channel, head_dim));
      out[channel] = params.scales()[channel] * code + params.zeros()[channel];
    }
    return;
  }
  for (std::size_t step = 0; step < bytes; step += lanes) {
    const std::size_t first = std::min(step, bytes - lanes);  // the last vectors may overlap
    const auto packed = hn::PromoteTo(
        ints, hn::LoadU(byte_tag, reinterpret_cast<const std::uint8_t*>(codes) + first));
    unroll<per_byte>([&](auto part) KVPOLICY_CPU_INLINE_LAMBDA {
      const std::size_t channel = part * bytes + first;
      const auto code = hn::And(hn::ShiftRight<part * bits>(packed),
                                hn::Set(ints, (1 << bits) - 1));
      hn::StoreU(hn::MulAdd(hn::ConvertTo(floats, code),
                            hn::LoadU(floats, params.scales() + channel),
                            hn::LoadU(floats, params.zeros() + channel)),
                 floats, out + channel);
    });
  }
}

/// The block's rows as float: [rows, head_dim]. `params` holds 2 * head_dim floats.
inline void decode_side(const BlockSide& side, std::size_t rows, std::size_t head_dim,
                        float* params, float* out) {
  const Encoding encoding = side.format.encoding;
  if (!is_quantized(encoding)) {
    with_dense_encoding(encoding, [&]<Encoding E>() {
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t channel = 0; channel < head_dim; channel += lanes) {
          hn::StoreU(load_numbers<E>(side.codes[row], channel), floats,
                     out + row * head_dim + channel);
        }
      }
    });
    return;
  }
  RowParams row_params{params, head_dim};
  const auto decode = [&]<Encoding E>() {
    for (std::size_t row = 0; row < rows; ++row) {
      row_params.use(side.format, side.scales[row], side.zeros[row]);
      decode_packed_row<E>(side.codes[row], row_params, head_dim, out + row * head_dim);
    }
  };
  switch (encoding) {
    case Encoding::uint8: return decode.template operator()<Encoding::uint8>();
    case Encoding::uint4: return decode.template operator()<Encoding::uint4>();
    default: return decode.template operator()<Encoding::uint2>();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
