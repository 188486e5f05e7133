// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <set>
#include <vector>

#include <kvpolicy/offload/residency.hpp>

#include "support/tensors.hpp"

using kvpolicy::offload::Residency;
using Use = Residency::Use;

namespace {

// Uses the pieces [first, last); returns how many of them were not in memory.
std::size_t read(Residency& residency, Use use, std::size_t first, std::size_t last,
                 std::set<std::size_t>& in_memory) {
  std::size_t absent = 0;
  residency.begin(use);
  for (std::size_t piece = first; piece < last; ++piece) {
    CHECK(residency.is_resident(piece) == in_memory.contains(piece));
    absent += residency.is_resident(piece) ? 0 : 1;
    residency.use(piece);
    in_memory.insert(piece);
  }
  residency.shrink([&](std::size_t piece) { CHECK(in_memory.erase(piece) == 1); });
  CHECK(residency.resident() == in_memory.size());
  return absent;
}

}  // namespace

TEST_CASE("residency: of layers read in a cycle, nearly all stay in memory if nearly all fit") {
  Residency residency{80};
  residency.grow(100);
  std::set<std::size_t> in_memory;
  for (int round = 0; round < 20; ++round) {
    std::size_t absent = 0;
    for (std::size_t layer = 0; layer < 10; ++layer) {
      absent += read(residency, Use::fetch, 10 * layer, 10 * layer + 10, in_memory);
      CHECK(in_memory.size() <= 80);
    }
    // The minimum for any strategy is 20 of 100; releasing the oldest first would read all of them
    // again.
    if (round > 0) CHECK(absent <= 40);
  }
}

TEST_CASE("residency: what was fetched last stays, even if it exceeds the budget") {
  Residency residency{8};
  residency.grow(64);
  std::set<std::size_t> in_memory;
  read(residency, Use::other, 0, 8, in_memory);
  read(residency, Use::fetch, 20, 40, in_memory);
  CHECK(in_memory.size() == 20);
  CHECK(in_memory.contains(20));
  CHECK(residency.room() == 0);
  read(residency, Use::fetch, 40, 43, in_memory);
  CHECK(in_memory.size() == 8);
  CHECK(residency.room() == 5);
  read(residency, Use::ahead, 50, 55, in_memory);
  CHECK(in_memory == std::set<std::size_t>{40, 41, 42, 50, 51, 52, 53, 54});
  read(residency, Use::fetch, 50, 55, in_memory);  // now it is used, and the next may be read ahead
  read(residency, Use::ahead, 60, 63, in_memory);
  CHECK(in_memory == std::set<std::size_t>{50, 51, 52, 53, 54, 60, 61, 62});
}

TEST_CASE("residency: unused pieces are released before those that are used in turn") {
  Residency residency{20};
  residency.grow(64);
  std::set<std::size_t> in_memory;
  read(residency, Use::fetch, 0, 10, in_memory);
  for (std::uint64_t i = 0; i < Residency::forgotten_after + 2; ++i) {
    read(residency, Use::fetch, 10 + 10 * (i % 2), 20 + 10 * (i % 2), in_memory);
  }
  CHECK(in_memory == [] {
    std::set<std::size_t> expected;
    for (std::size_t piece = 10; piece < 30; ++piece) expected.insert(piece);
    return expected;
  }());
}

TEST_CASE("residency: random uses, against a plain list of what is in memory") {
  test::Random random{8};
  Residency residency{30};
  residency.grow(200);
  std::set<std::size_t> in_memory;
  for (int i = 0; i < 5000; ++i) {
    const std::size_t first = test::below(random, 200);
    const std::size_t last = std::min<std::size_t>(200, first + test::below(random, 50));
    const Use use = test::one_of(random, std::vector<Use>{Use::fetch, Use::ahead, Use::other});
    if (use == Use::fetch) {
      read(residency, use, first, last, in_memory);
      CHECK(in_memory.size() <= std::max<std::size_t>(30, last - first));
    } else {
      read(residency, use, first, std::min(last, first + residency.room()), in_memory);
      // The last fetch is added if it takes all the room.
      CHECK(in_memory.size() <= 80);
    }
  }
}
