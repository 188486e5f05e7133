// SPDX-License-Identifier: Apache-2.0
//
// Precisions by name, and what a name may say besides:
//
//     int4                      keys and values of 4 bits; 2, 3, 4, 5, 6 or 8 (plan/low_bits.hpp)
//     k8v4                      keys of 8 bits, values of 4
//     hf4, hf2                  as transformers' QuantizedCache stores rows
//     int4:64,hadamard=none     the latest 64 rows exact, the others not rotated before they are quantised
//     int4:keys=token,group=32  a scale for 32 channels of a key
//     int8:halves=yes           8 bits of which drafts read the upper 4
//     int2:normal=values        codes of values stand for normal numbers, which need no zeros
//     fp8:scale=0.5             every row in E4M3, times that scale; also mxfp4 and nvfp4 (core/codebook.hpp)
//
// Tools, the C interface and plans of engines call a precision so.
#pragma once

#include <concepts>
#include <cstddef>
#include <string_view>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/plan/low_bits.hpp>

namespace kvpolicy::io {

/// Reads "int4" or "k8v4"; no bits where a word is none of a precision.
[[nodiscard]] constexpr LowBits low_bits_named(std::string_view word) {
  const auto bits = [](char digit) -> std::size_t {
    const auto width = static_cast<std::size_t>(digit - '0');
    return digit >= '0' && digit <= '9' && is_code_width(width) ? width : 0;
  };
  LowBits found;
  if (word.size() == 4 && word.starts_with("int")) found.keys = found.values = bits(word[3]);
  if (word.size() == 4 && word[0] == 'k' && word[2] == 'v') found = {bits(word[1]), bits(word[3])};
  return found.keys == 0 || found.values == 0 ? LowBits{} : found;
}

/// The bits of "hf4" and "hf2", which transformers has; 0 for any other word.
[[nodiscard]] constexpr std::size_t hugging_face_bits(std::string_view word) {
  return word == "hf4" ? 4 : word == "hf2" ? 2 : 0;
}

/// The numbers of "fp8", "mxfp4" and "nvfp4"; `even` for any other word.
[[nodiscard]] constexpr Codebook small_floats_named(std::string_view word) {
  for (const Codebook codebook : {Codebook::fp8, Codebook::mxfp4, Codebook::nvfp4}) {
    if (word == name_of(codebook)) return codebook;
  }
  return Codebook::even;
}

/// Whether a word names a precision of its own: "int4", "k8v4", "hf4" or "fp8".
[[nodiscard]] constexpr bool is_precision_name(std::string_view word) {
  return low_bits_named(word) || hugging_face_bits(word) != 0 || small_floats_named(word) != Codebook::even;
}

/// Settings that a name gives, each taken once: `PlanName` or what extends it.
template <class S>
concept NameSettings = requires(S& settings) {
  { settings.count("group", std::size_t{}) } -> std::same_as<std::size_t>;
  { settings.choice("keys", KeyScales{}) } -> std::same_as<KeyScales>;
  { settings.choice("halves", Halves{}) } -> std::same_as<Halves>;
  { settings.number("scale", 1.0) } -> std::same_as<double>;
};

namespace detail {

[[nodiscard]] inline LowBits known_bits(std::string_view storage) {
  const LowBits bits = low_bits_named(storage);
  require(static_cast<bool>(bits), in_quotes(storage),
          " is not int8, int6, int5, int4, int3, int2, bits of keys and of values such as k8v4, or fp8, "
          "mxfp4 or nvfp4");
  return bits;
}

[[nodiscard]] inline std::size_t at_least_1(std::string_view setting, std::size_t count) {
  require(count > 0, setting, " is 0, must be at least 1");
  return count;
}

// Takes `residual`, and `scale` where the head has one.
template <NameSettings S>
[[nodiscard]] LowBitFormat small_float_format(S& settings, Codebook codebook) {
  LowBitFormat format = LowBitFormat::of_small_floats(codebook);
  ResidualConfig& rows = format.storage;
  rows.residual = settings.count("residual", rows.residual);
  if (has_head_scale(codebook)) rows.key_scale = rows.value_scale = settings.number("scale", 1.0);
  return format;
}

}  // namespace detail

/// How rows are quantised that may be dropped one by one. Takes `group`, `residual`, `hadamard` and `normal`; of fp8,
/// mxfp4 and nvfp4 `residual` and `scale`.
/// @throws ConfigError for a `storage` that is no precision, or a setting that does not work
template <NameSettings S>
[[nodiscard]] ResidualConfig row_format(S& settings, std::string_view storage, const ModelShape& shape,
                                        std::size_t residual) {
  if (const Codebook codebook = small_floats_named(storage); codebook != Codebook::even) {
    return detail::small_float_format(settings, codebook).storage;
  }
  LowBitFormat rows = LowBitFormat::of_rows(detail::known_bits(storage), shape, residual);
  const std::size_t group = settings.count("group", rows.storage.value_group);
  rows.storage.key_group = rows.storage.value_group = detail::at_least_1("group", group);
  rows.storage.residual = settings.count("residual", residual);
  rows = rows.rotated(settings.choice("hadamard", Hadamard::none));
  return rows.with_normal(settings.choice("normal", NormalCodes::none)).storage;
}

/// How heads that keep every row quantise them. Takes `keys`, `key_group` where keys share scales along the text,
/// `group`, `residual`, `hadamard`, `normal` and, of int8, `halves`; of fp8, mxfp4 and nvfp4 `residual` and `scale`.
/// @throws ConfigError as `row_format`
template <NameSettings S>
[[nodiscard]] LowBitFormat text_format(S& settings, std::string_view storage, const ModelShape& shape) {
  if (const Codebook codebook = small_floats_named(storage); codebook != Codebook::even) {
    return detail::small_float_format(settings, codebook);
  }
  const LowBits bits = detail::known_bits(storage);
  const bool halves =
      bits.keys == 8 && bits.values == 8 && settings.choice("halves", Halves::no) == Halves::yes;
  LowBitFormat text = halves ? LowBitFormat::of_halves(shape) : LowBitFormat::of_text(bits, shape);
  ResidualConfig& rows = text.storage;
  const KeyScales keys = settings.choice("keys", text.keys);
  if (keys != text.keys) {
    rows.key_group = LowBitFormat::key_rows(bits.keys);
    if (keys == KeyScales::token) rows = LowBitFormat::of_rows(bits, shape, rows.residual).storage;
    text.keys = keys;
  }
  if (keys == KeyScales::channel) {
    rows.key_group = detail::at_least_1("key_group", settings.count("key_group", rows.key_group));
  }
  rows.value_group = detail::at_least_1("group", settings.count("group", rows.value_group));
  if (keys == KeyScales::token) rows.key_group = rows.value_group;
  rows.halves = halves;
  rows.residual = settings.count("residual", rows.residual);
  text = text.rotated(settings.choice("hadamard", text.hadamard()));
  return text.with_normal(settings.choice("normal", text.normal_codes()));
}

/// The plan of the name `storage` itself: every row of every head in that precision. Takes `sinks` besides.
/// @throws ConfigError as `row_format`
template <Element E, NameSettings S>
[[nodiscard]] HeadPlan<E> low_bit_plan(S& settings, std::string_view storage, const ModelShape& shape) {
  LowBitFormat format;
  if (const std::size_t bits = hugging_face_bits(storage); bits != 0) {
    format = LowBitFormat::of_hugging_face(bits, shape);
    ResidualConfig& rows = format.storage;
    rows.key_group = rows.value_group =
        detail::at_least_1("group", settings.count("group", rows.value_group));
    rows.residual = settings.count("residual", rows.residual);
  } else {
    format = text_format(settings, storage, shape);
    format.sinks = settings.count("sinks", format.sinks);
  }
  return HeadPlan<E>{shape, format.template head<E>()};
}

}  // namespace kvpolicy::io
