// SPDX-License-Identifier: Apache-2.0
//
// Trees without a cache: visibility, prefixes, paths, and what is refused.
#include <doctest/doctest.h>

#include <set>
#include <vector>

#include <kvpolicy/core/token_tree.hpp>

#include "support/compare.hpp"
#include "support/failing_new.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t text = TokenTree::text;

std::vector<std::size_t> random_parents(test::Random& random, std::size_t nodes) {
  std::vector<std::size_t> parents;
  for (std::size_t i = 0; i < nodes; ++i) {
    const std::size_t parent = test::below(random, i + 1);
    parents.push_back(parent == i ? text : parent);
  }
  return parents;
}

}  // namespace

TEST_CASE("a node sees itself and its ancestors, and comes after them") {
  test::Random random{1};
  for (const std::size_t nodes : {1UL, 2UL, 5UL, 30UL, 100UL}) {
    const auto parents = random_parents(random, nodes);
    const TokenTree tree{parents};
    REQUIRE(tree.size() == nodes);
    std::vector<std::set<std::size_t>> seen(nodes);  // by sets, not by following parents
    for (std::size_t i = 0; i < nodes; ++i) {
      if (parents[i] != text) seen[i] = seen[parents[i]];
      CHECK(tree.depth(i) == seen[i].size());
      CHECK(tree.parent(i) == parents[i]);
      seen[i].insert(i);
      for (std::size_t row = 0; row < nodes; ++row) {
        REQUIRE(tree.sees(i, row) == seen[i].contains(row));
      }
    }
  }
}

TEST_CASE("first, begins_with, truncate") {
  test::Random random{2};
  const auto parents = random_parents(random, 40);
  const TokenTree tree{parents};
  for (const std::size_t nodes : {0UL, 1UL, 17UL, 40UL}) {
    const TokenTree first = tree.first(nodes);
    CHECK(first.size() == nodes);
    CHECK(first.empty() == (nodes == 0));
    CHECK(tree.begins_with(first));
    CHECK(first.begins_with(tree) == (nodes == 40));
    CHECK((first == tree) == (nodes == 40));
    TokenTree shorter = tree;
    shorter.truncate(nodes);
    CHECK(shorter == first);
    if (nodes > 0) CHECK(shorter.depth(nodes - 1) == tree.depth(nodes - 1));
  }
  TokenTree other = tree.first(20);
  other.truncate(100);  // has no more
  CHECK(other.size() == 20);
  other.truncate(19);
  other.add(parents[19] == 3 ? 4 : 3);
  CHECK_FALSE(tree.begins_with(other));
  CHECK(tree.begins_with(TokenTree{}));
}

TEST_CASE("a path leads from the text downwards") {
  //   text - 0 - 1 - 3
  //        \     \ 4
  //          2 - 5
  const TokenTree tree{std::vector<std::size_t>{text, 0, text, 1, 0, 2}};
  using Path = std::vector<std::size_t>;
  for (const Path& path : {Path{}, Path{0}, Path{2}, Path{0, 1}, Path{0, 4}, Path{0, 1, 3}, Path{2, 5}}) {
    CHECK(is_path(tree, path));
  }
  for (const Path& path : {Path{1}, Path{0, 3}, Path{0, 2}, Path{1, 0}, Path{0, 0}, Path{2, 4},
                           Path{0, 1, 3, 3}, Path{6}, Path{0, 9}, Path{text}, Path{0, text}}) {
    CHECK_FALSE(is_path(tree, path));
  }
}

TEST_CASE("what is no tree is refused and changes nothing") {
  TokenTree tree{std::vector<std::size_t>{text, 0}};
  for (const std::size_t parent : {2UL, 3UL, text - 1}) {
    const std::string said = test::thrown<ConfigError>([&] { tree.add(parent); });
    CHECK(test::contains(said, "node 2 cannot continue node"));
    CHECK(tree.size() == 2);
  }
  while (tree.size() < TokenTree::max_nodes) tree.add(tree.size() - 1);
  CHECK(tree.depth(TokenTree::max_nodes - 1) == TokenTree::max_nodes - 1);
  CHECK(test::contains(test::thrown<ConfigError>([&] { tree.add(text); }), "at most 4096"));
  CHECK(tree.size() == TokenTree::max_nodes);
}

TEST_CASE("a tree stays unchanged if memory runs out") {
  for (const std::size_t nodes : {0UL, 1UL, 2UL, 4UL, 64UL}) {
    TokenTree tree;
    for (std::size_t i = 0; i < nodes; ++i) tree.add(i == 0 ? text : i - 1);
    const TokenTree before = tree;
    std::size_t failures = 0;
    for (std::size_t n = 0; tree.size() == nodes; ++n) {
      REQUIRE(n < 10);
      try {
        const test::FailNew guard{n};
        tree.add(text);
      } catch (const std::bad_alloc&) {
        ++failures;
        CHECK(tree == before);
        CHECK(tree.size() == nodes);
        if (nodes > 0) CHECK(tree.depth(nodes - 1) == nodes - 1);
      }
    }
    CHECK(failures > 0);  // all these sizes are full, so one more node allocates
    CHECK(tree.depth(nodes) == 0);
    CHECK(tree.parent(nodes) == text);
  }
}
