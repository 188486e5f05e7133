// SPDX-License-Identifier: Apache-2.0
//
// Prints errors with the name of their type. The dynamic type counts: a ConfigError caught as `const
// kvpolicy::Error&` prints as "ConfigError: ModelShape: …".
#pragma once

#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// The name of an error's type without its namespace, such as "ConfigError". For a type derived elsewhere
/// it is the name of the library's class that it derives from.
[[nodiscard]] inline std::string_view name_of(const Error& error) noexcept {
  if (dynamic_cast<const ConfigError*>(&error) != nullptr) return "ConfigError";
  if (dynamic_cast<const ShapeError*>(&error) != nullptr) return "ShapeError";
  if (dynamic_cast<const CapacityError*>(&error) != nullptr) return "CapacityError";
  if (dynamic_cast<const RollbackError*>(&error) != nullptr) return "RollbackError";
  if (dynamic_cast<const FormatError*>(&error) != nullptr) return "FormatError";
  if (dynamic_cast<const StorageError*>(&error) != nullptr) return "StorageError";
  if (dynamic_cast<const DeviceError*>(&error) != nullptr) return "DeviceError";
  return "Error";
}

namespace detail {

/// Formats an error; supports width and alignment like text.
struct ErrorFormatter : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(const Error& error, Context& context) const -> decltype(context.out()) {
    const std::string_view name = name_of(error);
    return fmt::formatter<fmt::string_view>::format(
        fmt::format("{}: {}", fmt::string_view{name.data(), name.size()}, error.what()), context);
  }
};

}  // namespace detail
}  // namespace kvpolicy

// Listed one by one: a template over all classes that derive from Error would be ambiguous with the one for
// std::exception in <fmt/std.h>.
/// @cond
template <>
struct fmt::formatter<kvpolicy::Error, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::ConfigError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::ShapeError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::CapacityError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::RollbackError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::FormatError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::StorageError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::DeviceError, char> : kvpolicy::detail::ErrorFormatter {};
/// @endcond
