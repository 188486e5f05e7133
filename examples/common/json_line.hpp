// SPDX-License-Identifier: Apache-2.0
//
// Writes JSON as the tools print it.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace kvpolicy::tools {

/// JSON on one line, or indented. A string may hold any bytes; those that are not UTF-8 become
/// U+FFFD.
template <class Json>
[[nodiscard]] std::string as_line(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace kvpolicy::tools
