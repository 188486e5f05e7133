// SPDX-License-Identifier: Apache-2.0
#include "serve/request_json.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::serve {
RequestJson read_object(std::string_view text, io::JsonLimits& limits, const std::string& where,
                        const std::string& param) {
  try {
    RequestJson read = io::parse_ordered_json(text, where, limits);
    if (read.is_object()) return read;
    throw ApiError{400, fmt::format("{} must be a JSON object, is {}", where, io::shown(read)), param};
  } catch (const FormatError& error) {
    throw ApiError{400, error.what(), param};
  }
}

const RequestJson& member(const RequestJson& object, std::string_view name) {
  static const RequestJson nothing;
  const auto found = object.find(name);
  return found == object.end() ? nothing : *found;
}

std::optional<double> number(const RequestJson& object, const std::string& name, double least, double most) {
  const RequestJson& value = member(object, name);
  if (value.is_null()) return std::nullopt;
  if (!value.is_number() || !(value.get<double>() >= least) || !(value.get<double>() <= most)) {
    throw ApiError{
        400, fmt::format("{} must be a number from {:g} to {:g}, is {}", name, least, most, io::shown(value)),
        name};
  }
  return value.get<double>();
}

std::optional<std::size_t> count(const RequestJson& object, const std::string& name, std::size_t least) {
  const RequestJson& value = member(object, name);
  if (value.is_null()) return std::nullopt;
  if (!value.is_number_integer() || value.get<double>() < static_cast<double>(least) ||
      value.get<double>() > 9e15) {
    throw ApiError{
        400, fmt::format("{} must be a whole number from {} to 9e15, is {}", name, least, io::shown(value)),
        name};
  }
  return value.get<std::size_t>();
}

bool flag(const RequestJson& object, const std::string& name) {
  const RequestJson& value = member(object, name);
  if (value.is_null()) return false;
  if (!value.is_boolean()) throw ApiError{400, name + " must be true or false", name};
  return value.get<bool>();
}

void refuse_others(const RequestJson& object, const std::string& where, const std::string& param,
                   std::span<const std::string_view> known) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || std::ranges::find(known, name) != known.end()) continue;
    throw ApiError{400, fmt::format("{}: {} is not known here", where, io::in_quotes(name)), param};
  }
}

}  // namespace kvpolicy::serve
