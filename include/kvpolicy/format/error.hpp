// SPDX-License-Identifier: Apache-2.0
//
// Prints errors with the name of their type. The dynamic type counts: a ConfigError caught as `const
// kvpolicy::Error&` prints as "ConfigError: ModelShape: …".
#pragma once

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

namespace detail {

/// Formats an error; supports width and alignment like text.
struct ErrorFormatter : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(const Error& error, Context& context) const -> decltype(context.out()) {
    return fmt::formatter<fmt::string_view>::format(fmt::format("{}: {}", error.type_name(), error.what()),
                                                    context);
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
struct fmt::formatter<kvpolicy::CaptureError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::RollbackError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::FormatError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::StorageError, char> : kvpolicy::detail::ErrorFormatter {};
template <>
struct fmt::formatter<kvpolicy::DeviceError, char> : kvpolicy::detail::ErrorFormatter {};
/// @endcond
