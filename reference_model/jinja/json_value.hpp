// SPDX-License-Identifier: Apache-2.0
//
// JSON as a template's values: messages and tools, as a client sends them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <reference_model/jinja/value.hpp>

namespace kvpolicy::reference::jinja {

/// Texts are marked as the caller's, keys too.
/// @throws ConfigError for values that are nested deeper than a template's can be, or whole numbers beyond 64 bits
[[nodiscard]] inline Value value_of(const nlohmann::ordered_json& json, std::size_t depth = 0) {
  if (depth > Value::most_depth) refuse("values are nested more than ", Value::most_depth, " deep");
  if (json.is_null()) return Value{None{}};
  if (json.is_boolean()) return Value{json.get<bool>()};
  if (json.is_number_unsigned() &&
      json.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    refuse("a number does not fit 64 bits");
  }
  if (json.is_number_integer()) return Value{json.get<std::int64_t>()};
  if (json.is_number()) return Value{json.get<double>()};
  if (json.is_string()) return Value{Text{json.get<std::string>(), /*is_given=*/true}};
  if (json.is_array()) {
    std::vector<Value> items;
    for (const auto& item : json) items.push_back(value_of(item, depth + 1));
    return Value::list(std::move(items));
  }
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [key, item] : json.items()) {
    items.emplace_back(Value{Text{key, /*is_given=*/true}}, value_of(item, depth + 1));
  }
  return Value::dict(std::move(items));
}

}  // namespace kvpolicy::reference::jinja
