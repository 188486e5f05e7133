// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <initializer_list>
#include <utility>
#include <vector>

#include <kvpolicy/cache/observation_window.hpp>

#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

struct Window {
  test::CountingResource memory;
  ObservationWindow<float> queries;
  Window(std::size_t window, std::size_t rollback) : queries{window, rollback, 2, 8, &memory} {}

  // Each number encodes its position, head and `mark`.
  void push(std::size_t position, std::size_t tokens, float mark = 0) {
    test::Tensor<float16> q{tokens, 2, 8, test::Layout::padded};
    q.fill([&](std::size_t t, std::size_t h, std::size_t) {
      return static_cast<float>(position + t) + 0.5F * static_cast<float>(h) + mark;
    });
    queries.push(ConstTensor{std::as_const(q).view()}, position);
  }
  // The positions (and marks) of head 0.
  [[nodiscard]] std::vector<float> latest(std::size_t count) const {
    std::vector<float> out(count * 16, -1.0F);
    const std::size_t got = queries.copy_latest(count, out.data());
    std::vector<float> positions;
    for (std::size_t i = 0; i < got; ++i) {
      CHECK(out[i * 16 + 8] == out[i * 16] + 0.5F);
      positions.push_back(out[i * 16]);
    }
    return positions;
  }
};

using Positions = std::vector<float>;

}  // namespace

TEST_CASE("the latest queries, after the ring has wrapped many times") {
  Window w{3, 4};
  CHECK(w.memory.live_bytes() == w.queries.bytes());
  CHECK(w.latest(3) == Positions{});
  std::size_t position = 0;
  for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 1, 5, 100, 2, 7, 1}) {
    w.push(position, tokens);
    position += tokens;
    CHECK(w.queries.end() == position);
    Positions expected;
    for (std::size_t p = position - std::min<std::size_t>(position, 3); p < position; ++p)
      expected.push_back(static_cast<float>(p));
    CHECK(w.latest(3) == expected);
    CHECK(w.latest(1) == Positions{static_cast<float>(position - 1)});
  }
}

TEST_CASE("queries after a rollback") {
  Window w{3, 4};
  w.push(0, 10);
  w.queries.truncate(6);  // the deepest rollback that it was made for
  CHECK(w.latest(3) == Positions{3, 4, 5});
  w.push(6, 2, 0.25F);
  CHECK(w.latest(3) == Positions{5, 6.25F, 7.25F});
  w.push(7, 1, 0.125F);  // the query at this position again
  CHECK(w.latest(2) == Positions{6.25F, 7.125F});
  // A deeper rollback than it was made for: overwritten queries are unknown.
  w.queries.truncate(4);
  CHECK(w.queries.end() == 4);
  CHECK(w.latest(3) == Positions{3});
}

TEST_CASE("tokens without a query leave a gap") {
  Window w{4, 4};
  w.push(0, 3);
  w.push(5, 1);  // positions 3 and 4 were only appended
  CHECK(w.queries.size() == 1);
  CHECK(w.latest(4) == Positions{5});
  w.queries.truncate(5);
  CHECK(w.queries.size() == 0);
  CHECK(w.latest(4) == Positions{});
  w.push(5, 4);
  CHECK(w.latest(4) == Positions{5, 6, 7, 8});
}

TEST_CASE("an empty window takes no memory") {
  Window w{0, 9};
  w.push(0, 5);
  CHECK(w.queries.bytes() == 0);
  CHECK(w.memory.allocations() == 0);
  CHECK(w.latest(3) == Positions{});
}
