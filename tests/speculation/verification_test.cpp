// SPDX-License-Identifier: Apache-2.0
//
// Verifies one set of draft tokens, and tests the call in which a model reads them.
#include <array>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/pending_call.hpp>
#include <kvpolicy/speculation/statistics.hpp>
#include <kvpolicy/speculation/verification.hpp>

#include "table_cache.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t text = TokenTree::text;

// Logits of a model that is certain of one of four tokens at each position.
std::vector<float> sure_of(std::initializer_list<int> tokens) {
  std::vector<float> logits;
  for (const int token : tokens) {
    for (int t = 0; t < 4; ++t) logits.push_back(t == token ? 5.0F : 0.0F);
  }
  return logits;
}
DraftToken certain(int token, std::size_t parent) { return {token, Distribution::certain(token), parent}; }
Verification greedy(const DraftTokens& guesses, const std::vector<float>& logits) {
  Random random{1};
  return verify(guesses, logits, {}, random);
}
using Path = std::vector<std::size_t>;

}  // namespace

TEST_CASE("greedy: draft tokens are accepted while the target agrees, then its own token follows") {
  const DraftTokens chain{certain(1, text), certain(2, 0), certain(3, 1)};
  Verification verification = greedy(chain, sure_of({1, 2, 3, 0}));
  CHECK(verification.path == Path{0, 1, 2});
  CHECK(verification.next == 0);
  CHECK(verification.positions == 3);
  REQUIRE(verification.distributions.size() == 4);
  CHECK(verification.distributions[3] == Distribution::certain(0));

  verification = greedy(chain, sure_of({1, 0, 3, 0}));
  CHECK(verification.path == Path{0});
  CHECK(verification.next == 0);
  CHECK(verification.positions == 2);
  CHECK(verification.distributions.size() == 2);

  verification = greedy(chain, sure_of({2, 2, 3, 0}));
  CHECK(verification.path.empty());
  CHECK(verification.next == 2);
  CHECK(verification.positions == 1);

  verification = greedy({}, sure_of({3}));
  CHECK(verification.path.empty());
  CHECK(verification.next == 3);
  CHECK(verification.positions == 0);
}

TEST_CASE("greedy: of siblings the one that the target chooses is accepted, at every depth") {
  // 0 and 1 follow the text, 2 and 3 follow 1, 4 follows 3.
  const DraftTokens tree{certain(0, text), certain(1, text), certain(2, 1), certain(3, 1), certain(2, 3)};
  Verification verification = greedy(tree, sure_of({1, 0, 3, 0, 2, 1}));
  CHECK(verification.path == Path{1, 3, 4});
  CHECK(verification.next == 1);
  CHECK(verification.positions == 3);
  // None of the two at the second position is accepted, so the target's own token follows.
  verification = greedy(tree, sure_of({1, 0, 0, 3, 3, 3}));
  CHECK(verification.path == Path{1});
  CHECK(verification.next == 0);
  CHECK(verification.positions == 2);
  // After an accepted leaf there is no draft token.
  verification = greedy(tree, sure_of({0, 2, 3, 0, 2, 1}));
  CHECK(verification.path == Path{0});
  CHECK(verification.next == 2);
  CHECK(verification.positions == 1);
}

TEST_CASE("a token drawn from the target's own distribution is always accepted") {
  Random random{3};
  const std::vector<float> row{0.1F, 0.9F, -0.4F, 0.3F};
  const SamplingOptions sampling{.temperature = 1.0F};
  const Distribution p = distribution_of(row, sampling);
  std::vector<float> logits;
  for (int i = 0; i < 4; ++i) logits.insert(logits.end(), row.begin(), row.end());
  for (int round = 0; round < 500; ++round) {
    DraftTokens guesses;
    for (std::size_t i = 0; i < 3; ++i) {
      guesses.push_back({p.draw(random.uniform()), p, i == 0 ? text : i - 1});
    }
    const Verification verification = verify(guesses, logits, sampling, random);
    CHECK(verification.path == Path{0, 1, 2});
    for (const Distribution& said : verification.distributions) CHECK(said == p);
  }
}

TEST_CASE("a token that the target cannot generate never results") {
  Random random{5};
  const float banned = -std::numeric_limits<float>::infinity();
  const std::vector<float> logits{0.0F, banned, 0.0F, banned, 0.0F, 0.0F, 0.0F, 0.0F};
  const Distribution q{{{0, 0.1}, {1, 0.8}, {3, 0.1}}};
  for (int round = 0; round < 2000; ++round) {
    const DraftTokens guesses{{q.draw(random.uniform()), q, text}};
    const Verification verification = verify(guesses, logits, {.temperature = 1.0F}, random);
    const int token = verification.path.empty() ? verification.next : guesses[0].token;
    CHECK((token == 0 || token == 2));
  }
}

TEST_CASE("verify refuses logits of another size, and NaN where it decides") {
  Random random{1};
  const DraftTokens guesses{certain(1, text)};
  std::vector<float> logits = sure_of({1, 2});
  CHECK_NOTHROW((void)verify(guesses, logits, {}, random));
  CHECK_THROWS_AS((void)verify(guesses, std::vector<float>{}, {}, random), ShapeError);
  CHECK_THROWS_AS((void)verify(guesses, std::vector<float>(7), {}, random), ShapeError);
  logits[5] = std::nanf("");
  CHECK_THROWS_AS((void)verify(guesses, logits, {}, random), ShapeError);
  // Logits after a refused draft token are not used.
  logits = sure_of({0, 2});
  logits[5] = std::nanf("");
  CHECK(verify(guesses, logits, {}, random).next == 0);
}

TEST_CASE("a chain of draft tokens is read as a run of tokens, and rows after the path are dropped") {
  const std::vector<int> unread{7, 8};
  const DraftTokens guesses{certain(1, text), certain(2, 0), certain(3, 1)};
  const PendingCall pending{unread, guesses};
  CHECK(pending.tokens() == 5);
  const ModelCall call = pending.call({.read = Read::selected, .refresh_selection = true});
  CHECK(std::vector<int>(call.tokens.begin(), call.tokens.end()) == std::vector<int>{7, 8, 1, 2, 3});
  CHECK(call.logits == LogitsOf::all);
  CHECK(call.attend.tree == nullptr);
  CHECK(call.attend.read == Read::selected);
  CHECK(call.attend.refresh_selection);
  CHECK(call.attend.selection_query == 1);  // the text's last token
  CHECK(call.positions(10) == std::vector<std::size_t>{10, 11, 12, 13, 14});

  test::TableCache cache;
  cache.append(call.tokens, {});
  pending.keep(cache, 0, std::array<std::size_t, 1>{0});
  CHECK(cache.text() == std::vector<int>{7, 8, 1});

  const std::vector<float> logits(5 * 3, 1.0F);
  CHECK(pending.last_rows(logits, 3).size() == 4 * 3);
  CHECK(pending.last_rows(logits, 3).data() == logits.data() + 3);
  CHECK_THROWS_AS((void)pending.last_rows(logits, 4), ShapeError);
  CHECK_THROWS_AS((void)pending.last_rows(std::span{logits}.first(5), 3), ShapeError);
  CHECK_THROWS_AS((void)pending.last_rows({}, 3), ShapeError);
}

TEST_CASE("draft tokens that branch are read as a tree after the unread text") {
  const std::vector<int> unread{7, 8};
  const DraftTokens guesses{certain(1, text), certain(2, text), certain(3, 0), certain(4, 1)};
  const PendingCall pending{unread, guesses};
  const ModelCall call = pending.call({});
  REQUIRE(call.attend.tree != nullptr);
  const std::vector<std::size_t> parents{text, 0, 1, 1, 2, 3};
  CHECK(*call.attend.tree == TokenTree{parents});
  CHECK(call.attend.selection_query == 1);
  CHECK(call.positions(10) == std::vector<std::size_t>{10, 11, 12, 12, 13, 13});

  test::TableCache cache;
  cache.append(call.tokens, {.tree = call.attend.tree});
  pending.keep(cache, 0, std::array<std::size_t, 2>{1, 3});
  CHECK(cache.text() == std::vector<int>{7, 8, 2, 4});
  CHECK_FALSE(cache.has_tree());
}

TEST_CASE("if nothing of a tree is accepted, the unread text stays") {
  const DraftTokens guesses{certain(1, text), certain(2, text)};
  const PendingCall pending{std::array{5}, guesses};
  test::TableCache cache;
  const ModelCall call = pending.call({});
  cache.append(call.tokens, call.attend);
  pending.keep(cache, 0, {});
  CHECK(cache.text() == std::vector<int>{5});
}

TEST_CASE("rates are 0 as long as there is nothing to divide") {
  LevelStatistics statistics;
  CHECK(statistics.acceptance() == 0.0);
  CHECK(statistics.tokens_per_verification() == 0.0);
  statistics = {.verifications = 4, .draft_tokens = 12, .positions = 10, .accepted = 8, .tokens = 12};
  CHECK(statistics.acceptance() == 0.8);
  CHECK(statistics.tokens_per_verification() == 3.0);
}
