// SPDX-License-Identifier: Apache-2.0
//
// The named errors of the library. Each carries, in its message, what was wrong, the value that
// was met and what would fit; the object it was thrown from is unchanged.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

#include <kvpolicy/core/try.hpp>

/// Checks a precondition of an inner function; public entry points throw instead. Define it
/// before the first include to route failures elsewhere, or to nothing.
#ifndef KVPOLICY_ASSERT
#include <cassert>
#define KVPOLICY_ASSERT(condition) assert(condition)
#endif

/// What becomes of an error. `error` is an object derived from `std::exception`; whatever stands
/// here must not return (a program that does is aborted). Without a definition the error is thrown,
/// or, under -fno-exceptions, its `what()` is printed to stderr and the program aborted. Define it
/// before the first include, and the same in all of a program: the functions that use it are
/// inline.
#ifndef KVPOLICY_THROW
#if KVPOLICY_EXCEPTIONS
#define KVPOLICY_THROW(error) throw error
#else
#define KVPOLICY_THROW(error) ::kvpolicy::print_and_abort(error)
#endif
#endif

namespace kvpolicy {

/// What `KVPOLICY_THROW` is where there are no exceptions and nothing else is defined.
[[noreturn]] inline void print_and_abort(const std::exception& error) noexcept {
  std::fprintf(stderr, "kvpolicy: %s\n", error.what());
  std::abort();
}

/// Base of everything that the library throws itself (allocation failures stay `std::bad_alloc`).
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A setting that cannot work: of a policy, a plan, a cache or a model.
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

/// A rollback to rows that are committed already, or were never seen.
class RollbackError : public Error {
 public:
  using Error::Error;
};

/// A file that is not what it says it is.
class FormatError : public Error {
 public:
  using Error::Error;
};

/// Slow memory that cannot be had, read or written, or a file that cannot be written: a full disk,
/// a failing one.
class StorageError : public Error {
 public:
  using Error::Error;
};

/// A device that is missing, too old, or failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// The parts, streamed one after another.
template <class... Parts>
[[nodiscard]] std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Throws `error`, or does with it what `KVPOLICY_THROW` says.
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
