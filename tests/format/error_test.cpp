// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include <fmt/format.h>
#if __has_include(<fmt/std.h>)
#include <fmt/std.h>  // has a formatter for every std::exception, from fmt 10 on
#endif

#include <kvpolicy/format.hpp>

namespace {

using namespace kvpolicy;

class OwnError : public ShapeError {
 public:
  using ShapeError::ShapeError;
};

// Prints the error after it was caught as the base class.
template <class E>
std::string caught() {
  try {
    fail<E>("Head", "Plan: wrong");
  } catch (const Error& error) {
    return fmt::format("{}", error);
  }
}

}  // namespace

TEST_CASE("an error prints with the name of its dynamic type") {
  CHECK(caught<Error>() == "Error: HeadPlan: wrong");
  CHECK(caught<ConfigError>() == "ConfigError: HeadPlan: wrong");
  CHECK(caught<ShapeError>() == "ShapeError: HeadPlan: wrong");
  CHECK(caught<CapacityError>() == "CapacityError: HeadPlan: wrong");
  CHECK(caught<CaptureError>() == "CaptureError: HeadPlan: wrong");
  CHECK(caught<RollbackError>() == "RollbackError: HeadPlan: wrong");
  CHECK(caught<FormatError>() == "FormatError: HeadPlan: wrong");
  CHECK(caught<StorageError>() == "StorageError: HeadPlan: wrong");
  CHECK(caught<DeviceError>() == "DeviceError: HeadPlan: wrong");
  CHECK(caught<OwnError>() == "ShapeError: HeadPlan: wrong");
}

TEST_CASE("an error also prints when it is caught by its own type") {
  CHECK(fmt::format("{}", ConfigError{"a"}) == "ConfigError: a");
  CHECK(fmt::format("{}", ShapeError{"a"}) == "ShapeError: a");
  CHECK(fmt::format("{}", CapacityError{"a"}) == "CapacityError: a");
  CHECK(fmt::format("{}", CaptureError{"a"}) == "CaptureError: a");
  CHECK(fmt::format("{}", RollbackError{"a"}) == "RollbackError: a");
  CHECK(fmt::format("{}", FormatError{"a"}) == "FormatError: a");
  CHECK(fmt::format("{}", StorageError{"a"}) == "StorageError: a");
  CHECK(fmt::format("[{:<16}]", DeviceError{"a"}) == "[DeviceError: a  ]");
  CHECK(std::string_view{OwnError{"a"}.type_name()} == "ShapeError");
}
