// SPDX-License-Identifier: Apache-2.0
//
// The decoder without failures: prompts and turns, ends of a text, levels, counts.
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/ngram_draft.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>

#include "decoding.hpp"

using namespace kvpolicy;
using test::copy;
using test::Decoder;
using test::fixed;
using test::Pair;
using test::plain_greedy;
using test::Selected;
using test::Small;
using test::TableCache;
using test::TableModel;
using test::Tree;

namespace {

constexpr std::size_t text = TokenTree::text;

/// A draft that knows the text and proposes its tokens.
struct Oracle {
  std::vector<int> future;                                // the whole text
  std::size_t wrong_from = static_cast<std::size_t>(-1);  // draft tokens from here on are wrong
  static std::size_t vocabulary() { return 0; }
  void propose(std::span<const int> seen, std::size_t most, const SamplingOptions&, Random&,
               DraftTokens& guesses) const {
    guesses.clear();
    for (std::size_t i = seen.size(); guesses.size() < most && i < future.size(); ++i) {
      const int token = i >= wrong_from ? (future[i] + 1) % 6 : future[i];
      guesses.push_back({token, Distribution::certain(token), guesses.empty() ? text : guesses.size() - 1});
    }
  }
};

/// Passes on the first tokens of another draft: at most half of what is requested, sometimes none.
template <class Inner>
struct Fewer {
  Inner inner;
  std::size_t calls = 0;
  [[nodiscard]] std::size_t vocabulary() const { return inner.vocabulary(); }
  void propose(std::span<const int> seen, std::size_t most, const SamplingOptions& sampling, Random& random,
               DraftTokens& guesses) {
    inner.propose(seen, ++calls % 3 == 0 ? 0 : most / 2, sampling, random, guesses);
  }
};

std::vector<int> tokens_of(const DecodedStep& step) {
  std::vector<int> tokens;
  for (const NewToken& token : step.tokens) tokens.push_back(token.token);
  return tokens;
}

}  // namespace

TEST_CASE("greedy decoding writes the plain text, with any draft and any length") {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const TableModel target{6, 100 + seed, 2.0F, 0.6F};
    const TableModel small = target.like(200 + seed, seed % 4 == 0 ? 0.0F : 1.0F);
    for (const std::size_t length : std::vector<std::size_t>{0, 1, 2, 3, 5, 8}) {
      CAPTURE(seed);
      CAPTURE(length);
      const std::vector<int> expected = plain_greedy(target, {3, 1, 4, 1, 5}, 70);
      const auto writes = [&](auto make_draft) {
        Pair pair;
        pair.target = target;
        pair.small = small;
        auto draft = make_draft(pair);
        Decoder<decltype(draft)> decoder{pair.target, pair.cache, std::move(draft), fixed(length)};
        decoder.read_prompt(pair.prompt);
        CHECK(decoder.generate(70) == Ending::length);
        CHECK(copy(decoder.text()) == expected);
        CHECK(pair.cache.tokens() + 1 == expected.size());
        CHECK(pair.cache.partial_rows() == 0);
        const LevelStatistics& counted = decoder.statistics();
        CHECK(counted.tokens == 70);
        CHECK(counted.tokens == counted.verifications + counted.accepted);
      };
      writes([](Pair&) { return NoDraft{}; });
      writes([](Pair& p) { return p.small_draft(); });
      writes([](Pair& p) { return Selected<>{p.target, p.cache}; });
      writes([](Pair& p) { return p.hierarchy(1); });
      writes([](Pair& p) { return p.hierarchy(3); });
      writes([](Pair& p) { return p.tree({text, text, 0, 1, 1, 2, 4}); });
      writes([](Pair& p) { return p.tree({text, text, text, text, text, text, text}); });
      writes(
          [](Pair& p) { return Selected<Tree>{p.target, p.cache, p.tree({text, text, 0, 0}), {4, false}}; });
      writes([](Pair&) { return NgramDraft{}; });
      writes([](Pair& p) { return Selected<NgramDraft>{p.target, p.cache, NgramDraft{}, {3, false}}; });
      writes([](Pair& p) { return Fewer<Small>{p.small_draft()}; });
    }
  }
}

TEST_CASE("a length chosen at run time changes no token") {
  Pair pair;
  Decoder<Selected<Small>> decoder{
      pair.target, pair.cache, pair.hierarchy(), {.length = 3, .adapt = true, .max_length = 9}};
  decoder.read_prompt(pair.prompt);
  decoder.generate(400);
  CHECK(copy(decoder.text()) == plain_greedy(pair.target, pair.prompt, 400));
  CHECK(decoder.length() <= 9);
}

TEST_CASE("the same seed gives the same text, and another seed another one") {
  const auto sampled = [](std::uint64_t seed) {
    Pair pair;
    auto options = fixed(4, {.temperature = 1.0F});
    options.seed = seed;
    Decoder<Selected<Small>> decoder{pair.target, pair.cache, pair.hierarchy(), options};
    decoder.read_prompt(pair.prompt);
    decoder.generate(60);
    return copy(decoder.text());
  };
  CHECK(sampled(1) == sampled(1));
  CHECK(sampled(1) != sampled(2));
}

TEST_CASE("levels: which level proposed each token") {
  Pair pair;
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, 40);
  Decoder<Oracle> decoder{pair.target, pair.cache, Oracle{expected, 5 + 4}, fixed(3)};
  decoder.read_prompt(pair.prompt);
  // Three draft tokens are accepted and the target adds one; then all are wrong.
  DecodedStep step = decoder.step();
  REQUIRE(step.tokens.size() == 4);
  for (std::size_t i = 0; i < 3; ++i) CHECK(step.tokens[i].level == 1);
  CHECK(step.tokens[3].level == 0);
  step = decoder.step();
  REQUIRE(step.tokens.size() == 1);
  CHECK(step.tokens[0].level == 0);
  CHECK(copy(decoder.text()) == std::vector<int>(expected.begin(), expected.begin() + 10));

  // Three levels: tokens of the small model, of the target over selected rows, and of the target.
  Pair deep;
  Decoder<Selected<Small>> three{deep.target, deep.cache, deep.hierarchy(1), fixed(4)};
  three.read_prompt(deep.prompt);
  std::vector<std::size_t> came(3);
  three.generate(300, [&](const NewToken& token) {
    REQUIRE(token.level < 3);
    ++came[token.level];
    return true;
  });
  CHECK(came[0] == three.statistics().verifications);
  CHECK(came[1] + came[2] == three.statistics().accepted);
  CHECK(came[1] > 0);
  CHECK(came[2] > 0);
  // If the small model is the target, all of its tokens are accepted.
  Pair alike;
  alike.small = alike.target.like(1, 0.0F);
  Decoder<Small> sure{alike.target, alike.cache, alike.small_draft(), fixed(4)};
  sure.read_prompt(alike.prompt);
  sure.generate(100);
  CHECK(sure.statistics().acceptance() == 1.0);
  CHECK(sure.statistics().tokens_per_verification() == 5.0);
}

TEST_CASE("statistics of both levels add up") {
  Pair pair;
  Decoder<Selected<Small>> decoder{pair.target, pair.cache, pair.hierarchy(2), fixed(4)};
  decoder.read_prompt(pair.prompt);
  std::size_t steps = 0;
  std::size_t tokens = 0;
  while (steps < 50) {
    tokens += decoder.step().tokens.size();
    ++steps;
  }
  const LevelStatistics& outer = decoder.statistics();
  CHECK(outer.verifications == steps);
  CHECK(outer.tokens == tokens);
  CHECK(outer.tokens == outer.verifications + outer.accepted);
  CHECK(outer.draft_tokens == 4 * steps);
  CHECK(outer.positions <= outer.draft_tokens);
  CHECK(outer.accepted <= outer.positions);
  CHECK(outer.positions <= outer.accepted + steps);
  CHECK(outer.draft_seconds >= 0.0);
  CHECK(outer.verify_seconds >= 0.0);
  const LevelStatistics& middle = decoder.draft().statistics();
  CHECK(middle.tokens == outer.draft_tokens);
  CHECK(middle.tokens == middle.verifications + middle.accepted);
  CHECK(middle.accepted <= middle.positions);
  CHECK(middle.positions <= middle.draft_tokens);
  CHECK(middle.draft_tokens <= 2 * middle.verifications);
  CHECK(pair.target.calls(Read::selected) == middle.verifications);
  CHECK(pair.target.calls(Read::all) == outer.verifications + 1);  // and the prompt
}

TEST_CASE("a step adds no more tokens than requested") {
  Pair pair;
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, 30);
  Decoder<Oracle> decoder{pair.target, pair.cache, Oracle{expected}, fixed(6)};
  decoder.read_prompt(pair.prompt);
  CHECK(decoder.step(0).tokens.empty());
  CHECK(decoder.text().size() == 5);
  CHECK(decoder.step(1).tokens.size() == 1);
  CHECK(decoder.step(3).tokens.size() == 3);
  CHECK(decoder.step(100).tokens.size() == 7);
  CHECK(decoder.generate(9) == Ending::length);
  CHECK(decoder.text().size() == 5 + 20);
  CHECK(decoder.ending() == Ending::open);
  CHECK(std::ranges::equal(decoder.text(), std::span{expected}.first(25)));
}

TEST_CASE("a stop token ends the text, also among accepted draft tokens; reopen continues after it") {
  Pair pair;
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, 60);
  for (const int stop : {0, 1, 2, 3, 4, 5}) {
    for (const std::size_t length : std::vector<std::size_t>{0, 1, 4, 7}) {
      CAPTURE(stop);
      CAPTURE(length);
      pair.cache = TableCache{};
      auto options = fixed(length);
      options.stop_tokens = {99, stop};
      Decoder<Oracle> decoder{pair.target, pair.cache, Oracle{expected}, options};
      decoder.read_prompt(pair.prompt);
      std::size_t end = 5;  // where the next text ends
      for (int turn = 0; turn < 3; ++turn) {
        const std::size_t first = end;
        while (end < 40 && expected[end] != stop) ++end;
        const bool stops = end < 40;
        if (stops) ++end;
        std::vector<int> shown;
        const Ending ending = decoder.generate(40 - first, [&](const NewToken& token) {
          shown.push_back(token.token);
          return true;
        });
        CHECK(ending == (stops ? Ending::stop_token : Ending::length));
        CHECK(std::ranges::equal(decoder.text(), std::span{expected}.first(end)));
        CHECK(std::ranges::equal(shown, std::span{expected}.subspan(first, end - first)));
        CHECK(pair.cache.tokens() + 1 == end);
        if (!stops || end == 40) break;
        CHECK(decoder.ending() == Ending::stop_token);
        CHECK(decoder.step().tokens.empty());
        CHECK(decoder.step().ending == Ending::stop_token);
        decoder.reopen();
        CHECK(decoder.ending() == Ending::open);
      }
      const LevelStatistics& counted = decoder.statistics();
      CHECK(counted.accepted <= counted.positions);
      CHECK(counted.tokens == decoder.text().size() - 5);
      CHECK(counted.acceptance() == (length == 0 ? 0.0 : 1.0));  // its draft tokens are right
    }
  }
}

TEST_CASE("the callback cancels; tokens of the same step are part of the text") {
  Pair pair;
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, 40);
  Decoder<Oracle> decoder{pair.target, pair.cache, Oracle{expected}, fixed(4)};
  decoder.read_prompt(pair.prompt);
  std::size_t asked = 0;
  CHECK(decoder.generate(30, [&](const NewToken&) { return ++asked < 7; }) == Ending::cancelled);
  CHECK(asked == 7);
  CHECK(decoder.text().size() == 5 + 10);
  CHECK(decoder.ending() == Ending::open);
  CHECK(decoder.generate(20) == Ending::length);
  CHECK(std::ranges::equal(decoder.text(), std::span{expected}.first(35)));
  // A callback that throws undoes nothing.
  CHECK_THROWS_AS(decoder.generate(5, [](const NewToken&) -> bool { throw 3; }), int);
  CHECK(std::ranges::equal(decoder.text(), std::span{expected}.first(40)));
}

TEST_CASE("capacity: the text continues to the last token that the cache has room for") {
  for (const std::size_t length : std::vector<std::size_t>{0, 1, 4, 7}) {
    for (const std::size_t most : std::vector<std::size_t>{5, 6, 9, 20}) {
      CAPTURE(length);
      CAPTURE(most);
      Pair pair;
      const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, 40);
      pair.cache = TableCache{{.max_rollback = 16, .max_tokens = most}};
      Decoder<Oracle> decoder{pair.target, pair.cache, Oracle{expected}, fixed(length)};
      decoder.read_prompt(pair.prompt);
      CHECK(decoder.generate(100) == Ending::capacity);
      CHECK(std::ranges::equal(decoder.text(), std::span{expected}.first(most + 1)));
      CHECK(pair.cache.tokens() == most);
      CHECK(decoder.step().tokens.empty());
      decoder.reopen();
      CHECK(decoder.step().ending == Ending::capacity);
      CHECK_THROWS_AS(decoder.read_prompt(std::vector<int>{1}), CapacityError);
      CHECK(decoder.text().size() == most + 1);
    }
  }
  Pair pair;
  pair.cache = TableCache{{.max_rollback = 16, .max_tokens = 4}};
  Decoder<NoDraft> decoder{pair.target, pair.cache, NoDraft{}, fixed(0)};
  CHECK_THROWS_AS(decoder.read_prompt(pair.prompt), CapacityError);
  CHECK(decoder.text().empty());
}

TEST_CASE("a prompt of one token, and one that is read in chunks and reports progress") {
  Pair pair;
  Decoder<Selected<Small>> one{pair.target, pair.cache, pair.hierarchy(), fixed(3)};
  one.read_prompt(std::vector<int>{2});
  CHECK(pair.cache.tokens() == 0);
  one.generate(40);
  CHECK(copy(one.text()) == plain_greedy(pair.target, {2}, 40));

  Pair chunked;
  std::vector<test::CallRecord> calls;
  chunked.target.records = &calls;
  auto options = fixed(3);
  options.prompt_chunk = 3;
  Decoder<Small> decoder{chunked.target, chunked.cache, chunked.small_draft(), options};
  const std::vector<int> prompt{0, 1, 2, 3, 4, 5, 0, 1, 2};
  std::vector<std::size_t> done;
  decoder.read_prompt(prompt, [&](std::size_t read, std::size_t all) {
    CHECK(all == 8);
    done.push_back(read);
  });
  CHECK(done == std::vector<std::size_t>{3, 6, 8});
  REQUIRE(calls.size() == 3);
  for (const test::CallRecord& call : calls) CHECK_FALSE(call.refresh_selection);
  decoder.generate(20);
  CHECK(copy(decoder.text()) == plain_greedy(chunked.target, prompt, 20));
}

TEST_CASE("later turns: tokens are added to the text and read, also after an end") {
  Pair pair;
  auto options = fixed(4);
  options.prompt_chunk = 2;
  Decoder<Selected<Small>> decoder{pair.target, pair.cache, pair.hierarchy(), options};
  std::vector<int> expected = pair.prompt;
  decoder.read_prompt(pair.prompt);
  for (const std::vector<int>& turn : {std::vector<int>{0}, {5, 5, 2}, {}, {1, 2, 3, 4, 5, 0, 1}}) {
    decoder.generate(11);
    expected = plain_greedy(pair.target, expected, 11);
    CHECK(copy(decoder.text()) == expected);
    decoder.read_prompt(turn);
    expected.insert(expected.end(), turn.begin(), turn.end());
    CHECK(copy(decoder.text()) == expected);
    CHECK(pair.cache.tokens() + 1 == expected.size());
    CHECK(pair.cache.partial_rows() == 0);
  }
  decoder.generate(11);
  CHECK(copy(decoder.text()) == plain_greedy(pair.target, expected, 11));
}

TEST_CASE("a fork of a cache that read the prompt can be continued") {
  Pair pair;
  Decoder<NoDraft> first{pair.target, pair.cache, NoDraft{}, fixed(0)};
  first.read_prompt(pair.prompt);
  TableCache fork = pair.cache.fork();
  Decoder<Selected<>> decoder{pair.target, fork, Selected<>{pair.target, fork}, fixed(3)};
  CHECK_THROWS_AS(decoder.read_prompt(pair.prompt), ConfigError);
  CHECK_THROWS_AS(decoder.continue_text(std::span{pair.prompt}.first(4)), ConfigError);
  CHECK_THROWS_AS(decoder.continue_text({}), ConfigError);
  decoder.continue_text(pair.prompt);
  CHECK_THROWS_AS(decoder.continue_text(pair.prompt), ConfigError);
  decoder.generate(25);
  CHECK(copy(decoder.text()) == plain_greedy(pair.target, pair.prompt, 25));
  CHECK(pair.cache.text() == std::vector<int>(pair.prompt.begin(), pair.prompt.end() - 1));
}

TEST_CASE("settings that do not work are refused before anything happens") {
  Pair pair;
  const TableModel other{5, 1};
  TableModel foreign = other;
  const auto make = [&](SpeculationOptions options) {
    (void)Decoder<NoDraft>{pair.target, pair.cache, NoDraft{}, options};
  };
  CHECK_NOTHROW(make(fixed(15)));
  CHECK_THROWS_WITH_AS(make(fixed(16)), doctest::Contains("max_rollback = 16"), ConfigError);
  CHECK_THROWS_AS(make({.length = 2, .adapt = true, .max_length = 16}), ConfigError);
  CHECK_THROWS_AS(make({.sampling = {.temperature = -1.0F}}), ConfigError);
  CHECK_THROWS_AS(make({.refresh_selection = {.below_acceptance = 1.5}}), ConfigError);
  CHECK_THROWS_AS(make({.prompt_chunk = 0}), ConfigError);
  // A cache that cannot take anything back serves plain decoding.
  TableCache fixed_cache{{.max_rollback = 0}};
  Decoder<NoDraft> plain{pair.target, fixed_cache, NoDraft{}, fixed(0)};
  plain.read_prompt(pair.prompt);
  plain.generate(10);
  CHECK(copy(plain.text()) == plain_greedy(pair.target, pair.prompt, 10));
  CHECK_THROWS_AS((Decoder<NoDraft>{pair.target, fixed_cache, NoDraft{}, fixed(1)}), ConfigError);

  TableCache empty;
  CHECK_THROWS_WITH_AS((Decoder<Small>{pair.target, pair.cache, Small{foreign, empty}, fixed(2)}),
                       doctest::Contains("vocabulary of 5"), ConfigError);
  CHECK_THROWS_AS((Selected<Small>{pair.target, pair.cache, Small{foreign, empty}}), ConfigError);
  CHECK_THROWS_AS((Small{pair.small, empty, {.chunk = 0}}), ConfigError);
  TokenTree unordered;
  for (const std::size_t parent : {text, std::size_t{0}, text}) unordered.add(parent);
  CHECK_THROWS_AS((Tree{pair.small, empty, TokenTree{}}), ConfigError);
  CHECK_THROWS_AS((Tree{pair.small, empty, unordered}), ConfigError);

  Decoder<NoDraft> decoder{pair.target, pair.cache, NoDraft{}, fixed(0)};
  CHECK_THROWS_AS(decoder.step(), ShapeError);  // no text
  for (const int token : {-1, 6}) {
    CHECK_THROWS_AS(decoder.read_prompt(std::vector<int>{1, token}), ShapeError);
  }
  CHECK(decoder.text().empty());
  CHECK(pair.cache.tokens() == 0);
}

TEST_CASE("a step in parts: abandoned, begun again, concluded once") {
  Pair pair;
  Decoder<Selected<Small>> decoder{pair.target, pair.cache, pair.hierarchy(), fixed(4)};
  decoder.read_prompt(pair.prompt);
  CHECK_THROWS_AS(decoder.conclude({}), ShapeError);
  decoder.abandon();
  REQUIRE(decoder.begin());
  CHECK(decoder.call().tokens.size() == 5);
  (void)pair.target.read(decoder.cache(), decoder.call());
  decoder.abandon();
  CHECK(pair.cache.tokens() == 4);
  // The call was read, but the step is begun again instead of concluded.
  REQUIRE(decoder.begin());
  (void)pair.target.read(decoder.cache(), decoder.call());
  REQUIRE(decoder.begin());
  CHECK(pair.cache.tokens() == 4);
  const auto logits = pair.target.read(decoder.cache(), decoder.call());
  const DecodedStep step = decoder.conclude(logits);
  CHECK_THROWS_AS(decoder.conclude(logits), ShapeError);
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, 30);
  CHECK(std::ranges::equal(tokens_of(step), std::span{expected}.subspan(5, step.tokens.size())));
  // A further turn is added during a step.
  REQUIRE(decoder.begin());
  (void)pair.target.read(decoder.cache(), decoder.call());
  std::vector<int> so_far = copy(decoder.text());
  decoder.read_prompt(std::vector<int>{2, 2});
  so_far.insert(so_far.end(), {2, 2});
  decoder.generate(15);
  CHECK(copy(decoder.text()) == plain_greedy(pair.target, so_far, 15));
}
