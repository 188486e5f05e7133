// SPDX-License-Identifier: Apache-2.0
//
// The lines that are prefetched, divided among the passes over a row tile.
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu/prefetch-inl.hpp>

using namespace kvpolicy;
namespace simd = cpu::HWY_NAMESPACE;

TEST_CASE("every line of a row is fetched in exactly one pass") {
  for (const std::size_t bytes : {0U, 16U, 32U, 64U, 72U, 128U, 192U, 256U, 320U, 512U, 1024U}) {
    CAPTURE(bytes);
    for (std::size_t passes = 1; passes <= 7; ++passes) {
      CAPTURE(passes);
      const simd::Prefetch all{.rows = nullptr, .count = 5, .bytes = bytes};
      std::vector<int> fetched(bytes / 64 + 1);
      for (std::size_t pass = 0; pass < passes; ++pass) {
        const simd::Prefetch share = all.share(pass, passes);
        CHECK(share.count == 5);
        for (std::size_t at = share.first_byte; at < share.bytes; at += 64) {
          REQUIRE(at % 64 == 0);
          ++fetched[at / 64];
        }
      }
      for (std::size_t at = 0; at < bytes; at += 64) CHECK(fetched[at / 64] == 1);
    }
  }
}

TEST_CASE("every row is fetched once, in whatever order") {
  std::vector<std::byte> bytes(70);
  for (std::size_t count = 1; count <= 64; ++count) {
    CAPTURE(count);
    std::vector<const std::byte*> rows(count);
    for (std::size_t i = 0; i < count; ++i) rows[i] = bytes.data() + i;
    const simd::Prefetch all{.rows = rows.data(), .count = count, .bytes = 64};
    std::vector<int> visits(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto row = static_cast<std::size_t>(all.start_of(i) - bytes.data());
      REQUIRE(row < count);
      ++visits[row];
    }
    CHECK(visits == std::vector<int>(count, 1));
  }
}
