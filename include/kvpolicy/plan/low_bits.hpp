// SPDX-License-Identifier: Apache-2.0
//
// The format of low-bit rows that a number of bits stands for, wherever a precision is asked for by its bits alone: by
// name (io/low_bits.hpp) and in plan search (plan/search_menu.hpp). Formats are chosen here and nowhere else.
//
// Heads that keep every row rotate what they quantise to less than 8 bits (QuaRot, arXiv:2404.00456), and share a
// key channel's scale among neighbouring rows (KIVI, arXiv:2402.02750). Either by itself loses about twice as much as
// both together (docs/results.md, "Low bits"). The first rows stay exact, as sinks of attention must (KVQuant,
// arXiv:2401.18079), and the latest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

namespace kvpolicy {

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

/// Bits of keys and of values: 2, 3, 4, 5, 6 or 8 each; 0 where there are none.
struct LowBits {
  std::size_t keys = 0;
  std::size_t values = 0;

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

/// Which codes stand for normal numbers (core/codebook.hpp), in names.
enum class NormalCodes : std::uint8_t { none, keys, values, both };
/// The names of the enumerators.
[[nodiscard]] constexpr std::array<std::string_view, 4> names_of(NormalCodes) {
  return {"none", "keys", "values", "both"};
}

/// Whether codes of 8 bits are stored in halves, in names.
enum class Halves : std::uint8_t { no, yes };
/// The names of the enumerators.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(Halves) { return {"no", "yes"}; }

/// How quantised rows are stored.
struct LowBitFormat {
  KeyScales keys = KeyScales::token;
  std::size_t sinks = 0;  ///< first rows that stay exact, where a head keeps every row
  ResidualConfig storage = {};

  /// First rows that stay exact where a head keeps every row.
  static constexpr std::size_t exact_first = 4;
  /// Rows of a channel whose keys share a scale; divides the rows of a page.
  [[nodiscard]] static constexpr std::size_t key_rows(std::size_t key_bits) { return key_bits > 2 ? 64 : 32; }

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
    format.sinks = exact_first;
    const std::size_t group = channel_group(shape, 64);
    if (bits.keys == 8) {
      format.storage.key_group = group;
    } else {
      format.keys = KeyScales::channel;
      format.storage.key_group = key_rows(bits.keys);
      format.storage.key_hadamard = true;
    }
    format.storage.value_hadamard = bits.values < 8;
    if (bits.values > 2) format.storage.value_group = group;
    return format;
  }
  /// The format of heads that keep every row in 8 bits whose upper halves are as good as 4 bits can be: a target of 8
  /// bits then has a draft of 4 in the same bytes (`Read::upper_half`; QuantSpec, arXiv:2502.10424).
  [[nodiscard]] static LowBitFormat of_halves(const ModelShape& shape, std::size_t residual = 128) {
    LowBitFormat format = of_text({4, 4}, shape, residual);
    format.storage.bits = 8;
    format.storage.halves = true;
    return format;
  }
  /// The format of heads that keep every row for reads with a bound (core/bounded_attention.hpp): keys of 8 bits in
  /// halves, whose scales along the text make the sure bound narrow, which a rotation would widen; values of
  /// `value_bits`.
  [[nodiscard]] static LowBitFormat of_bounded(const ModelShape& shape, std::size_t value_bits = 4,
                                               std::size_t residual = 128) {
    LowBitFormat format = of_text({4, value_bits}, shape, residual);
    format.storage.bits = 8;
    format.storage.value_bits = value_bits == 8 ? 0 : value_bits;
    format.storage.key_hadamard = false;
    format.storage.halves = true;
    return format;
  }
  /// The settings of transformers' QuantizedCache: 64 channels of a row share a scale, and no first row is exact.
  [[nodiscard]] static LowBitFormat of_hugging_face(std::size_t bits, const ModelShape& shape) {
    LowBitFormat format = of_rows({bits, bits}, shape, 128);
    format.storage.key_group = format.storage.value_group = channel_group(shape, 64);
    return format;
  }

  /// Every row as an engine has it whose rows come in fp8, MXFP4 or NVFP4: no row stays exact.
  /// @param codebook fp8, mxfp4 or nvfp4
  [[nodiscard]] static LowBitFormat of_small_floats(Codebook codebook) {
    return {.storage = {.bits = std::size_t{codebook == Codebook::fp8 ? 8U : 4U},
                        .residual = 0,
                        .key_codebook = codebook,
                        .value_codebook = codebook}};
  }

  /// Which codes stand for normal numbers.
  [[nodiscard]] NormalCodes normal_codes() const {
    const bool values = storage.value_codebook == Codebook::normal;
    if (storage.key_codebook == Codebook::normal) return values ? NormalCodes::both : NormalCodes::keys;
    return values ? NormalCodes::values : NormalCodes::none;
  }
  /// The same format with these codes standing for such numbers, and no others.
  [[nodiscard]] LowBitFormat with_normal(NormalCodes which) const {
    LowBitFormat format = *this;
    const bool of_keys = which == NormalCodes::keys || which == NormalCodes::both;
    const bool of_values = which == NormalCodes::values || which == NormalCodes::both;
    format.storage.key_codebook = of_keys ? Codebook::normal : Codebook::even;
    format.storage.value_codebook = of_values ? Codebook::normal : Codebook::even;
    return format;
  }

  /// Which rows are rotated.
  [[nodiscard]] Hadamard hadamard() const {
    if (storage.key_hadamard) return storage.value_hadamard ? Hadamard::both : Hadamard::keys;
    return storage.value_hadamard ? Hadamard::values : Hadamard::none;
  }
  /// The same format with these rows rotated, and no others.
  [[nodiscard]] LowBitFormat rotated(Hadamard which) const {
    LowBitFormat format = *this;
    format.storage.key_hadamard = which == Hadamard::keys || which == Hadamard::both;
    format.storage.value_hadamard = which == Hadamard::values || which == Hadamard::both;
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

}  // namespace kvpolicy
