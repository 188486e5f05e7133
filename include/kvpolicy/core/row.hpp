// SPDX-License-Identifier: Apache-2.0
//
// Reads rows of any format as float, one at a time. Storage, selection and `ScalarEngine` use these simple
// functions; fast engines have loops of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy {

/// Converts dense numbers to float. `source` needs the alignment of its element type.
inline void load_dense(Encoding encoding, const std::byte* source, std::span<float> out) {
  const auto convert = [&]<class T>(T) {
    const auto* numbers = reinterpret_cast<const T*>(source);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(numbers[i]);
  };
  switch (encoding) {
    case Encoding::float32: std::memcpy(out.data(), source, out.size_bytes()); return;
    case Encoding::float16: return convert(float16{});
    case Encoding::bfloat16: return convert(bfloat16{});
    default: KVPOLICY_ASSERT(false && "load_dense: quantised rows need their scales");
  }
}

/// Converts float to dense numbers, rounded to nearest even.
inline void store_dense(Encoding encoding, std::span<const float> row, std::byte* out) {
  const auto convert = [&]<class T>(T) {
    auto* numbers = reinterpret_cast<T*>(out);
    for (std::size_t i = 0; i < row.size(); ++i) numbers[i] = T{row[i]};
  };
  switch (encoding) {
    case Encoding::float32: std::memcpy(out, row.data(), row.size_bytes()); return;
    case Encoding::float16: return convert(float16{});
    case Encoding::bfloat16: return convert(bfloat16{});
    default: KVPOLICY_ASSERT(false && "store_dense: quantised rows are written by groups");
  }
}

/// Rounds numbers in place to those that a dense encoding can represent.
inline void round_dense(Encoding encoding, std::span<float> row) {
  const auto convert = [&]<class T>(T) {
    for (float& number : row) number = static_cast<float>(T{number});
  };
  if (encoding == Encoding::float16) convert(float16{});
  if (encoding == Encoding::bfloat16) convert(bfloat16{});
}

/// The code of one channel of a packed row, whose lower parts, if codes have any, begin at `lower`. PageLayout
/// describes the order of codes.
[[nodiscard]] inline unsigned load_code(Encoding encoding, const std::byte* row, const std::byte* lower,
                                        std::size_t channel, std::size_t head_dim) {
  const auto part = [&](const std::byte* codes, std::size_t bits) {
    const std::size_t bytes = head_dim * bits / 8;
    const auto packed = static_cast<unsigned>(codes[channel % bytes]);
    return (packed >> (channel / bytes * bits)) & ((1U << bits) - 1U);
  };
  const CodeParts bits = code_parts(encoding);
  const unsigned code = part(row, bits.upper);
  return bits.lower == 0 ? code : code << bits.lower | part(lower, bits.lower);
}

/// Dequantises the codes of one packed row, whose lower parts, if codes have any, begin at `lower`. Each scale and zero
/// belongs to `group` neighbouring channels.
inline void load_codes(Encoding encoding, const std::byte* codes, const std::byte* lower,
                       const float16* scales, const float16* zeros, std::size_t group, std::span<float> out) {
  // First writes the codes, in the order of load_code but without its division for each channel.
  const auto for_each_code = [&](const std::byte* packed, std::size_t bits, auto visit) {
    const std::size_t bytes = out.size() * bits / 8;
    const unsigned mask = (1U << bits) - 1U;
    for (std::size_t shift = 0, channel = 0; shift < 8; shift += bits) {
      for (std::size_t byte = 0; byte < bytes; ++byte, ++channel) {
        visit(out[channel], static_cast<float>((static_cast<unsigned>(packed[byte]) >> shift) & mask));
      }
    }
  };
  const CodeParts bits = code_parts(encoding);
  for_each_code(codes, bits.upper, [](float& to, float code) { to = code; });
  if (bits.lower > 0) {
    const auto steps = static_cast<float>(1U << bits.lower);
    for_each_code(lower, bits.lower, [&](float& to, float code) { to = to * steps + code; });
  }
  // Then applies scale and zero.
  for (std::size_t channel = 0; channel < out.size(); ++scales, ++zeros) {
    const float scale = static_cast<float>(*scales);
    const float zero = static_cast<float>(*zeros);
    for (const std::size_t end = channel + group; channel < end; ++channel) {
      out[channel] = scale * out[channel] + zero;
    }
  }
}

/// Dequantises the codes of one packed row whose codebook is not `even`; `scales` are the bytes of its scales.
inline void load_numbers(const RowFormat& format, const std::byte* codes, const std::byte* lower,
                         const std::byte* scales, std::span<float> out) {
  const auto code = [&](std::size_t channel) {
    return load_code(format.encoding, codes, lower, channel, out.size());
  };
  if (format.codebook == Codebook::fp8) {
    for (std::size_t channel = 0; channel < out.size(); ++channel) {
      out[channel] = format.scale * E4m3::decode(static_cast<std::uint8_t>(code(channel)));
    }
    return;
  }
  const CodeNumbers table = code_numbers(format.codebook, bits_of(format.encoding));
  for (std::size_t channel = 0; channel < out.size(); scales += scale_bytes(format.codebook)) {
    const float factor = code_factor(format.codebook, scales, format.scale);
    for (const std::size_t end = channel + format.group; channel < end; ++channel) {
      out[channel] = factor * static_cast<float>(table[code(channel)]);
    }
  }
}

/// Loads row `row` of a plane as float [head_dim], dequantised if the plane is quantised.
inline void load_row(const Plane& plane, std::size_t row, std::span<float> out) {
  const auto place = plane.address_of(row);
  const Encoding encoding = plane.format.encoding;
  const std::size_t head_dim = out.size();
  if (!is_quantized(encoding)) {
    const std::size_t row_bytes = head_dim * bits_of(encoding) / 8;
    return load_dense(encoding, place.page + place.row * row_bytes, out);
  }
  const PageLayout layout{plane.format, head_dim, plane.page_rows};
  const std::byte* codes = place.page + place.row * layout.row_bytes;
  const bool per_token = plane.format.granularity == Granularity::per_token;
  const std::size_t block = per_token ? place.row : place.row / plane.format.group;
  const std::byte* scales = place.page + layout.scales_offset + block * layout.param_bytes;
  if (plane.format.codebook != Codebook::even) {
    load_numbers(plane.format, codes, codes + layout.lower_offset, scales, out);
  } else {
    const std::byte* zeros = scales + (layout.zeros_offset - layout.scales_offset);
    load_codes(encoding, codes, codes + layout.lower_offset, reinterpret_cast<const float16*>(scales),
               reinterpret_cast<const float16*>(zeros), per_token ? plane.format.group : 1, out);
  }
  if (plane.format.hadamard) rotate_hadamard(out);
}

}  // namespace kvpolicy
