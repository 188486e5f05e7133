// SPDX-License-Identifier: Apache-2.0
//
// Compares best trees with a search through all trees, and expectations with a recursion from the
// leaves up and with the process itself, simulated with random numbers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/speculation/tree_shape.hpp>

using namespace kvpolicy;

namespace {

using Shares = std::vector<double>;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// The children of each node in order; those of the text come last.
std::vector<std::vector<std::size_t>> children_of(const TokenTree& tree) {
  std::vector<std::vector<std::size_t>> children(tree.size() + 1);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const bool top = tree.parent(node) == TokenTree::text;
    children[top ? tree.size() : tree.parent(node)].push_back(node);
  }
  return children;
}

// The number of accepted nodes below `node`, by the definition, from the leaves up.
double oracle_below(const std::vector<std::vector<std::size_t>>& children, std::size_t node,
                    const Shares& shares) {
  double sum = 0;
  for (std::size_t k = 0; k < children[node].size() && k < shares.size(); ++k) {
    sum += shares[k] * (1 + oracle_below(children, children[node][k], shares));
  }
  return sum;
}

double oracle_accepted(const TokenTree& tree, const Shares& shares) {
  return oracle_below(children_of(tree), tree.size(), shares);
}

struct Shape {
  std::size_t levels = 0;
  std::size_t branches = 0;
};

Shape shape_of(const TokenTree& tree) {
  Shape shape;
  const auto children = children_of(tree);
  for (const auto& some : children) shape.branches = std::max(shape.branches, some.size());
  for (std::size_t node = 0; node < tree.size(); ++node) {
    std::size_t levels = 0;
    for (std::size_t n = node; n != TokenTree::text; n = tree.parent(n)) ++levels;
    shape.levels = std::max(shape.levels, levels);
  }
  return shape;
}

// Visits every tree of `nodes` nodes within the limits (most of them several times, numbered
// differently).
template <class Visit>
void for_each_tree(std::size_t nodes, const TreeLimits& limits, TokenTree tree, Visit&& visit) {
  if (tree.size() == nodes) {
    const Shape shape = shape_of(tree);
    if (shape.levels <= limits.levels && shape.branches <= limits.branches) visit(tree);
    return;
  }
  for (std::size_t i = 0; i <= tree.size(); ++i) {
    TokenTree next = tree;
    next.add(i == tree.size() ? TokenTree::text : i);
    for_each_tree(nodes, limits, std::move(next), visit);
  }
}

// The largest expectation of any tree; -1 if there is none.
double highest(std::size_t nodes, const TreeLimits& limits, const Shares& shares) {
  double value = -1;
  for_each_tree(nodes, limits, {},
                [&](const TokenTree& tree) { value = std::max(value, oracle_accepted(tree, shares)); });
  return value;
}

// Whether parents come before children, depths never fall, and the nodes of a level are in their
// parents' order.
bool level_by_level(const TokenTree& tree) {
  for (std::size_t node = 1; node < tree.size(); ++node) {
    if (tree.depth(node) < tree.depth(node - 1)) return false;
    if (tree.depth(node) > tree.depth(node - 1) || tree.depth(node) == 0) continue;
    if (tree.parent(node) < tree.parent(node - 1)) return false;
  }
  return true;
}

Shares random_shares(std::mt19937& random, std::size_t size, bool falling) {
  std::uniform_real_distribution<double> uniform{0.0, 1.0};
  Shares shares(size);
  double left = 1.0;
  for (double& share : shares) {
    share = left * uniform(random);
    left -= share;
  }
  if (falling) {
    std::ranges::sort(shares, std::greater<>{});
  } else {
    std::ranges::shuffle(shares, random);
  }
  return shares;
}

}  // namespace

TEST_CASE("no tree of few nodes is better than the best") {
  std::mt19937 random{1};
  for (std::size_t nodes = 1; nodes <= 6; ++nodes) {
    for (int round = 0; round < 12; ++round) {
      const Shares shares = random_shares(random, 1 + random() % 4, round % 2 == 0);
      TreeLimits limits;
      if (round % 3 != 0) limits.levels = 1 + random() % 4;
      if (round % 4 != 0) limits.branches = 1 + random() % 3;
      TreeLimits all = limits;
      all.branches = std::min(limits.branches, shares.size());
      const double most = highest(nodes, all, shares);
      CAPTURE(nodes);
      CAPTURE(limits.levels);
      CAPTURE(limits.branches);
      if (most < 0) {
        CHECK_THROWS_AS(static_cast<void>(best_tree(shares, nodes, limits)), ConfigError);
        continue;
      }
      const TokenTree tree = best_tree(shares, nodes, limits);
      CHECK(tree.size() == nodes);
      CHECK(level_by_level(tree));
      CHECK(shape_of(tree).levels <= limits.levels);
      CHECK(shape_of(tree).branches <= limits.branches);
      CHECK(oracle_accepted(tree, shares) == doctest::Approx(most).epsilon(1e-12));
      CHECK(expected_accepted(tree, shares) == doctest::Approx(most).epsilon(1e-12));
    }
  }
}

TEST_CASE("a later child may be likelier than the first") {
  // The first child is tried first and never accepted; the second one is worth the nodes of both.
  const Shares shares{0.0, 0.9};
  CHECK(best_tree(shares, 2) == TokenTree{std::vector{TokenTree::text, TokenTree::text}});
  CHECK(oracle_accepted(best_tree(shares, 4), shares) == doctest::Approx(0.9 + 0.81));
}

TEST_CASE("large trees consist of the nodes that are reached most often") {
  // With falling shares the best tree is known without any recurrence: it consists of those nodes of
  // the infinite tree that have the largest products.
  std::mt19937 random{2};
  for (const std::size_t nodes : {64u, 127u, 300u}) {
    const Shares shares = random_shares(random, 5, true);
    std::vector<double> reached = shares;
    double sum = 0;
    for (std::size_t node = 0; node < nodes; ++node) {
      const auto top = std::ranges::max_element(reached);
      const double value = *top;
      reached.erase(top);
      sum += value;
      for (const double share : shares) reached.push_back(value * share);
    }
    const TokenTree tree = best_tree(shares, nodes);
    CHECK(tree.size() == nodes);
    CHECK(level_by_level(tree));
    CHECK(oracle_accepted(tree, shares) == doctest::Approx(sum).epsilon(1e-10));
    // With a limit that has no effect, and with one that has.
    const std::size_t levels = levels_of(tree);
    CHECK(best_tree(shares, nodes, {.levels = levels}) == tree);
    const TokenTree flatter = best_tree(shares, nodes, {.levels = levels - 1});
    CHECK(levels_of(flatter) == levels - 1);
    CHECK(oracle_accepted(flatter, shares) < sum);
    CHECK(oracle_accepted(flatter, shares) > 0.9 * sum);
  }
}

TEST_CASE("Sequoia: only first children are accepted, so the best tree is a chain") {
  for (const std::size_t nodes : {1u, 2u, 17u, 100u}) {
    CHECK(best_tree(Shares{0.8, 0.0, 0.0}, nodes) == chain(nodes));
    CHECK(best_tree(Shares{0.8}, nodes) == chain(nodes));
    CHECK(best_tree(Shares{0.7, 0.2}, nodes, {.branches = 1}) == chain(nodes));
    CHECK(best_tree(Shares{1.0}, nodes) == chain(nodes));
  }
  CHECK(levels_of(best_tree(Shares(8, 0.01), 8, {.levels = 1})) == 1);
}

TEST_CASE("Sequoia: the yield of trees grows beyond that of sequences") {
  const Shares shares{0.6, 0.2, 0.1, 0.05};  // 0.95 in total
  const auto tokens = [&](const TokenTree& tree) { return expected_tokens(tree, shares); };
  // The yield of one sequence is bounded by 1 / (1 - a), and that of several is bounded in the same way
  // after their first token.
  CHECK(tokens(chain(512)) == doctest::Approx(2.5));
  CHECK(tokens(independent_sequences(8, 64)) == doctest::Approx(1 + 0.95 * 2.5));
  double last = 0;
  for (const std::size_t nodes : {4u, 16u, 64u, 256u, 512u}) {
    const double now = tokens(best_tree(shares, nodes));
    CHECK(now >= last + 0.4);
    last = now;
  }
  CHECK(last > 5.5);
}

TEST_CASE("the simulated process accepts as many tokens as expected") {
  std::mt19937 random{3};
  std::uniform_real_distribution<double> uniform{0.0, 1.0};
  for (const std::size_t nodes : {5u, 24u, 60u}) {
    const Shares shares = random_shares(random, 4, nodes != 24u);
    const TokenTree tree = nodes == 60u ? independent_sequences(6, 10) : best_tree(shares, nodes);
    const auto children = children_of(tree);
    const int runs = 100'000;
    double sum = 0;
    double squares = 0;
    for (int run = 0; run < runs; ++run) {
      double accepted = 0;
      std::size_t node = tree.size();
      for (bool going = true; going;) {
        going = false;
        double draw = uniform(random);
        for (std::size_t k = 0; k < children[node].size() && k < shares.size(); ++k) {
          draw -= shares[k];
          if (draw >= 0) continue;
          node = children[node][k];
          ++accepted;
          going = true;
          break;
        }
      }
      sum += accepted;
      squares += accepted * accepted;
    }
    const double mean = sum / runs;
    const double error = std::sqrt((squares / runs - mean * mean) / runs);
    CHECK(std::abs(mean - expected_accepted(tree, shares)) <= 4 * error);
    CHECK(error < 0.02);
  }
}

TEST_CASE("sequences, and a tree after one token") {
  CHECK(chain(0).empty());
  CHECK(chain(3) == TokenTree{std::vector<std::size_t>{TokenTree::text, 0, 1}});
  CHECK(independent_sequences(3, 2) ==
        TokenTree{std::vector<std::size_t>{TokenTree::text, TokenTree::text, TokenTree::text, 0, 1, 2}});
  CHECK(independent_sequences(0, 5).empty());
  CHECK(independent_sequences(4, 0).empty());
  CHECK(levels_of(TokenTree{}) == 0);
  CHECK(levels_of(independent_sequences(3, 7)) == 7);
  CHECK(level_by_level(independent_sequences(5, 4)));
  CHECK(after_one_token(TokenTree{}) == chain(1));
  CHECK(after_one_token(chain(3)) == chain(4));
  CHECK(after_one_token(independent_sequences(2, 2)) ==
        TokenTree{std::vector<std::size_t>{TokenTree::text, 0, 0, 1, 2}});
  CHECK(expected_tokens(TokenTree{}, Shares{0.5}) == 1.0);
  CHECK(expected_accepted(chain(4), Shares{}) == 0.0);
  CHECK(expected_accepted(chain(4), Shares{1.0}) == 4.0);
}

TEST_CASE("a tree for given costs is the fastest of all") {
  std::mt19937 random{4};
  std::uniform_real_distribution<double> uniform{0.0, 1.0};
  for (int round = 0; round < 20; ++round) {
    const Shares shares = random_shares(random, 3, round % 2 == 0);
    const double per_level = 0.3 * uniform(random);
    const double per_node = 0.1 * uniform(random);
    // A device that reads in groups of four: its cost is neither linear nor smooth.
    const auto seconds = [&](std::size_t nodes, std::size_t levels) {
      return 1.0 + per_level * static_cast<double>(levels) +
             per_node * static_cast<double>((nodes + 3) / 4 * 4);
    };
    double best = 1.0 / seconds(0, 0);
    const TreeLimits limits{.levels = 1 + random() % 5, .branches = 3};
    for (std::size_t nodes = 1; nodes <= 5; ++nodes) {
      for_each_tree(nodes, limits, {}, [&](const TokenTree& tree) {
        best = std::max(best, (1 + oracle_accepted(tree, shares)) / seconds(nodes, shape_of(tree).levels));
      });
    }
    const TreeChoice choice = best_tree_for(shares, 5, seconds, limits);
    CHECK(choice.tokens / choice.seconds == doctest::Approx(best).epsilon(1e-12));
    CHECK(choice.tokens == doctest::Approx(1 + oracle_accepted(choice.tree, shares)));
    CHECK(choice.seconds == seconds(choice.tree.size(), shape_of(choice.tree).levels));
  }
}

TEST_CASE("if drafts do not pay off there is no tree") {
  const auto dear = [](std::size_t nodes, std::size_t) { return 1.0 + 5.0 * static_cast<double>(nodes); };
  const TreeChoice none = best_tree_for(Shares{0.5, 0.1}, 8, dear);
  CHECK(none.tree.empty());
  CHECK(none.tokens == 1.0);
  CHECK(none.seconds == 1.0);
  CHECK(best_tree_for(Shares{0.0, 0.0}, 8, [](auto, auto) { return 1.0; }).tree.empty());
}

TEST_CASE("errors name what is wrong") {
  const Shares good{0.5, 0.2};
  CHECK_THROWS_AS(static_cast<void>(best_tree(good, 0)), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(best_tree(good, TokenTree::max_nodes + 1)), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(best_tree(Shares{}, 4)), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(best_tree(good, 4, {.levels = 0})), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(best_tree(good, 4, {.branches = 0})), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(best_tree(good, 3, {.levels = 1})), ConfigError);
  CHECK_NOTHROW(static_cast<void>(best_tree(good, 2, {.levels = 1})));
  CHECK_THROWS_AS(static_cast<void>(best_tree(good, 7, {.levels = 2})), ConfigError);
  CHECK_NOTHROW(static_cast<void>(best_tree(good, 6, {.levels = 2})));
  for (const Shares& bad : {Shares{-0.1}, Shares{1.1}, Shares{0.5, not_a_number}, Shares{0.6, 0.6}}) {
    CHECK_THROWS_AS(static_cast<void>(best_tree(bad, 4)), ConfigError);
    CHECK_THROWS_AS(static_cast<void>(expected_accepted(chain(2), bad)), ConfigError);
    CHECK_THROWS_AS(static_cast<void>(best_tree_for(bad, 4, [](auto, auto) { return 1.0; })), ConfigError);
  }
  for (const double cost : {0.0, -1.0, not_a_number, std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(static_cast<void>(best_tree_for(good, 4, [&](auto, auto) { return cost; })), ConfigError);
  }
  CHECK_THROWS_AS(static_cast<void>(chain(TokenTree::max_nodes + 1)), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(independent_sequences(65, 64)), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(independent_sequences(3, std::size_t{1} << 63)), ConfigError);
  CHECK(chain(TokenTree::max_nodes).size() == TokenTree::max_nodes);
  CHECK_THROWS_AS(static_cast<void>(after_one_token(chain(TokenTree::max_nodes))), ConfigError);
}
