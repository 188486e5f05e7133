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
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

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

/// Base of everything that the library throws itself, but for a lack of memory, which is a `std::bad_alloc`.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  /// The name of its class in this file, without the namespace: "ConfigError".
  [[nodiscard]] virtual const char* type_name() const noexcept { return "Error"; }
};

/// A setting of a policy, a plan, a cache or a model that cannot work.
class ConfigError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "ConfigError"; }
};

/// A tensor whose shape, stride or values do not fit the call.
class ShapeError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "ShapeError"; }
};

/// More tokens or rows than a cache was made for or has reserved.
class CapacityError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "CapacityError"; }
};

/// A rollback to a text length that the cache cannot return to: below the committed rows, or above its
/// tokens.
class RollbackError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "RollbackError"; }
};

/// A file that is not what it says it is.
class FormatError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "FormatError"; }
};

/// Slow memory that cannot be allocated, read or written, or a file that cannot be written (the disk is
/// full or fails).
class StorageError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "StorageError"; }
};

/// A device that is missing, too old, or failed.
class DeviceError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "DeviceError"; }
};

/// A call of a device cache that a CUDA graph cannot hold, inside a capture.
class CaptureError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] const char* type_name() const noexcept override { return "CaptureError"; }
};

/// No memory for now: an engine's pages are all in use, say. The same call can succeed once some is given back, as after
/// any other `std::bad_alloc`; this one says what is lacking.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& what) : what_{what} {}
  [[nodiscard]] const char* what() const noexcept override { return what_.what(); }

 private:
  std::runtime_error what_;  // which can be copied without an exception
};

namespace detail {

template <class T>
concept Text = std::convertible_to<const T&, std::string_view>;
template <class T>
concept Character = std::same_as<T, char> || std::same_as<T, signed char> || std::same_as<T, unsigned char>;
// The library prints no wide characters and no enumerations here, and std::to_chars refuses them.
template <class T>
concept Number =
    std::same_as<T, bool> || requires(char* text, T number) { std::to_chars(text, text, number); };
template <class T>
concept Address = std::same_as<T, const void*> || std::same_as<T, void*>;

/// One part of a message as a plain value, so that one function formats all messages.
class MessagePart {
 public:
  explicit MessagePart(std::string_view text) : kind_{Kind::text}, text_{text} {}
  explicit MessagePart(const char* text) : MessagePart{std::string_view{text}} {}
  template <class Part>
  explicit MessagePart(const Part& part) : kind_{Kind::count}, number_{0} {
    static_assert(Text<Part> || Character<Part> || Number<Part> || Address<Part>,
                  "kvpolicy: a part of a message is text, a character, a number or an address (const void*)");
    if constexpr (Text<Part>) {
      kind_ = Kind::text;
      text_ = part;
    } else if constexpr (Character<Part>) {
      kind_ = Kind::character;
      character_ = static_cast<char>(part);
    } else if constexpr (Address<Part>) {
      kind_ = Kind::address;
      number_ = std::bit_cast<std::uintptr_t>(part);
    } else if constexpr (std::floating_point<Part>) {
      kind_ = Kind::real;
      real_ = part;
    } else if constexpr (Number<Part>) {
      if constexpr (std::is_signed_v<Part>) kind_ = Kind::whole;
      number_ = static_cast<std::uint64_t>(part);
    }
  }
  MessagePart(const MessagePart&) = delete;
  MessagePart& operator=(const MessagePart&) = delete;

  void append_to(std::string& text) const {
    char digits[64];
    char* const last = digits + sizeof digits;
    char* end = digits;
    switch (kind_) {
      case Kind::text: text.append(text_); break;
      case Kind::character: text.push_back(character_); break;
      case Kind::count: end = std::to_chars(digits, last, number_).ptr; break;
      case Kind::whole: end = std::to_chars(digits, last, static_cast<std::int64_t>(number_)).ptr; break;
      case Kind::real: end = std::to_chars(digits, last, real_, std::chars_format::general, 6).ptr; break;
      case Kind::address:
        if (number_ != 0) text.append("0x");
        end = std::to_chars(digits, last, number_, 16).ptr;
    }
    text.append(digits, end);
  }

 private:
  enum class Kind : std::uint8_t { text, character, count, whole, real, address };

  Kind kind_;
  union {
    std::string_view text_;
    char character_;
    std::uint64_t number_;
    long double real_;
  };
};

[[nodiscard]] inline std::string joined(std::initializer_list<MessagePart> parts) {
  std::string text;
  for (const MessagePart& part : parts) part.append_to(text);
  return text;
}

}  // namespace detail

/// Concatenates the parts: text, single characters, numbers and addresses. Numbers look as a stream prints
/// them in the "C" locale: a float has six significant digits, a bool is 0 or 1. It uses no stream, because
/// then every header of the library would include the stream headers.
template <class... Parts>
[[nodiscard]] std::string message(const Parts&... parts) {
  return detail::joined({detail::MessagePart{parts}...});
}

/// Throws `error`, or passes it to `KVPOLICY_THROW` where the program has defined that.
template <class E>
[[noreturn]] void throw_error(const E& error) {
  KVPOLICY_THROW(error);
#ifdef KVPOLICY_THROW_REPLACED
  std::abort();
#endif
}

namespace detail {

template <class E>
[[noreturn]] void fail_with(std::initializer_list<MessagePart> parts) {
  throw_error(E(joined(parts)));
}

}  // namespace detail

/// Throws `E` with the concatenated parts.
template <class E, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  detail::fail_with<E>({detail::MessagePart{parts}...});
}

/// Throws `E` with the concatenated parts unless `ok`. The parts are only formatted on failure.
template <class E = ConfigError, class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) fail<E>(parts...);
}

}  // namespace kvpolicy
