// SPDX-License-Identifier: Apache-2.0
//
// Decodes one side of a row tile to float rows in the first-level cache. Quantised rows need that before
// any other work, and a tile of many queries decodes them once for all queries.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cpu/decode_codebook-inl.hpp>
#include <kvpolicy/cpu/decode_packed-inl.hpp>
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
    if (format.codebook != Codebook::even) {
      load_numbers(format, side.codes[row], side.codes[row] + side.lower_offset, side.code_scales[row],
                   {out, channels});
      continue;
    }
    const std::size_t group = format.granularity == Granularity::per_token ? format.group : 1;
    load_codes(format.encoding, side.codes[row], side.codes[row] + side.lower_offset, side.scales[row],
               side.zeros[row], group, {out, channels});
  }
}

/// Writes the rows of a row tile as float: [rows, padded_channels(head_dim)]. `params` holds 2 * head_dim
/// floats.
inline void decode_side(const RowTileSide& side, std::size_t rows, std::size_t head_dim, float* params,
                        float* out) {
  if (padded_channels(head_dim) != head_dim) return decode_padded_side(side, rows, head_dim, out);
  if (side.format.codebook != Codebook::even) return decode_codebook_side(side, rows, head_dim, params, out);
  switch (side.format.encoding) {
    case Encoding::uint8: return decode_packed_side<Encoding::uint8>(side, rows, head_dim, params, out);
    case Encoding::uint4: return decode_packed_side<Encoding::uint4>(side, rows, head_dim, params, out);
    case Encoding::uint2: return decode_packed_side<Encoding::uint2>(side, rows, head_dim, params, out);
    case Encoding::uint6: return decode_packed_side<Encoding::uint6>(side, rows, head_dim, params, out);
    case Encoding::uint5: return decode_packed_side<Encoding::uint5>(side, rows, head_dim, params, out);
    case Encoding::uint3: return decode_packed_side<Encoding::uint3>(side, rows, head_dim, params, out);
    case Encoding::uint4x2: return decode_packed_side<Encoding::uint4x2>(side, rows, head_dim, params, out);
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
