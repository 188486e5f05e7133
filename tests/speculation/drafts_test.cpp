// SPDX-License-Identifier: Apache-2.0
//
// What drafts must do for a verifier: propose at most as many tokens as requested, each with the
// distribution that it was drawn from, for the text that they get, whatever text they got before.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/draft.hpp>

#include "chi_square.hpp"
#include "decoding.hpp"

using namespace kvpolicy;
using test::Pair;
using test::Selected;
using test::Small;
using test::TableCache;
using test::TableModel;
using test::Tree;

namespace {

constexpr std::size_t text = TokenTree::text;
constexpr SamplingOptions plain{.temperature = 1.0F};

template <class D>
DraftTokens propose(D& draft, std::span<const int> seen, std::size_t most, Random& random,
                    const SamplingOptions& sampling = plain) {
  DraftTokens guesses{{99, Distribution::certain(99)}};  // a draft must overwrite it
  draft.propose(seen, most, sampling, random, guesses);
  return guesses;
}

/// The text, the ancestors of a draft token, and the token.
std::vector<int> path_to(std::vector<int> seen, const DraftTokens& guesses, std::size_t guess) {
  std::vector<int> reversed;
  for (std::size_t i = guess; i != text; i = guesses[i].parent) reversed.push_back(guesses[i].token);
  seen.insert(seen.end(), reversed.rbegin(), reversed.rend());
  return seen;
}

bool follows(const Distribution& said, const TableModel& model, const std::vector<int>& seen, Read read,
             const SamplingOptions& sampling) {
  const std::vector<double> share =
      test::shaped(model.logits(seen[seen.size() - 2], seen.back(), read), sampling);
  for (std::size_t token = 0; token < share.size(); ++token) {
    if (!(std::abs(said(static_cast<int>(token)) - share[token]) <= 1e-12)) return false;
  }
  return true;
}

bool equal(const DraftTokens& a, const DraftTokens& b) {
  return std::ranges::equal(a, b, [](const DraftToken& x, const DraftToken& y) {
    return x.token == y.token && x.from == y.from && x.parent == y.parent && x.level == y.level;
  });
}

/// Gives `draft` a text that grows by some of its draft tokens, shrinks, and changes. Each time it must
/// propose what a new draft proposes that gets this text first.
template <class MakeDraft>
void keeps_up(MakeDraft make_draft) {
  std::mt19937_64 dice{17};
  Pair pair;
  auto draft = make_draft(pair);
  std::vector<int> seen = pair.prompt;
  Random random{4};
  for (int round = 0; round < 300; ++round) {
    CAPTURE(round);
    const std::size_t most = dice() % 6;
    const Random dealt = random;
    const DraftTokens guesses = propose(draft, seen, most, random);
    Pair fresh;
    auto newcomer = make_draft(fresh);
    Random same = dealt;
    CHECK(equal(guesses, propose(newcomer, seen, most, same)));
    CHECK(guesses.size() <= most);
    // A part of a path of the draft tokens is accepted, then the verifier adds a token.
    std::size_t latest = text;
    for (std::size_t i = 0; i < guesses.size() && dice() % 4 != 0; ++i) {
      if (guesses[i].parent != latest) continue;
      seen.push_back(guesses[i].token);
      latest = i;
    }
    if (dice() % 4 == 0) seen.resize(std::max<std::size_t>(seen.size() - dice() % 5, 2));
    if (dice() % 5 != 0) seen.push_back(static_cast<int>(dice() % 6));
  }
}

}  // namespace

TEST_CASE("ModelDraft: a chain of draft tokens, each drawn from what it reports") {
  Pair pair;
  Small draft = pair.small_draft();
  Random random{1};
  for (const std::size_t most : std::vector<std::size_t>{1, 2, 5}) {
    for (const SamplingOptions& sampling :
         {plain, SamplingOptions{.temperature = 0.7F, .top_k = 3, .top_p = 0.9F}, SamplingOptions{}}) {
      const DraftTokens guesses = propose(draft, pair.prompt, most, random, sampling);
      REQUIRE(guesses.size() == most);
      CHECK(is_chain(guesses));
      for (std::size_t i = 0; i < most; ++i) {
        std::vector<int> before = path_to(pair.prompt, guesses, i);
        before.pop_back();
        CHECK(follows(guesses[i].from, pair.small, before, Read::all, sampling));
        CHECK(guesses[i].from(guesses[i].token) > 0.0);
        CHECK(guesses[i].level == 0);
      }
    }
  }
  CHECK(propose(draft, pair.prompt, 0, random).empty());
  CHECK(draft.vocabulary() == 6);
}

TEST_CASE("ModelDraft reads a long text in chunks, and only the new part of a text that it knows") {
  Pair pair;
  std::vector<test::CallRecord> calls;
  pair.small.records = &calls;
  Small draft{pair.small, pair.small_cache, {.chunk = 4}};
  Random random{1};
  std::vector<int> seen{0, 1, 2, 3, 4, 5, 0, 1, 2, 3};
  DraftTokens guesses = propose(draft, seen, 2, random);
  std::vector<std::size_t> tokens;
  for (const auto& call : calls) tokens.push_back(call.tokens);
  CHECK(tokens == std::vector<std::size_t>{4, 4, 2, 1});
  calls.clear();
  seen.push_back(guesses[0].token);
  seen.push_back((guesses[1].token + 1) % 6);
  guesses = propose(draft, seen, 1, random);
  REQUIRE(calls.size() == 1);
  CHECK(calls[0].tokens == 1);
  CHECK(calls[0].seen == 11);
  // A draft over a cache that has read a part of the text.
  TableCache read;
  (void)pair.small.read(read, {.tokens = seen});
  CHECK_THROWS_AS((Small{pair.small, read}), ConfigError);
  Small later{pair.small, read, {}, seen};
  calls.clear();
  (void)propose(later, seen, 1, random);
  REQUIRE(calls.size() == 1);
  CHECK(calls[0].tokens == 1);  // only the last token, again, for its logits
}

TEST_CASE("drafts follow a text that grows, shrinks and changes") {
  keeps_up([](Pair& p) { return p.small_draft(); });
  keeps_up([](Pair& p) { return p.tree({text, text, 0, 0, 2}); });
  keeps_up([](Pair& p) { return p.tree({text, 0, 1, 2, 3}); });
  keeps_up([](Pair& p) { return p.tree({text, text, text}); });
}

TEST_CASE("SelectedDraft: each draft token follows the target over selected rows, and reports it") {
  // With any inner draft, and whichever level proposed the token.
  const auto check = [](auto make_draft) {
    Pair pair;
    (void)pair.target.read(pair.cache, {.tokens = std::span{pair.prompt}.first(4)});
    auto draft = make_draft(pair);
    Random random{8};
    std::vector<std::size_t> levels(3);
    for (int round = 0; round < 100; ++round) {
      const std::size_t most = 1 + static_cast<std::size_t>(round) % 6;
      const DraftTokens guesses = propose(draft, pair.prompt, most, random);
      REQUIRE(guesses.size() == most);
      CHECK(is_chain(guesses));
      for (std::size_t i = 0; i < most; ++i) {
        std::vector<int> before = path_to(pair.prompt, guesses, i);
        before.pop_back();
        CHECK(follows(guesses[i].from, pair.target, before, Read::selected, plain));
        REQUIRE(guesses[i].level < 3);
        ++levels[guesses[i].level];
      }
      CHECK(pair.cache.tokens() > 4);
      CHECK(pair.cache.partial_rows() == pair.cache.tokens() - 4);
      pair.cache.truncate(4);  // as a verifier does
    }
    return levels;
  };
  const auto alone = check([](Pair& p) { return Selected<>{p.target, p.cache}; });
  CHECK(alone[1] == 0);
  const auto inner = check([](Pair& p) { return p.hierarchy(3); });
  CHECK(inner[0] > 0);
  CHECK(inner[1] > 0);
  CHECK(inner[2] == 0);
  const auto tree = check(
      [](Pair& p) { return Selected<Tree>{p.target, p.cache, p.tree({text, text, 0, 1, 2}), {5, false}}; });
  CHECK(tree[0] > 0);
  CHECK(tree[1] > 0);
}

TEST_CASE("TreeDraft: draft tokens have the shape, and siblings are drawn without replacement") {
  const std::vector<std::size_t> parents{text, text, text, 0, 0, 2, 3, 5, 5};
  Pair pair;
  Tree draft = pair.tree(parents);
  CHECK(draft.shape() == TokenTree{parents});
  Random random{2};
  for (int round = 0; round < 200; ++round) {
    const std::size_t most = static_cast<std::size_t>(round) % 12;
    const DraftTokens guesses = propose(draft, pair.prompt, most, random);
    REQUIRE(guesses.size() == std::min(most, parents.size()));
    for (std::size_t i = 0; i < guesses.size(); ++i) CHECK(guesses[i].parent == parents[i]);
    for (std::size_t i = 0; i < guesses.size(); ++i) {
      std::vector<int> before = path_to(pair.prompt, guesses, i);
      before.pop_back();
      std::vector<double> share =
          test::shaped(pair.small.logits(before[before.size() - 2], before.back()), plain);
      double left = 1.0;
      for (std::size_t sibling = 0; sibling < i; ++sibling) {
        if (guesses[sibling].parent != guesses[i].parent) continue;
        double& taken = share[static_cast<std::size_t>(guesses[sibling].token)];
        left -= taken;
        taken = 0.0;
      }
      for (std::size_t token = 0; token < share.size(); ++token) {
        CHECK(guesses[i].from(static_cast<int>(token)) == doctest::Approx(share[token] / left).epsilon(1e-9));
      }
      CHECK(guesses[i].from(guesses[i].token) > 0.0);
    }
  }
}

TEST_CASE("TreeDraft: greedy siblings are the likeliest in order; no more than there are tokens") {
  Pair pair;
  Tree draft = pair.tree(std::vector<std::size_t>(8, text));
  Random random{2};
  const DraftTokens guesses = propose(draft, pair.prompt, 8, random, {});
  REQUIRE(guesses.size() == 6);  // the size of the vocabulary
  const auto logits = pair.small.logits(1, 5);
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(guesses[i].from == Distribution::certain(guesses[i].token));
    if (i == 0) continue;
    CHECK(logits[static_cast<std::size_t>(guesses[i - 1].token)] >=
          logits[static_cast<std::size_t>(guesses[i].token)]);
  }
  // If a node has no token, its children are left out too.
  Pair narrow;
  std::vector<std::size_t> parents(7, text);
  for (std::size_t i = 0; i < 7; ++i) parents.push_back(i);
  Tree deep = narrow.tree(parents);
  const DraftTokens two_levels = propose(deep, narrow.prompt, 14, random, plain);
  REQUIRE(two_levels.size() == 12);
  for (std::size_t i = 0; i < 12; ++i) CHECK(two_levels[i].parent == (i < 6 ? text : i - 6));
}

TEST_CASE("TreeDraft: it does not read draft tokens again that became text") {
  Pair pair;
  Tree draft = pair.tree({text, text, 0, 1, 3});
  Random random{2};
  const DraftTokens guesses = propose(draft, pair.prompt, 5, random);
  std::vector<int> seen = path_to(pair.prompt, guesses, 4);  // by the second sibling
  seen.push_back(2);
  std::vector<test::CallRecord> calls;
  pair.small.records = &calls;
  (void)propose(draft, seen, 1, random);
  REQUIRE(calls.size() == 1);
  // The last of the three draft tokens was a leaf, which the draft had not read.
  CHECK(calls[0].seen == pair.prompt.size() + 2);
  CHECK(calls[0].tokens == 2);
  CHECK(pair.small_cache.text() == seen);
}

TEST_CASE("a cache refuses a tree that it cannot take back as a whole") {
  Pair pair;
  pair.small_cache = TableCache{{.max_rollback = 3}};
  Tree draft = pair.tree({text, text, text, text, 0, 1, 2, 3});
  Random random{2};
  CHECK_THROWS_AS((void)propose(draft, pair.prompt, 8, random), CapacityError);
  CHECK(propose(draft, pair.prompt, 4, random).size() == 4);  // the leaves need no rows
}
