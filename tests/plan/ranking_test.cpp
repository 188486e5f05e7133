// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include <kvpolicy/plan/ranking.hpp>

using kvpolicy::detail::ranked_places;

TEST_CASE("of equal scores the first comes first, however many there are") {
  // More than what a sort does by insertion, which would keep their order by itself.
  for (const std::size_t count : {0UL, 1UL, 2UL, 17UL, 1000UL}) {
    CAPTURE(count);
    std::vector<double> scores(count);
    for (std::size_t i = 0; i < count; ++i) scores[i] = static_cast<double>(i * 7 % 3);
    std::vector<std::size_t> expected;
    for (const double score : {2.0, 1.0, 0.0}) {
      for (std::size_t i = 0; i < count; ++i) {
        if (scores[i] == score) expected.push_back(i);
      }
    }
    REQUIRE(ranked_places(scores) == expected);
  }
}
