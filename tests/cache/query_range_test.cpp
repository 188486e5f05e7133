// SPDX-License-Identifier: Apache-2.0
//
// Compares the range that a ring of queries reports with the slots that were written.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <vector>

#include <kvpolicy/cache/query_range.hpp>

#include "support/tensors.hpp"

using kvpolicy::QueryRange;

namespace {

// Every slot remembers the position that was last written to it.
struct Slots {
  std::size_t slots;
  std::size_t first = 0;  // of the queries without a gap
  std::size_t end = 0;
  std::map<std::size_t, std::size_t> written = {};

  void push(std::size_t position, std::size_t count) {
    if (position > end) first = position;
    for (std::size_t p = position; p < position + count; ++p) written[p % slots] = p;
    end = position + count;
  }
  void truncate(std::size_t position) {
    end = std::min(end, position);
    first = std::min(first, end);
  }
  [[nodiscard]] std::size_t begin() const {
    std::size_t at = end;
    while (at > first) {
      const auto slot = written.find((at - 1) % slots);
      if (slot == written.end() || slot->second != at - 1) break;
      --at;
    }
    return at;
  }
};

}  // namespace

TEST_CASE("a ring of queries holds what was not overwritten, also after rollbacks") {
  test::Random random{5};
  for (const std::size_t slots : {1U, 2U, 7U, 64U, 3U, 65U}) {
    const bool gaps = slots % 2 == 1;  // tokens without a query
    CAPTURE(slots);
    QueryRange range{slots};
    Slots model{slots};
    for (int call = 0; call < 2000; ++call) {
      if (test::below(random, 3) > 0) {
        const std::size_t gap = gaps && test::below(random, 8) == 0 ? test::below(random, 3) : 0;
        const std::size_t position = model.end + gap;
        const std::size_t count = 1 + test::below(random, slots + 3);
        range.push(position, count);
        model.push(position, count);
      } else {
        const std::size_t to = model.end - test::below(random, std::min(model.end, slots + 2) + 1);
        range.truncate(to);
        model.truncate(to);
      }
      CHECK(range.end() == model.end);
      CHECK(range.begin() <= range.end());
      CHECK(range.begin() >= model.begin());  // the ring may forget queries that a gap left intact
      if (!gaps) CHECK(range.begin() == model.begin());
      CHECK_FALSE(range.holds(model.end));
      if (range.size() > 0) CHECK(range.holds(model.end - 1));
    }
  }
}

TEST_CASE("a ring takes as many queries as it has room for") {
  QueryRange range{4};
  range.push(0, 3);
  range.reset(20, 9);
  CHECK(range.begin() == 16);
  CHECK(range.end() == 20);
  range.reset(20, 2);
  CHECK(range.begin() == 18);
  range.push(20, 3);
  CHECK(range.begin() == 19);
}

TEST_CASE("accepting a path keeps the queries of its nodes") {
  const std::vector<std::size_t> path{1, 2, 5};
  QueryRange all{16};
  all.push(0, 10);  // nodes 0 to 5 at positions 4 to 9
  all.accept(4, path);
  CHECK(all.begin() == 0);
  CHECK(all.end() == 7);

  QueryRange late{16};
  late.push(6, 4);  // node 1 has no query
  late.accept(4, path);
  CHECK(late.begin() == 5);
  CHECK(late.end() == 7);

  QueryRange early{16};
  early.push(0, 7);  // node 5 has no query
  early.accept(4, path);
  CHECK(early.begin() == 0);
  CHECK(early.end() == 6);

  QueryRange none{0};
  none.push(0, 5);
  none.accept(0, path);
  CHECK(none.size() == 0);
}
