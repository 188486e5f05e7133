// SPDX-License-Identifier: Apache-2.0
//
// Makes a plan from a short name and the shape of a model, for engines that take the plan from their command
// line or their configuration:
//
//     full                 every row, exact
//     int8  int4  int2     every row in so many bits, the latest 128 exact; int4:64 for 64
//     sink_recent:16,128   the first 16 rows and the latest 128
//     duo@PATH:0.5         half of the heads stream, by the gates of a DuoAttention pattern (io/duo_pattern.hpp)
//     duo+int4@PATH:0.5    the same; the heads that keep every row keep it as int4 does
//     PATH.json            a plan file (io/plan_json.hpp)
//
// A name means here what it means to the tools' `--plan`, which has more names and more settings.
#pragma once

#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/plan_json.hpp>

namespace kvpolicy::io {

/// The largest group of up to 32 channels that divides the keys and values of every layer.
[[nodiscard]] inline std::size_t channel_group(const ModelShape& shape) {
  std::size_t group = 32;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const LayerShape layer = shape.layer(l);
    while (layer.head_dim % group != 0 || layer.value_dim % group != 0) group /= 2;
  }
  return group;
}

namespace detail {

// name[+storage][@source][:number,...]; a : belongs to the source up to the last /.
struct PlanNameParts {
  std::string_view text;
  std::string_view name;
  std::string_view storage;
  std::string_view source;
  std::vector<std::string_view> numbers;

  explicit PlanNameParts(std::string_view all) : text{all}, name{all} {
    const std::size_t slash = all.rfind('/');
    const std::size_t colon = all.find(':', slash == std::string_view::npos ? 0 : slash);
    if (colon != std::string_view::npos) {
      for (std::string_view rest = all.substr(colon + 1);;) {
        const std::size_t comma = rest.find(',');
        numbers.push_back(rest.substr(0, comma));
        if (comma == std::string_view::npos) break;
        rest.remove_prefix(comma + 1);
      }
      name = all.substr(0, colon);
    }
    split('@', source);
    split('+', storage);
  }

  void take_at_most(std::size_t count) const {
    require(numbers.size() <= count, "plan ", in_quotes(text), ": takes at most ", count, " numbers, has ",
            numbers.size());
  }

  template <class Number>
  [[nodiscard]] Number number(std::size_t index, Number otherwise) const {
    if (index >= numbers.size()) return otherwise;
    const std::string_view digits = numbers[index];
    Number value{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    require(error == std::errc{} && end == digits.data() + digits.size(), "plan ", in_quotes(text), ": ",
            in_quotes(digits), " is not a number that fits there");
    return value;
  }

  // 8, 4 or 2 for int8, int4 and int2, else 0.
  [[nodiscard]] static std::size_t bits(std::string_view word) {
    return word == "int8" ? 8 : word == "int4" ? 4 : word == "int2" ? 2 : 0;
  }

 private:
  void split(char mark, std::string_view& rest) {
    const std::size_t at = name.find(mark);
    if (at == std::string_view::npos) return;
    rest = name.substr(at + 1);
    name = name.substr(0, at);
  }
};

template <Element E>
[[nodiscard]] HeadPlan<E> duo_by_name(const PlanNameParts& parts, const ModelShape& shape,
                                      const ResidualConfig& codes) {
  parts.take_at_most(1);
  require(!parts.source.empty(), "plan ", in_quotes(parts.text),
          ": needs the folder of a DuoAttention pattern, as in duo@FOLDER:0.5");
  const DuoPattern pattern = load_duo_pattern(std::string{parts.source});
  const DuoConfig config{.sparsity = parts.number(0, 0.5), .sinks = pattern.sinks, .recent = pattern.recent};
  return parts.storage.empty() ? duo_plan<E>(shape, pattern.gates, config)
                               : quantized_duo_plan<E>(shape, pattern.gates, config, codes);
}

}  // namespace detail

/// Makes the plan that `name` names, for a model of the given shape. Quantised rows have the scale and zero of
/// `channel_group(shape)` channels each.
/// @throws ConfigError for a name that is not known, a setting that does not work, or a file for another
/// shape; FormatError for a file that cannot be read.
template <Element E = float>
[[nodiscard]] HeadPlan<E> named_plan(std::string_view name, const ModelShape& shape) {
  shape.validate();
  if (name.ends_with(".json")) {
    HeadPlan<E> plan = load_plan<E>(std::string{name});
    require(plan.shape() == shape, name, ": is a plan for ", write_shape(plan.shape()), "; the model has ",
            write_shape(shape));
    return plan;
  }
  const detail::PlanNameParts parts{name};
  const std::size_t bits = parts.bits(parts.storage.empty() ? parts.name : parts.storage);
  const ResidualConfig codes{
      .bits = bits, .key_group = channel_group(shape), .value_group = channel_group(shape)};
  const bool quantized = bits != 0;
  const bool plain = parts.storage.empty() && parts.source.empty();
  if (plain && parts.name == "full") {
    parts.take_at_most(0);
    return HeadPlan<E>{shape};
  }
  if (plain && quantized) {
    parts.take_at_most(1);
    ResidualConfig storage = codes;
    storage.residual = parts.number(0, std::size_t{128});
    return HeadPlan<E>{shape, typename QuantizedResidualCache<E>::Config{.storage = storage}};
  }
  if (plain && parts.name == "sink_recent") {
    parts.take_at_most(2);
    return HeadPlan<E>{
        shape, typename SinkRecentCache<DenseStorage<E>>::Config{
                   .sinks = parts.number(0, std::size_t{16}), .recent = parts.number(1, std::size_t{128})}};
  }
  if (parts.name == "duo" && (parts.storage.empty() || quantized)) {
    return detail::duo_by_name<E>(parts, shape, codes);
  }
  fail<ConfigError>("plan ", in_quotes(name),
                    ": is not known; known are full, int8, int4, int2, sink_recent:16,128, "
                    "duo@FOLDER:0.5, duo+int4@FOLDER:0.5 and a plan file whose name ends in .json");
}

}  // namespace kvpolicy::io
