// SPDX-License-Identifier: Apache-2.0
//
// Makes a plan from a short name and the shape of a model, for engines that take the plan from their command
// line or their configuration:
//
//     full                 every row, exact
//     int4                 every row in so many bits, the first 4 and the latest 128 exact; int4:64 for 64; also 2, 3, 5, 6, 8
//     k8v4                 the same with keys of 8 bits and values of 4 (io/low_bits.hpp)
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
#include <kvpolicy/io/low_bits.hpp>
#include <kvpolicy/io/plan_json.hpp>

namespace kvpolicy::io {

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

 private:
  void split(char mark, std::string_view& rest) {
    const std::size_t at = name.find(mark);
    if (at == std::string_view::npos) return;
    rest = name.substr(at + 1);
    name = name.substr(0, at);
  }
};

template <Element E>
[[nodiscard]] HeadPlan<E> duo_by_name(const PlanNameParts& parts, const ModelShape& shape, LowBits bits) {
  parts.take_at_most(1);
  require(!parts.source.empty(), "plan ", in_quotes(parts.text),
          ": needs the folder of a DuoAttention pattern, as in duo@FOLDER:0.5");
  const DuoPattern pattern = load_duo_pattern(std::string{parts.source});
  const DuoConfig config{.sparsity = parts.number(0, 0.5), .sinks = pattern.sinks, .recent = pattern.recent};
  return bits ? duo_plan<E>(shape, pattern.gates, config,
                            LowBitFormat::of_text(bits, shape).template head<E>())
              : duo_plan<E>(shape, pattern.gates, config);
}

}  // namespace detail

/// Makes the plan that `name` names, for a model of the given shape.
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
  const LowBits bits = LowBits::named(parts.storage.empty() ? parts.name : parts.storage);
  const bool plain = parts.storage.empty() && parts.source.empty();
  if (plain && parts.name == "full") {
    parts.take_at_most(0);
    return HeadPlan<E>{shape};
  }
  if (plain && bits) {
    parts.take_at_most(1);
    return HeadPlan<E>{
        shape, LowBitFormat::of_text(bits, shape, parts.number(0, std::size_t{128})).template head<E>()};
  }
  if (plain && parts.name == "sink_recent") {
    parts.take_at_most(2);
    return HeadPlan<E>{
        shape, typename SinkRecentCache<DenseStorage<E>>::Config{
                   .sinks = parts.number(0, std::size_t{16}), .recent = parts.number(1, std::size_t{128})}};
  }
  if (parts.name == "duo" && (parts.storage.empty() || bits)) {
    return detail::duo_by_name<E>(parts, shape, parts.storage.empty() ? LowBits{} : bits);
  }
  fail<ConfigError>("plan ", in_quotes(name),
                    ": is not known; known are full, int4 (also 8, 6, 5, 3, 2), k8v4, sink_recent:16,128, "
                    "duo@FOLDER:0.5, duo+int4@FOLDER:0.5 and a plan file whose name ends in .json");
}

}  // namespace kvpolicy::io
