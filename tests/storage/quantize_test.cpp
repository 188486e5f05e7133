// SPDX-License-Identifier: Apache-2.0
//
// Every number of a group is within half a step of its quantised value, whatever the group holds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/storage/plane_store.hpp>
#include <kvpolicy/storage/quantize.hpp>

#include "support/memory.hpp"
#include "support/policy_model.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

const std::vector<Encoding> encodings{Encoding::uint2, Encoding::uint3, Encoding::uint4,
                                      Encoding::uint5, Encoding::uint6, Encoding::uint8};

// Whether all numbers come back within scale / 2, up to the rounding of the float arithmetic.
bool is_bounded(const std::vector<float>& numbers, Encoding encoding) {
  const auto [min, max] = std::ranges::minmax(numbers);
  const auto grid = AffineGrid::covering(min, max, encoding);
  const auto scale = static_cast<double>(static_cast<float>(grid.scale));
  const auto zero = static_cast<double>(static_cast<float>(grid.zero));
  if (!std::isfinite(scale) || !std::isfinite(zero)) return false;
  for (const float x : numbers) {
    const double back = scale * grid.encode(x, encoding) + zero;
    const double slack =
        1e-6 * std::max({std::abs(static_cast<double>(min)), std::abs(static_cast<double>(max)), scale});
    if (!(std::abs(back - static_cast<double>(x)) <= scale / 2 + slack)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("rounding a number to half downwards and upwards") {
  test::Random random{1};
  int wrong = 0;
  for (int i = 0; i < 200000; ++i) {
    // All magnitudes that half represents, and smaller ones.
    const float x = std::ldexp(test::normal(random), static_cast<int>(test::below(random, 44)) - 30);
    if (std::abs(x) > float16::largest) continue;
    const auto low = static_cast<float>(detail::half_at_most(x));
    const auto high = static_cast<float>(detail::half_at_least(x));
    wrong += low <= x && x <= high ? 0 : 1;
    // Two neighbouring halves, or the number itself twice.
    wrong += low == high ? (x == low ? 0 : 1)
                         : (static_cast<float>(detail::neighbour(float16{low}, true)) == high ? 0 : 1);
  }
  CHECK(wrong == 0);
  CHECK(static_cast<float>(detail::neighbour(float16{0.0F}, true)) == 0x1p-24F);
  CHECK(static_cast<float>(detail::neighbour(float16{-0.0F}, false)) == -0x1p-24F);
  CHECK(static_cast<float>(detail::neighbour(float16{0x1p-24F}, false)) == 0.0F);
}

TEST_CASE("NaN and infinity have codes, too, because files may contain them") {
  const float not_a_number = std::nanf(""), infinity = INFINITY;
  for (const Encoding encoding : encodings) {
    const AffineGrid grid = AffineGrid::covering(1.0F, 2.0F, encoding);
    CHECK(grid.encode(not_a_number, encoding) == 0);
    CHECK(grid.encode(-infinity, encoding) == 0);
    CHECK(grid.encode(infinity, encoding) == (1U << bits_of(encoding)) - 1U);
    for (const float odd : {not_a_number, infinity, -infinity}) {
      CHECK(AffineGrid{float16{odd}, float16{1.0F}}.encode(infinity, encoding) == 0);
      CHECK(AffineGrid{float16{1.0F}, float16{not_a_number}}.encode(odd, encoding) == 0);
      CHECK(AffineGrid{float16{1.0F}, float16{infinity}}.encode(infinity, encoding) == 0);
    }
  }
}

TEST_CASE("a group of numbers is read back within half a step") {
  for (const Encoding encoding : encodings) {
    CHECK(is_bounded({0, 0, 0}, encoding));
    CHECK(is_bounded({3.14159F, 3.14159F}, encoding));  // constant, and not a half
    CHECK(is_bounded({-65504, 65504, 0, 1}, encoding));
    CHECK(is_bounded({65504, 65503.5F}, encoding));
    CHECK(is_bounded({-65504, -65503.9F}, encoding));
    CHECK(is_bounded({1e-9F, -1e-9F, 0}, encoding));
    CHECK(is_bounded({0x1p-24F, 0x1p-23F}, encoding));
    CHECK(is_bounded({-0.0F, 0.0F}, encoding));
    CHECK(is_bounded({1000, 1000.25F, 1000.7F}, encoding));  // a narrow range far from zero
    test::Random random{2};
    int wrong = 0;
    for (int round = 0; round < 3000; ++round) {
      std::vector<float> numbers;
      const float shift = std::ldexp(test::normal(random), static_cast<int>(test::below(random, 20)) - 8);
      const float spread = std::ldexp(1.0F, static_cast<int>(test::below(random, 24)) - 14);
      for (int i = 0; i < 12; ++i) numbers.push_back(shift + spread * test::normal(random));
      wrong += is_bounded(numbers, encoding) ? 0 : 1;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("packed rows: every head dimension, width, granularity and group") {
  test::Random random{3};
  test::CountingResource memory;
  for (const std::size_t head_dim : std::initializer_list<std::size_t>{64, 80, 96, 128, 256}) {
    for (const Encoding encoding : encodings) {
      for (const std::size_t group : {head_dim, head_dim / 2, std::size_t{16}, std::size_t{1}}) {
        for (const Granularity granularity : {Granularity::per_token, Granularity::per_channel}) {
          const bool per_token = granularity == Granularity::per_token;
          const std::size_t unit = per_token ? group : std::min<std::size_t>(std::bit_ceil(group), 16);
          PagePool pool{&memory, {.max_slab_bytes = 0}};
          const StorageContext context{head_dim, 16, &pool};
          PlaneStore store{{encoding, granularity, unit}, context};
          test::Tensor<float> rows{32, 1, head_dim, test::Layout::padded};
          rows.randomize(random, 3.0F);
          const auto view = std::as_const(rows).view();
          const Plane source{.base = reinterpret_cast<const std::byte*>(view.data),
                             .row_stride = view.token_stride * sizeof(float)};
          store.append(source, 32);
          REQUIRE(store.end() == 32);
          CHECK(store.bytes() == PlaneStore::bytes_of_rows(store.format(), context, 0, 32));
          std::vector<float> back(head_dim);
          int wrong = 0;
          for (std::size_t r = 0; r < 32; ++r) {
            load_row(store.plane(0), r, back);
            for (std::size_t c = 0; c < head_dim; ++c) {
              std::vector<double> block;
              for (std::size_t i = 0; i < unit; ++i) {
                block.push_back(static_cast<double>(per_token ? rows.number(r, 0, c - c % unit + i)
                                                              : rows.number(r - r % unit + i, 0, c)));
              }
              const double off =
                  std::abs(static_cast<double>(back[c]) - static_cast<double>(rows.number(r, 0, c)));
              wrong += off <= oracle::quantization_bound(block, bits_of(encoding)) ? 0 : 1;
            }
          }
          CAPTURE(head_dim);
          CAPTURE(unit);
          CHECK(wrong == 0);
        }
      }
    }
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

// The layout that PageLayout documents, byte by byte, because kernels depend on it.
TEST_CASE("packed rows: the channels of a byte are half or a quarter of a row apart") {
  const StorageContext context{64, 16};
  for (const Encoding encoding : encodings) {
    PlaneStore store{{encoding, Granularity::per_token, 64}, context};
    const auto levels = static_cast<float>((1U << bits_of(encoding)) - 1U);
    std::vector<float> row(64, 0.0F);
    row[63] = levels;  // scale 1 and zero 0, so that the code of a number is the number itself
    row[5] = 1;
    row[37] = 2;
    row[21] = 3;
    store.append({.base = reinterpret_cast<const std::byte*>(row.data()), .row_stride = 256}, 1);
    const auto* bytes = reinterpret_cast<const unsigned char*>(store.plane(0).pages[0]);
    if (encoding == Encoding::uint8) {
      CHECK(bytes[5] == 1);
      CHECK(bytes[37] == 2);
      CHECK(bytes[63] == 255);
    } else if (encoding == Encoding::uint4) {
      CHECK(bytes[5] == (1 | 2 << 4));
      CHECK(bytes[21] == 3);
      CHECK(bytes[31] == 15 << 4);
    } else if (encoding == Encoding::uint3) {  // the upper two bits, then the lowest one
      CHECK(bytes[5] == (1 >> 1 | (3 >> 1) << 2 | (2 >> 1) << 4));
      CHECK(bytes[15] == (7 >> 1) << 6);
      CHECK(bytes[16 + 5] == (1 | 1 << 2 | 0 << 4));
      CHECK(bytes[16 + 7] == 1 << 7);
    } else if (encoding == Encoding::uint5) {  // the upper four bits, then the lowest one
      CHECK(bytes[5] == (1 >> 1 | (2 >> 1) << 4));
      CHECK(bytes[21] == 3 >> 1);
      CHECK(bytes[31] == (31 >> 1) << 4);
      CHECK(bytes[32 + 5] == (1 | 1 << 2 | 0 << 4));
      CHECK(bytes[32 + 7] == 1 << 7);
    } else if (encoding == Encoding::uint6) {  // the upper four bits, then the lower two
      CHECK(bytes[5] == (1 >> 2 | (2 >> 2) << 4));
      CHECK(bytes[31] == (63 >> 2) << 4);
      CHECK(bytes[32 + 5] == (1 | 3 << 2 | 2 << 4));
      CHECK(bytes[32 + 15] == 3 << 6);
    } else {
      CHECK(bytes[5] == (1 | 3 << 2 | 2 << 4));
      CHECK(bytes[15] == 3 << 6);
    }
    const PageLayout layout{store.format(), 64, 16};
    CHECK(layout.row_bytes == 64 * bits_of(encoding) / 8);
    CHECK(layout.scales_offset == 16 * layout.row_bytes);
    CHECK(layout.zeros_offset == layout.scales_offset + 16 * 2);
    CHECK(layout.page_bytes == layout.zeros_offset + 16 * 2);
    CHECK(reinterpret_cast<const float16*>(bytes + layout.scales_offset)[0].bits == float16{1.0F}.bits);
    CHECK(reinterpret_cast<const float16*>(bytes + layout.zeros_offset)[0].bits == float16{0.0F}.bits);
  }
}

TEST_CASE("a row's grids and codes equal those computed number by number") {
  test::Random random{5};
  for (const Encoding encoding : encodings) {
    for (const std::size_t group : {8U, 16U, 24U, 32U, 104U, 128U}) {
      const std::size_t numbers = group == 128 ? 128 : 3 * group;
      CAPTURE(group);
      for (int round = 0; round < 50; ++round) {
        std::vector<float> row(numbers);
        for (float& x : row) {
          x = test::below(random, 9) == 0
                  ? 0.0F
                  : std::ldexp(test::normal(random), static_cast<int>(test::below(random, 12)) - 6);
          if (test::below(random, 9) == 0) x = -0.0F;
        }
        GridRow grids;
        grids.resize(numbers);
        std::vector<AffineGrid> expected;
        for (std::size_t first = 0; first < numbers; first += group) {
          const auto part = std::span<const float>{row}.subspan(first, group);
          const auto [min, max] = std::ranges::minmax(part);
          expected.push_back(AffineGrid::covering(min, max, encoding));
          const AffineGrid grid = grids.cover(part, first, encoding);
          REQUIRE(grid.scale == expected.back().scale);
          REQUIRE(grid.zero == expected.back().zero);
        }
        std::vector<std::byte> packed(numbers * bits_of(encoding) / 8, std::byte{0xff});
        const std::byte* lower = packed.data() + numbers * code_parts(encoding).upper / 8;
        grids.encode(row, encoding, packed.data(), const_cast<std::byte*>(lower));
        int wrong = 0;
        for (std::size_t i = 0; i < numbers; ++i) {
          const auto& grid = expected[i / group];
          const unsigned code = load_code(encoding, packed.data(), lower, i, numbers);
          wrong += code == grid.encode(row[i], encoding) ? 0 : 1;
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("columns of rows have a grid each") {
  test::Random random{6};
  constexpr std::size_t columns = 24;
  for (const Encoding encoding : encodings) {
    for (const std::size_t count : {1U, 2U, 7U, 32U}) {
      std::vector<float> rows(count * columns);
      for (float& x : rows) x = 10.0F * test::normal(random);
      GridRow grids;
      grids.resize(columns);
      std::vector<float16> scales(columns);
      std::vector<float16> zeros(columns);
      grids.cover_columns(rows, encoding, scales.data(), zeros.data());
      std::vector<std::byte> packed(columns * bits_of(encoding) / 8);
      for (std::size_t column = 0; column < columns; ++column) {
        float min = rows[column];
        float max = rows[column];
        for (std::size_t i = 1; i < count; ++i) {
          min = std::min(min, rows[i * columns + column]);
          max = std::max(max, rows[i * columns + column]);
        }
        const auto grid = AffineGrid::covering(min, max, encoding);
        CHECK(scales[column] == grid.scale);
        CHECK(zeros[column] == grid.zero);
        for (std::size_t i = 0; i < count; ++i) {
          std::byte* lower = packed.data() + columns * code_parts(encoding).upper / 8;
          grids.encode(std::span{rows}.subspan(i * columns, columns), encoding, packed.data(), lower);
          REQUIRE(load_code(encoding, packed.data(), lower, column, columns) ==
                  grid.encode(rows[i * columns + column], encoding));
        }
      }
    }
  }
}

TEST_CASE("codes are rounded to nearest, ties to even") {
  // Tests every code and every middle between two codes, on a grid of whole numbers; this does not depend on
  // how the library rounds.
  for (const Encoding encoding : encodings) {
    const int levels = (1 << bits_of(encoding)) - 1;
    const AffineGrid grid{float16{1.0F}, float16{-3.0F}};
    for (int twice = -8; twice <= 2 * levels + 8; ++twice) {
      const double exact = std::clamp(twice / 2.0, 0.0, static_cast<double>(levels));
      CHECK(grid.encode(static_cast<float>(twice / 2.0 - 3.0), encoding) == std::nearbyint(exact));
    }
  }
}
