// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <span>
#include <vector>

#include <kvpolicy/cache/prefix_tree.hpp>

#include "support/news.hpp"
#include "support/tensors.hpp"

namespace {

using Tokens = std::vector<std::int32_t>;
using Tree = kvpolicy::detail::PrefixTree<int>;

// What the tree is: a map from token sequences to values.
class Model {
 public:
  std::map<Tokens, int> values;

  void check(const Tree& tree, const Tokens& text) const {
    const auto found = tree.match(text);
    std::size_t longest = 0;
    bool any = false;
    std::size_t common = 0;
    for (const auto& [tokens, value] : values) {
      const auto same = static_cast<std::size_t>(std::ranges::mismatch(tokens, text).in1 - tokens.begin());
      common = std::max(common, same);
      if (same == tokens.size() && (!any || same > longest)) {
        longest = same;
        any = true;
      }
    }
    REQUIRE((found.longest != nullptr) == any);
    if (any) {
      REQUIRE(found.longest->depth() == longest);
      REQUIRE(*found.longest->value ==
              values.at(Tokens(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(longest))));
    }
    REQUIRE(found.tokens == common);
    REQUIRE((found.beyond != nullptr) == !values.empty());
    if (found.beyond == nullptr) return;
    const Tokens beyond = found.beyond->tokens();
    REQUIRE(values.at(beyond) == *found.beyond->value);
    REQUIRE(beyond.size() >= common);
    REQUIRE(std::equal(beyond.begin(), beyond.begin() + static_cast<std::ptrdiff_t>(common), text.begin()));
  }
  void check_all(const Tree& tree) const {
    std::vector<Tokens> seen;
    tree.for_each([&](const Tree::Node& node) {
      seen.push_back(node.tokens());
      REQUIRE(values.at(seen.back()) == *node.value);
      std::size_t parent = 0;
      for (std::size_t size = 0; size < node.depth(); ++size) {
        if (values.contains(
                Tokens(seen.back().begin(), seen.back().begin() + static_cast<std::ptrdiff_t>(size))))
          parent = size;
      }
      const auto* above = node.above();
      REQUIRE((above == nullptr ? 0 : above->depth()) == parent);
    });
    REQUIRE(seen.size() == values.size());
    // In the order of a map: prefixes first, then by their first other token.
    REQUIRE(std::ranges::is_sorted(seen));
  }
};

Tokens some_tokens(test::Random& random) {
  Tokens tokens(test::below(random, 9));
  for (auto& token : tokens) token = static_cast<std::int32_t>(test::below(random, 3)) - 1;
  return tokens;
}

}  // namespace

TEST_CASE("a tree of prefixes is a map from token sequences") {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    test::Random random{seed};
    Tree tree;
    Model model;
    for (int i = 0; i < 400; ++i) {
      const Tokens tokens = some_tokens(random);
      const std::size_t what = test::below(random, 3);
      if (what == 0) {
        tree.at(tokens).value = i;
        model.values[tokens] = i;
      } else if (what == 1) {
        Tree::Node& node = tree.at(tokens);
        node.value.reset();
        tree.prune(node);
        model.values.erase(tokens);
      }
      model.check(tree, some_tokens(random));
      model.check_all(tree);
    }
  }
}

TEST_CASE("a tree for which there is no memory stays as it was") {
  test::Random random{7};
  for (int round = 0; round < 200; ++round) {
    Tree tree;
    Model model;
    for (int i = 0; i < 8; ++i) {
      const Tokens tokens = some_tokens(random);
      tree.at(tokens).value = i;
      model.values[tokens] = i;
    }
    const Tokens added = some_tokens(random);
    for (std::size_t successes = 0;; ++successes) {
      bool failed = false;
      {
        const test::FailNew failing{successes};
        try {
          tree.at(added).value = 100;
        } catch (const std::bad_alloc&) {
          failed = true;
        }
      }
      if (!failed) break;
      model.check_all(tree);
    }
    model.values[added] = 100;
    model.check_all(tree);
    // Without memory a branch with one way to go stays in the tree, and nothing else is different.
    Tree::Node& node = tree.at(added);
    node.value.reset();
    {
      const test::FailNew failing{0};
      tree.prune(node);
    }
    model.values.erase(added);
    model.check_all(tree);
    model.check(tree, some_tokens(random));
  }
}
