// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>

namespace {

using kvpolicy::Bytes;

constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

std::string at_run_time(const char* format, std::uint64_t count) {
  return fmt::format(fmt::runtime(format), Bytes{count});
}

}  // namespace

TEST_CASE("a number of bytes is printed in a suitable unit") {
  const std::vector<std::pair<std::uint64_t, std::string>> expected{
      {0, "0 B"},
      {1, "1 B"},
      {999, "999 B"},
      {1000, "1.00 kB"},
      {1023, "1.02 kB"},
      {1024, "1.02 kB"},
      {17'309'696, "17.31 MB"},
      {99'994, "99.99 kB"},
      {99'996, "100.0 kB"},
      {128'849'018'880, "128.8 GB"},
      {999'940, "999.9 kB"},
      {999'960, "1.00 MB"},
      {999'999'999'999, "1.00 TB"},
      {1'000'000'000'000'000, "1.00 PB"},
      {std::uint64_t{1} << 62, "4.61 EB"},
      {most, "18.45 EB"},
  };
  for (const auto& [count, text] : expected) CHECK(fmt::format("{}", Bytes{count}) == text);
}

TEST_CASE("or in units of powers of 1024") {
  const std::vector<std::pair<std::uint64_t, std::string>> expected{
      {0, "0 B"},
      {999, "999 B"},
      {1000, "1,000 B"},
      {1023, "1,023 B"},
      {1024, "1.00 KiB"},
      {1024 * 1024 - 1, "1.00 MiB"},
      {1023 * 1024, "1,023.0 KiB"},
      {std::uint64_t{80} << 30, "80.00 GiB"},
      {most, "16.00 EiB"},
  };
  for (const auto& [count, text] : expected) CHECK(fmt::format("{:iB}", Bytes{count}) == text);
}

TEST_CASE("a unit and decimals can be given") {
  CHECK(fmt::format("{:MB}", Bytes{0}) == "0.00 MB");
  CHECK(fmt::format("{:MB}", Bytes{33'560'000}) == "33.56 MB");
  CHECK(fmt::format("{:MB}", Bytes{1'234'560'000}) == "1,234.56 MB");
  CHECK(fmt::format("{:MB}", Bytes{1'234'567'890'000}) == "1,234,567.89 MB");
  CHECK(fmt::format("{:B}", Bytes{1000}) == "1,000 B");
  CHECK(fmt::format("{:B}", Bytes{most}) == "18,446,744,073,709,551,615 B");
  CHECK(fmt::format("{:kB}", Bytes{1023}) == "1.02 kB");
  CHECK(fmt::format("{:KiB}", Bytes{1023}) == "1.00 KiB");
  CHECK(fmt::format("{:.4KiB}", Bytes{1023}) == "0.9990 KiB");
  CHECK(fmt::format("{:.0MB}", Bytes{1'499'999}) == "1 MB");
  CHECK(fmt::format("{:.0}", Bytes{999'600}) == "1 MB");
  CHECK(fmt::format("{:.3}", Bytes{17'309'696}) == "17.310 MB");
  CHECK(fmt::format("{:.3}", Bytes{12}) == "12 B");
  CHECK(fmt::format("{:.1iB}", Bytes{1536}) == "1.5 KiB");
  CHECK(fmt::format("{:GiB}", Bytes{std::uint64_t{80} << 30}) == "80.00 GiB");
  CHECK(fmt::format("{:.3EiB}", Bytes{std::uint64_t{1} << 60}) == "1.000 EiB");
}

TEST_CASE("a width, an alignment and a fill can be given") {
  CHECK(fmt::format("[{:12}]", Bytes{17'309'696}) == "[    17.31 MB]");
  CHECK(fmt::format("[{:>12}]", Bytes{17'309'696}) == "[    17.31 MB]");
  CHECK(fmt::format("[{:<12}]", Bytes{17'309'696}) == "[17.31 MB    ]");
  CHECK(fmt::format("[{:^13}]", Bytes{17'309'696}) == "[  17.31 MB   ]");
  CHECK(fmt::format("[{:*^13.1MB}]", Bytes{17'309'696}) == "[***17.3 MB***]");
  CHECK(fmt::format("[{:B<7B}]", Bytes{1}) == "[1 BBBBB]");
  CHECK(fmt::format("[{:.>7}]", Bytes{0}) == "[....0 B]");
  CHECK(fmt::format("[{:·<6}]", Bytes{0}) == "[0 B···]");
  CHECK(fmt::format("[{:3}]", Bytes{17'309'696}) == "[17.31 MB]");
  CHECK(fmt::format("{1:MB}|{0}", Bytes{1}, Bytes{2'000'000}) == "2.00 MB|1 B");
}

TEST_CASE("a wrong format is refused") {
  // In a checked format string it does not compile: see compile_fail/.
  for (const char* format :
       {"{:KB}", "{:mb}", "{:MB }", "{: MB}", "{:ZB}", "{:x}", "{:d}", "{:.MB}", "{:.19MB}", "{:10001}",
        "{:99999999999999999999}", "{:.2B}", "{:i}", "{:>>>5}", "{:05}", "{:{}}", "{:\xC3<}", "{:.3.3}"}) {
    CAPTURE(format);
    CHECK_THROWS_AS(static_cast<void>(at_run_time(format, 1)), fmt::format_error);
  }
  try {
    static_cast<void>(at_run_time("{:KB}", 1));
    FAIL("no error");
  } catch (const fmt::format_error& error) {
    CHECK(std::string{error.what()} ==
          "Bytes: a format is [[fill]align][width][.digits][unit], the unit one of B, kB, MB, GB, "
          "TB, PB, EB, KiB, MiB, GiB, TiB, PiB, EiB, or iB for one that fits");
  }
}
