// SPDX-License-Identifier: Apache-2.0
//
// What filters and methods alike do with texts and numbers.
#pragma once

#include <cstdint>
#include <string_view>

#include <reference_model/jinja/interpreter.hpp>

namespace kvpolicy::reference::jinja {

[[nodiscard]] constexpr bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
[[nodiscard]] constexpr bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
[[nodiscard]] constexpr char raised(char c, bool /*begins*/ = true) {
  return is_lower(c) ? static_cast<char>(c - 'a' + 'A') : c;
}
[[nodiscard]] constexpr char lowered(char c, bool /*begins*/ = false) {
  return is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c;
}

/// Each character by `of`, which is told whether it begins a word. Python's rules for letters beyond ASCII are not here.
/// @throws ConfigError for such, naming `what`
[[nodiscard]] Text in_ascii(Interpreter& run, const Value& value, std::string_view what,
                            char (*of)(char c, bool begins));
/// At most `most` of them; all below zero.
[[nodiscard]] Text replaced(Interpreter& run, const Text& text, const Text& from, const Text& to,
                            std::int64_t most);
/// Jinja's filters `int` and `float`.
[[nodiscard]] Value number_of(const Value& value, const Value& otherwise, bool whole);

/// Python's replacement fields: "%s" and "{}".
[[nodiscard]] Text percent_format(Interpreter& run, const Text& format, const Value& values);
[[nodiscard]] Text brace_format(Interpreter& run, const Text& format, const Arguments& values);

}  // namespace kvpolicy::reference::jinja
