// SPDX-License-Identifier: Apache-2.0
//
// The named errors of the library. Each carries, in its message, what was wrong, the value that
// was met and what would fit; the object it was thrown from is unchanged.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

/// Checks a precondition of an inner function; public entry points throw instead. Define it
/// before the first include to route failures elsewhere, or to nothing.
#ifndef KVPOLICY_ASSERT
#include <cassert>
#define KVPOLICY_ASSERT(condition) assert(condition)
#endif

namespace kvpolicy {

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

/// Slow memory that cannot be had, read or written: a full disk, a failing one.
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

/// Throws `E` with the concatenated parts unless `ok`. The parts are only formatted on failure.
template <class E = ConfigError, class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) throw E(message(parts...));
}

}  // namespace kvpolicy
