// SPDX-License-Identifier: Apache-2.0
//
// The library's errors begin with the C++ type or function that found them. The user of a command
// has set an option or given a file, so the tools' messages name that instead.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::tools {

/// An error that already names the option or the file.
class NamedError : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

namespace detail {

// Drops the first word and its colon if that word is a C++ name.
[[nodiscard]] inline std::string without_first_word(std::string_view text, bool of_types_alone) {
  constexpr std::string_view letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_:";
  const std::size_t end = text.find(": ");
  const std::string_view name = text.substr(0, end);
  const bool word =
      end != std::string_view::npos && end > 0 && name.find_first_not_of(letters) == std::string_view::npos;
  const bool type = word && name.front() >= 'A' && name.front() <= 'Z';
  const bool function = word && !of_types_alone && name.find('_') != std::string_view::npos;
  return std::string{type || function ? text.substr(end + 2) : text};
}

}  // namespace detail

/// Turns "HeadKvBudgetConfig: capacity is 4, must be ..." into "capacity is 4, must be ..."; texts
/// without a type name stay as they are.
[[nodiscard]] inline std::string without_cpp_type(std::string_view text) {
  return detail::without_first_word(text, true);
}

/// Returns what `work` returns. An error about a setting is thrown again with `where` instead of a
/// C++ name.
template <class Work>
[[nodiscard]] auto named_by(const std::string& where, Work work) {
  try {
    return work();
  } catch (const NamedError& error) {
    throw NamedError{message(where, ": ", error.what())};
  } catch (const ConfigError& error) {
    throw NamedError{message(where, ": ", detail::without_first_word(error.what(), false))};
  }
}

}  // namespace kvpolicy::tools
