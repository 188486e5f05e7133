// SPDX-License-Identifier: Apache-2.0
//
// Which numbers a quantised storage accepts. This is decided for the number as it is stored, rounded to the
// element type of the rows; accepted numbers are never read back as NaN.
#include <doctest/doctest.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

constexpr std::size_t head_dim = 64;
constexpr std::size_t rows = 32;

// The nearest number of the element type, ties to even, from 32768 to 131072, computed from the type's steps.
template <class E>
double kept_as(float x) {
  if (std::is_same_v<E, float> || !std::isfinite(x)) return x;
  const double step =
      std::abs(x) < 65536 ? (std::is_same_v<E, float16> ? 32 : 256) : (std::is_same_v<E, float16> ? 64 : 512);
  return std::nearbyint(static_cast<double>(x) / step) * step;
}

// All multiples of a quarter from 65,200 to 65,700, with both signs, and infinities and NaN.
std::vector<float> numbers_at_the_edge() {
  std::vector<float> numbers{std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max()};
  for (int quarter = 4 * 65200; quarter <= 4 * 65700; ++quarter) {
    numbers.push_back(static_cast<float>(quarter) / 4);
    numbers.push_back(-static_cast<float>(quarter) / 4);
  }
  return numbers;
}

// Rows in which one key has this number and all others are small.
struct Rows {
  std::vector<float> keys, values;
  explicit Rows(float odd) : keys(rows * head_dim, 1.0F), values(rows * head_dim, 2.0F) {
    keys[5 * head_dim + 17] = odd;
  }
  [[nodiscard]] Segment segment() const {
    const auto plane = [](const std::vector<float>& numbers) {
      return Plane{.base = reinterpret_cast<const std::byte*>(numbers.data()),
                   .row_stride = head_dim * sizeof(float)};
    };
    return {.keys = plane(keys), .values = plane(values), .rows = rows, .position = 100};
  }
};

template <class E, Granularity Keys>
void check_edge() {
  using Storage = ResidualStorage<E, Keys>;
  const StorageContext context{.head_dim = head_dim};
  const typename Storage::Config config{.bits = 8, .residual = 0};
  for (const float odd : numbers_at_the_edge()) {
    CAPTURE(odd);
    const Rows given{odd};
    Storage storage{config, context};
    const std::string said = thrown<ShapeError>([&] { storage.check(given.segment()); });
    const bool taken = std::abs(kept_as<E>(odd)) <= 65504;
    REQUIRE(said.empty() == taken);
    if (!taken) {
      REQUIRE(contains(said, "key at position 105, channel 17 is "));
      REQUIRE(contains(said, message(odd, ", kept as ")));
      continue;
    }
    storage.append(given.segment());
    SegmentList shown;
    storage.show(0, rows, {}, shown);
    std::vector<float> back(head_dim);
    // Half a step of 255 over the group's range, plus the rounding of half itself.
    const double bound = (std::abs(kept_as<E>(odd)) + 1) / 255 * 0.51;
    int wrong = 0;
    for (std::size_t row = 0; row < rows; ++row) {
      load_row(shown[0].keys, row, back);
      for (std::size_t c = 0; c < head_dim; ++c) {
        const double exact = row == 5 && c == 17 ? kept_as<E>(odd) : 1.0;
        wrong += std::abs(static_cast<double>(back[c]) - exact) <= bound ? 0 : 1;
      }
    }
    REQUIRE(wrong == 0);
  }
}

}  // namespace

TEST_CASE("a number is refused where its group would read NaN or beyond its step, and nowhere else") {
  check_edge<float, Granularity::per_token>();
  check_edge<float16, Granularity::per_token>();
  check_edge<bfloat16, Granularity::per_token>();
  check_edge<bfloat16, Granularity::per_channel>();
}

TEST_CASE("a value is refused like a key") {
  Rows given{1.0F};
  given.values[31 * head_dim] = -65420.0F;
  const ResidualStorage<bfloat16> storage{{}, {.head_dim = head_dim}};
  const std::string said = thrown<ShapeError>([&] { storage.check(given.segment()); });
  CHECK(contains(said, "value at position 131, channel 0 is -65420, kept as -65536 in bfloat16"));
}

TEST_CASE("a group of zeros stores the same bytes whatever their signs") {
  for (const Encoding encoding : {Encoding::uint2, Encoding::uint3, Encoding::uint4, Encoding::uint5,
                                  Encoding::uint6, Encoding::uint8}) {
    for (const float min : {-0.0F, 0.0F}) {
      for (const float max : {-0.0F, 0.0F}) {
        const AffineGrid grid = AffineGrid::covering(min, max, encoding);
        CHECK(grid.scale.bits == 0);
        CHECK(grid.zero.bits == 0);
      }
    }
  }
}
