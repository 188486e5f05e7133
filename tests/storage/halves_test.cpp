// SPDX-License-Identifier: Apache-2.0
//
// Codes of 8 bits in halves: whole codes are those of plain 8-bit rows, and upper halves are a page of 4-bit rows.
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/storage/plane_store.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

struct Stores {
  RowFormat format;
  StorageContext context;
  PlaneStore plain;
  PlaneStore halves;
  std::vector<float> rows;

  Stores(Granularity granularity, std::size_t group, std::size_t head_dim, std::size_t count,
         test::Random& random)
      : format{Encoding::uint4x2, granularity, group},
        context{head_dim, 16},
        plain{{Encoding::uint8, granularity, group}, context},
        halves{format, context},
        rows(count * head_dim) {
    for (float& number : rows) number = test::normal(random);
    const Plane given{.base = reinterpret_cast<const std::byte*>(rows.data()),
                      .row_stride = head_dim * sizeof(float)};
    plain.append(given, count);
    halves.append(given, count);
  }
  [[nodiscard]] std::vector<float> row(const Plane& plane, std::size_t number) const {
    std::vector<float> loaded(context.head_dim);
    load_row(plane, number, loaded);
    return loaded;
  }
};

template <class Check>
void for_each_store(Check check) {
  test::Random random{31};
  for (const std::size_t head_dim : {8U, 24U, 64U, 80U, 128U}) {
    for (const std::size_t count : {16U, 48U, 112U}) {
      for (const std::size_t group : {8U, 16U}) {
        if (head_dim % group == 0)
          check(Stores{Granularity::per_token, group, head_dim, count, random}, count);
        check(Stores{Granularity::per_channel, group, head_dim, count, random}, count);
      }
      check(Stores{Granularity::per_token, head_dim, head_dim, count, random}, count);
    }
  }
}

}  // namespace

TEST_CASE("codes in halves stand for the numbers of plain 8-bit codes") {
  for_each_store([](const Stores& stores, std::size_t count) {
    for (std::size_t row = 0; row < count; ++row) {
      REQUIRE(stores.row(stores.halves.plane(0), row) == stores.row(stores.plain.plane(0), row));
    }
    CHECK(stores.halves.plane(0).upper_half().format.encoding == Encoding::uint4);
    CHECK(stores.plain.plane(0).upper_half().format == stores.plain.format());
  });
}

TEST_CASE("an upper half stands for the middle of the codes that begin with it") {
  for_each_store([](const Stores& stores, std::size_t count) {
    const Plane whole = stores.halves.plane(0);
    const PageLayout layout{stores.format, stores.context.head_dim, stores.context.page_rows};
    for (std::size_t row = 0; row < count; ++row) {
      const std::vector<float> upper = stores.row(whole.upper_half(), row);
      const std::vector<float> exact = stores.row(whole, row);
      const std::byte* page = whole.pages[row / 16];
      for (std::size_t i = 0; i < upper.size(); ++i) {
        const bool per_token = stores.format.granularity == Granularity::per_token;
        const std::size_t grid = per_token ? row % 16 * layout.params_per_row + i / stores.format.group
                                           : row % 16 / stores.format.group * layout.params_per_row + i;
        const float scale =
            static_cast<float>(reinterpret_cast<const float16*>(page + layout.scales_offset)[grid]);
        const float zero =
            static_cast<float>(reinterpret_cast<const float16*>(page + layout.zeros_offset)[grid]);
        // The code that `exact` has, by arithmetic of its own.
        const auto code = static_cast<unsigned>(std::lround((exact[i] - zero) / scale));
        const double middle = scale * (16.0 * (code / 16) + 7.5) + zero;
        REQUIRE(std::abs(upper[i] - middle) <= 2e-3 * (std::abs(zero) + 8.0 * scale));
        REQUIRE(std::abs(upper[i] - exact[i]) <= 7.5 * scale + 2e-3 * (std::abs(zero) + 8.0 * scale));
      }
    }
  });
}

TEST_CASE("a page of codes in halves begins as a page of 4-bit rows") {
  const RowFormat format{Encoding::uint4x2, Granularity::per_token, 32};
  const PageLayout layout{format, 128, 64};
  const PageLayout upper{{Encoding::uint4, Granularity::per_token, 32}, 128, 64};
  CHECK(layout.is_in_halves());
  CHECK_FALSE(upper.is_in_halves());
  CHECK(layout.row_bytes == upper.row_bytes);
  CHECK(layout.upper_scales_offset() == upper.scales_offset);
  CHECK(layout.upper_zeros_offset() == upper.zeros_offset);
  CHECK(layout.lower_offset == upper.page_bytes);
  CHECK(layout.scales_offset == upper.page_bytes + 64 * 64);
  CHECK(layout.page_bytes == 2 * upper.page_bytes);
}

TEST_CASE("halves need a side of 8 bits") {
  const StorageContext context{.head_dim = 64};
  const auto error = [&](const ResidualConfig& config) {
    return test::thrown<ConfigError>([&] { PerTokenStorage<float>::validate(config, context); });
  };
  CHECK(test::contains(error({.bits = 4, .halves = true}),
                       "halves are of codes of 8 bits; keys have 4 bits and values 4"));
  CHECK(test::contains(error({.bits = 8, .key_bits = 4, .value_bits = 2, .halves = true}),
                       "keys have 4 bits and values 2"));
  PerTokenStorage<float>::validate({.bits = 4, .key_bits = 8, .halves = true}, context);
  const ResidualConfig mixed{.bits = 4, .key_bits = 8, .halves = true};
  CHECK(mixed.key_encoding() == Encoding::uint4x2);
  CHECK(mixed.value_encoding() == Encoding::uint4);
}
