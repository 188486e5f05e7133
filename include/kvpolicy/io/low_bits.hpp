// SPDX-License-Identifier: Apache-2.0
//
// Precisions by name, and the format that a name stands for:
//
//     int4      keys and values of 4 bits; 2, 3, 4, 5, 6 or 8
//     k8v4      keys of 8 bits, values of 4
//
// A name is what tools, the C interface and plans of engines call a precision, so the formats are chosen here and
// nowhere else. Heads that keep every row quantise keys per channel where their bits are few: outliers of keys
// are concentrated in few channels (KIVI, arXiv:2402.02750), and at equal bits that loses less than a rotation
// (docs/results.md). The first rows stay exact, as sinks of attention must (KVQuant, arXiv:2401.18079), and the latest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

namespace kvpolicy::io {

/// The largest group of up to `most` channels that divides the keys and values of every layer; `most` is a power
/// of two from 8 on.
[[nodiscard]] inline std::size_t channel_group(const ModelShape& shape, std::size_t most = 32) {
  std::size_t group = most;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const LayerShape layer = shape.layer(l);
    while (layer.head_dim % group != 0 || layer.value_dim % group != 0) group /= 2;
  }
  return group;
}

/// Bits of keys and of values; 0 where a name is none of a precision.
struct LowBits {
  std::size_t keys = 0;
  std::size_t values = 0;

  /// Reads "int4" or "k8v4".
  [[nodiscard]] static constexpr LowBits named(std::string_view name) {
    const auto bits = [](char digit) -> std::size_t {
      const auto width = static_cast<std::size_t>(digit - '0');
      return digit >= '0' && digit <= '9' && is_code_width(width) ? width : 0;
    };
    LowBits found;
    if (name.size() == 4 && name.starts_with("int")) found.keys = found.values = bits(name[3]);
    if (name.size() == 4 && name[0] == 'k' && name[2] == 'v') found = {bits(name[1]), bits(name[3])};
    return found.keys == 0 || found.values == 0 ? LowBits{} : found;
  }
  explicit constexpr operator bool() const { return keys != 0; }
};

/// Which numbers of the keys share a scale, in files and names.
enum class KeyScales : std::uint8_t { token, channel };
/// The names of the enumerators.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(KeyScales) { return {"token", "channel"}; }

/// Which rows are rotated before they are quantised (core/hadamard.hpp), in names.
enum class Hadamard : std::uint8_t { none, keys, values, both };
/// The names of the enumerators.
[[nodiscard]] constexpr std::array<std::string_view, 4> names_of(Hadamard) {
  return {"none", "keys", "values", "both"};
}
/// Whether keys are rotated.
[[nodiscard]] constexpr bool rotates_keys(Hadamard which) {
  return which == Hadamard::keys || which == Hadamard::both;
}
/// Whether values are rotated.
[[nodiscard]] constexpr bool rotates_values(Hadamard which) {
  return which == Hadamard::values || which == Hadamard::both;
}

/// How quantised rows are stored.
struct LowBitFormat {
  KeyScales keys = KeyScales::token;
  std::size_t sinks = 0;  ///< first rows that stay exact, where a head keeps every row
  ResidualConfig storage = {};

  /// The format of rows that may be dropped one by one: a scale and a zero for up to 32 channels of a row.
  [[nodiscard]] static LowBitFormat of_rows(LowBits bits, const ModelShape& shape, std::size_t residual) {
    const std::size_t group = channel_group(shape);
    return {.storage = {.bits = bits.keys,
                        .value_bits = bits.values == bits.keys ? 0 : bits.values,
                        .key_group = group,
                        .value_group = group,
                        .residual = residual}};
  }
  /// The format of heads that keep every row.
  [[nodiscard]] static LowBitFormat of_text(LowBits bits, const ModelShape& shape,
                                            std::size_t residual = 128) {
    LowBitFormat format = of_rows(bits, shape, residual);
    format.sinks = 4;
    const std::size_t group = channel_group(shape, 64);
    if (bits.keys == 8) {
      format.storage.key_group = group;
    } else {
      format.keys = KeyScales::channel;
      format.storage.key_group = bits.keys > 2 ? 64 : 32;
    }
    if (bits.values > 2) format.storage.value_group = group;
    return format;
  }

  /// The settings of a head that keeps every row in this format.
  template <Element E>
  [[nodiscard]] HeadSettings<E> head() const {
    if (keys == KeyScales::channel) {
      return typename QuantizedResidualCache<E, Granularity::per_channel>::Config{.sinks = sinks,
                                                                                  .storage = storage};
    }
    return typename QuantizedResidualCache<E>::Config{.sinks = sinks, .storage = storage};
  }
};

}  // namespace kvpolicy::io
