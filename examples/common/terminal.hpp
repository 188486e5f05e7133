// SPDX-License-Identifier: Apache-2.0
//
// Formats output for people: numbers with separators and units, and colours on a terminal (never in
// a file, and not where NO_COLOR is set: https://no-color.org).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvpolicy::tools {

/// Whether `stream` is a terminal and colours are allowed.
[[nodiscard]] bool wants_colour(std::FILE* stream);
[[nodiscard]] bool is_terminal(std::FILE* stream);

/// Columns that UTF-8 text takes on a terminal. Combining and wide characters are not handled, as
/// the tools print none.
[[nodiscard]] std::size_t display_width(std::string_view text);

[[nodiscard]] std::string thousands(std::uint64_t number);   ///< 8192 -> "8,192"
[[nodiscard]] std::string fixed(double number, int digits);  ///< 8192.04, 1 -> "8,192.0"
[[nodiscard]] std::string percent(double share);             ///< 0.981 -> "98.1 %"
[[nodiscard]] std::string duration(double seconds);          ///< "3.2 s", "4 min 10 s"

/// The elements, separated by spaces.
template <class Range>
[[nodiscard]] std::string spaced(const Range& range) {
  std::string text;
  for (const auto& element : range) {
    if (!text.empty()) text += ' ';
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(element)>>) {
      text += std::to_string(element);
    } else {
      text += element;
    }
  }
  return text;
}

/// Text that a terminal shows and does not obey: each control character except line ends and tabs
/// becomes '?'.
[[nodiscard]] std::string printable(std::string_view text);

/// Text on one line: control characters become escapes; longer text is cut to `most` columns with
/// an ellipsis.
[[nodiscard]] std::string one_line(std::string_view text, std::size_t most);

}  // namespace kvpolicy::tools
