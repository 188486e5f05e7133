// SPDX-License-Identifier: Apache-2.0
//
// The error types of the library. Each message says what was wrong, which value was met and what would fit.
// The object that threw is unchanged.
#pragma once

#include <bit>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include <kvpolicy/core/try.hpp>

/// Checks a precondition of an inner function; public entry points throw instead. A program may define it
/// before the first include, to route failures elsewhere, or as nothing.
#ifndef KVPOLICY_ASSERT
#include <cassert>
#define KVPOLICY_ASSERT(condition) assert(condition)
#endif

/// Decides what an error does. `error` is an object derived from `std::exception`. The definition must not
/// return; if it does, the program is aborted. Without a definition, errors are thrown; under
/// -fno-exceptions, `what()` is printed to stderr and the program is aborted. A program that defines it
/// must do so before the first include, and in the same way in every source file, because the functions
/// that use it are inline.
#ifndef KVPOLICY_THROW
#if KVPOLICY_EXCEPTIONS
#define KVPOLICY_THROW(error) throw error
#else
#define KVPOLICY_THROW(error) ::kvpolicy::print_and_abort(error)
#endif
#endif

namespace kvpolicy {

/// The default of `KVPOLICY_THROW` where there are no exceptions.
[[noreturn]] inline void print_and_abort(const std::exception& error) noexcept {
  std::fprintf(stderr, "kvpolicy: %s\n", error.what());
  std::abort();
}

/// Base of everything that the library throws itself (allocation failures stay `std::bad_alloc`).
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A setting of a policy, a plan, a cache or a model that cannot work.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A tensor whose shape, stride or values do not fit the call.
class ShapeError : public Error {
 public:
  using Error::Error;
};

/// More rows than a cache was made for.
class CapacityError : public Error {
 public:
  using Error::Error;
};

/// A rollback to a text length that the cache cannot return to: below the committed rows, or above its
/// tokens.
class RollbackError : public Error {
 public:
  using Error::Error;
};

/// A file that is not what it says it is.
class FormatError : public Error {
 public:
  using Error::Error;
};

/// Slow memory that cannot be allocated, read or written, or a file that cannot be written (the disk is
/// full or fails).
class StorageError : public Error {
 public:
  using Error::Error;
};

/// A device that is missing, too old, or failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

namespace detail {

template <class T>
concept Text = std::convertible_to<const T&, std::string_view>;
template <class T>
concept Character = std::same_as<T, char> || std::same_as<T, signed char> || std::same_as<T, unsigned char>;
// The library prints no wide characters and no enumerations here, and std::to_chars refuses them.
template <class T>
concept Number = std::same_as<T, bool> || requires(char* text, T number) { std::to_chars(text, text, number); };
template <class T>
concept Address = std::same_as<T, const void*> || std::same_as<T, void*>;

template <class Part>
void append_part(std::string& text, const Part& part) {
  static_assert(Text<Part> || Character<Part> || Number<Part> || Address<Part>,
                "kvpolicy: a part of a message is text, a character, a number or an address (const void*)");
  if constexpr (Text<Part>) {
    text.append(std::string_view{part});
  } else if constexpr (Character<Part>) {
    text.push_back(static_cast<char>(part));
  } else if constexpr (std::same_as<Part, bool>) {
    text.push_back(part ? '1' : '0');
  } else if constexpr (Address<Part>) {
    char digits[2 * sizeof part];
    if (part != nullptr) text.append("0x");
    const auto number = std::bit_cast<std::uintptr_t>(part);
    text.append(digits, std::to_chars(digits, digits + sizeof digits, number, 16).ptr);
  } else if constexpr (Number<Part>) {
    char digits[64];
    char* end = digits + sizeof digits;
    if constexpr (std::floating_point<Part>) {
      end = std::to_chars(digits, end, part, std::chars_format::general, 6).ptr;
    } else {
      end = std::to_chars(digits, end, part).ptr;
    }
    text.append(digits, end);
  }
}

}  // namespace detail

/// Concatenates the parts: text, single characters, numbers and addresses. Numbers look as a stream prints
/// them in the "C" locale: a float has six significant digits, a bool is 0 or 1. It uses no stream, because
/// then every header of the library would include the stream headers.
template <class... Parts>
[[nodiscard]] std::string message(const Parts&... parts) {
  std::string text;
  (detail::append_part(text, parts), ...);
  return text;
}

/// Throws `error`, or passes it to `KVPOLICY_THROW` where the program has defined that.
template <class E>
[[noreturn]] void throw_error(const E& error) {
  KVPOLICY_THROW(error);
#ifdef KVPOLICY_THROW_REPLACED
  std::abort();
#endif
}

/// Throws `E` with the concatenated parts.
template <class E, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw_error(E(message(parts...)));
}

/// Throws `E` with the concatenated parts unless `ok`. The parts are only formatted on failure.
template <class E = ConfigError, class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) fail<E>(parts...);
}

}  // namespace kvpolicy
