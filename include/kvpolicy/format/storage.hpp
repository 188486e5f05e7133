// SPDX-License-Identifier: Apache-2.0
//
// Prints how rows are stored: encodings ("uint4"), granularities ("per token"), formats ("uint4 per token
// in groups of 32") and the settings of storages ("4 bits but for the latest 128").
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/format/bytes.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy {

/// The settings of a storage, which kvpolicy::format can print.
template <class C>
concept StorageConfig = std::same_as<typename C::storage_type::Config, C>;

namespace detail {

/// A formatter of the text that `Make::text` returns; supports width and alignment like text.
template <class Make>
struct TextFormatter : fmt::formatter<fmt::string_view> {
  template <class T, class Context>
  auto format(const T& value, Context& context) const -> decltype(context.out()) {
    const std::string text = Make::text(value);
    return fmt::formatter<fmt::string_view>::format({text.data(), text.size()}, context);
  }
};

// Whether keys and values are fp8, MXFP4 or NVFP4.
[[nodiscard]] inline bool are_small_floats(const HeadRule& rule) {
  return rule.key_codebook == rule.value_codebook && rule.key_codebook != Codebook::even &&
         rule.key_codebook != Codebook::normal;
}

// Which numbers share a scale, unless it is the whole row.
[[nodiscard]] inline std::string groups_text(const HeadRule& rule) {
  if (are_small_floats(rule)) return "";  // their name says it
  const auto of = [](std::size_t group) {
    return group == 0 ? std::string{"the row"} : fmt::format("{}", group);
  };
  if (rule.key_per_channel) {
    std::string text = fmt::format(", keys per channel in groups of {}", rule.key_group);
    if (rule.value_group != 0) text += fmt::format(", values in groups of {}", rule.value_group);
    return text;
  }
  if (rule.key_group != rule.value_group) {
    return fmt::format(", groups: {} for keys, {} for values", of(rule.key_group), of(rule.value_group));
  }
  return rule.key_group == 0 ? "" : fmt::format(", groups of {}", rule.key_group);
}

// "4 bits", "8-bit keys and 4-bit values", or "fp8".
[[nodiscard]] inline std::string bits_text(const HeadRule& rule) {
  if (are_small_floats(rule)) {
    return std::string{name_of(rule.key_codebook)};
  }
  const std::size_t keys = bits_of(rule.key_encoding);
  const std::size_t values = bits_of(rule.value_encoding);
  return keys == values ? fmt::format("{} bits", keys)
                        : fmt::format("{}-bit keys and {}-bit values", keys, values);
}

// ", values in the normal codebook", or the scale of a head that has one.
[[nodiscard]] inline std::string codebook_text(const HeadRule& rule) {
  const auto scaled = [](Codebook codebook, double scale) {
    return has_head_scale(codebook) && scale != 1.0 ? fmt::format(" times {:.6g}", scale) : std::string{};
  };
  const std::string keys = scaled(rule.key_codebook, rule.key_scale);
  const std::string values = scaled(rule.value_codebook, rule.value_scale);
  if (rule.key_codebook != rule.value_codebook) {
    std::string text;
    if (rule.key_codebook != Codebook::even)
      text += fmt::format(", keys in the {} codebook{}", name_of(rule.key_codebook), keys);
    if (rule.value_codebook != Codebook::even)
      text += fmt::format(", values in the {} codebook{}", name_of(rule.value_codebook), values);
    return text;
  }
  if (rule.key_codebook == Codebook::normal) return ", in the normal codebook";
  if (keys == values) return keys.empty() ? "" : "," + keys;
  return fmt::format(", keys{}, values{}", keys.empty() ? " times 1" : keys,
                     values.empty() ? " times 1" : values);
}

struct StorageText {
  [[nodiscard]] static std::string text(Encoding encoding) { return std::string{name_of(encoding)}; }

  [[nodiscard]] static std::string text(Granularity granularity) {
    return granularity == Granularity::per_token ? "per token" : "per channel";
  }

  [[nodiscard]] static std::string text(const RowFormat& format) {
    if (!is_quantized(format.encoding)) return text(format.encoding);
    const bool named = format.codebook != Codebook::even;
    return fmt::format("{}{}{} {} in groups of {}", named ? name_of(format.codebook) : "",
                       named ? " in " : "", text(format.encoding), text(format.granularity), format.group);
  }

  /// How packed rows are stored.
  [[nodiscard]] static std::string text(const HeadRule& rule) {
    std::string text = bits_text(rule);
    const bool has_sinks = rule.sinks > 0 && rule.recent == 0;
    if (has_sinks) text += fmt::format(" but for the first {}", with_commas(rule.sinks));
    if (rule.residual > 0) {
      text += fmt::format("{} the latest {}", has_sinks ? " and" : " but for", with_commas(rule.residual));
    }
    text += groups_text(rule);
    if (rule.key_hadamard || rule.value_hadamard) {
      text += !rule.value_hadamard ? ", keys rotated" : !rule.key_hadamard ? ", values rotated" : ", rotated";
    }
    text += codebook_text(rule);
    if (rule.kivi_flush) text += ", flushed as published";
    return text;
  }

  [[nodiscard]] static std::string text(const ResidualConfig& config) {
    const PerTokenStorage<float>::Config per_token = config;
    return text(per_token);
  }

  template <StorageConfig C>
  [[nodiscard]] static std::string text(const C& config) {
    HeadRule rule;
    config.describe(rule, 0);
    return rule.is_quantized() ? text(rule) : text(encoding_of<typename C::storage_type::element_type>);
  }
};

}  // namespace detail

/// How the rows of a head are quantised: "4 bits but for the latest 128, groups of 32". A group of 0 means
/// that a whole row shares a scale.
[[nodiscard]] inline std::string describe_precision(const HeadRule& rule) {
  return detail::StorageText::text(rule);
}

}  // namespace kvpolicy

/// @cond
template <>
struct fmt::formatter<kvpolicy::Encoding, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::StorageText> {};
template <>
struct fmt::formatter<kvpolicy::Granularity, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::StorageText> {};
template <>
struct fmt::formatter<kvpolicy::RowFormat, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::StorageText> {};
template <>
struct fmt::formatter<kvpolicy::ResidualConfig, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::StorageText> {};
template <kvpolicy::StorageConfig C>
struct fmt::formatter<C, char> : kvpolicy::detail::TextFormatter<kvpolicy::detail::StorageText> {};
/// @endcond
