// SPDX-License-Identifier: Apache-2.0
//
// Messages are composed without a stream; the test compares them with a stream's output.
#include <kvpolicy/core/error.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <climits>
#include <cstdint>
#include <limits>
#include <locale>
#include <random>
#include <sstream>
#include <string>
#include <string_view>

using kvpolicy::message;

namespace {

template <class... Parts>
std::string streamed(const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << parts);
  return text.str();
}

template <class T>
void check_limits() {
  using limits = std::numeric_limits<T>;
  for (const T number : {limits::min(), limits::lowest(), limits::max(), T{0}, T{1}, T{42}}) {
    CHECK(message(number) == streamed(number));
    CHECK(message(static_cast<T>(number / 3)) == streamed(static_cast<T>(number / 3)));
  }
}

template <class T>
void check_special_numbers() {
  using limits = std::numeric_limits<T>;
  for (const T number : {T{0}, T{1}, limits::denorm_min(), limits::epsilon(), limits::infinity(),
                         limits::quiet_NaN(), T(0.1L), T(1) / 3, T(100000), T(999999), T(999999.5L),
                         T(1000000), T(1e-4L), T(9.9999949e-5L), T(2.5L), T(123456789)}) {
    CHECK(message(number) == streamed(number));
    CHECK(message(-number) == streamed(-number));
  }
}

}  // namespace

TEST_CASE("integers of all widths") {
  check_limits<short>();
  check_limits<unsigned short>();
  check_limits<int>();
  check_limits<unsigned>();
  check_limits<long>();
  check_limits<unsigned long>();
  check_limits<long long>();
  check_limits<unsigned long long>();
}

TEST_CASE("characters are printed as such, bytes included, and bools as numbers") {
  for (int code = CHAR_MIN; code <= CHAR_MAX; ++code) {
    const char c = static_cast<char>(code);
    CHECK(message(c) == streamed(c));
    CHECK(message(static_cast<signed char>(c)) == streamed(c));
    CHECK(message(static_cast<unsigned char>(c)) == streamed(c));
  }
  CHECK(message(true, false) == "10");
}

TEST_CASE("floating-point numbers, extremes included") {
  check_limits<float>();
  check_limits<double>();
  check_limits<long double>();
  check_special_numbers<float>();
  check_special_numbers<double>();
  check_special_numbers<long double>();
  std::mt19937_64 bits{7};
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t word = bits();
    const auto single = std::bit_cast<float>(static_cast<std::uint32_t>(word));
    const auto wide = std::bit_cast<double>(word);
    REQUIRE(message(single) == streamed(single));
    REQUIRE(message(wide) == streamed(wide));
  }
}

TEST_CASE("texts of every kind, and empty ones") {
  const char* pointer = "pointer";
  char buffer[] = "array";
  using namespace std::string_view_literals;
  CHECK(message() == "");
  CHECK(message("literal", ' ', pointer, ' ', buffer, ' ', std::string("string"), ' ', "a\0b"sv, ""sv) ==
        streamed("literal", ' ', pointer, ' ', buffer, ' ', std::string("string"), ' ', "a\0b"sv, ""sv));
}

TEST_CASE("addresses") {
  int object = 0;
  void* place = &object;
  const void* nothing = nullptr;
  const void* highest = std::bit_cast<const void*>(~std::uintptr_t{0});
  CHECK(message(place, ' ', static_cast<const void*>(place)) == streamed(place, ' ', place));
  CHECK(message(highest, ' ', nothing) == streamed(highest, ' ', nothing));
}

TEST_CASE("digit grouping of the global locale does not affect messages") {
  struct Grouped : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouped));
  const std::string text = message(1234567, ' ', 2.5);
  std::locale::global(before);
  CHECK(text == "1234567 2.5");
}

TEST_CASE("require throws the named type with the message") {
  CHECK_NOTHROW(kvpolicy::require<kvpolicy::ShapeError>(true, "rows: ", 3));
  CHECK_THROWS_WITH_AS(kvpolicy::require<kvpolicy::ShapeError>(false, "rows: ", std::size_t{3}, " > ", 2.5F),
                       "rows: 3 > 2.5", kvpolicy::ShapeError);
  CHECK_THROWS_AS(kvpolicy::fail<kvpolicy::ConfigError>("nothing fits"), kvpolicy::Error);
}
