// SPDX-License-Identifier: Apache-2.0
//
// Drafts that break their promises: draft tokens that they cannot have drawn, tokens outside the
// vocabulary, more draft tokens than requested. All are refused by name, and a caller that continues
// without them gets texts of the target's distribution.
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>

#include "chi_square.hpp"
#include "decoding.hpp"
#include "lossless.hpp"

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

namespace {

constexpr std::size_t text = TokenTree::text;

/// A small model's draft tokens; every fifth names a token that its distribution does not contain.
struct Misreports {
  Small draft;
  std::size_t made = 0;
  [[nodiscard]] std::size_t vocabulary() const { return draft.vocabulary(); }
  void propose(std::span<const int> seen, std::size_t most, const SamplingOptions& sampling, Random& random,
               DraftTokens& guesses) {
    draft.propose(seen, most, sampling, random, guesses);
    for (DraftToken& guess : guesses) {
      if (++made % 5 == 0) guess.from = guess.from.without(guess.token);
    }
  }
};

/// Proposes exactly the given tokens; serves any vocabulary.
struct Told {
  DraftTokens told;
  static std::size_t vocabulary() { return 0; }
  void propose(std::span<const int>, std::size_t, const SamplingOptions&, Random&,
               DraftTokens& guesses) const {
    guesses = told;
  }
};

DraftTokens chain(std::initializer_list<int> tokens) {
  DraftTokens guesses;
  for (const int token : tokens) {
    guesses.push_back({token, Distribution::certain(token), guesses.empty() ? text : guesses.size() - 1});
  }
  return guesses;
}

}  // namespace

TEST_CASE("the rule refuses a draft token that its distribution lacks, whatever the target says") {
  Random random{1};
  const Distribution p{{{0, 0.5}, {1, 0.5}}};
  const Distribution q{{{0, 1.0}}};
  for (const int guess : {1, 2}) {  // one that the target accepts, and one that it does not
    CHECK_THROWS_AS((void)SpeculativeSampling::accepts(p, q, guess, random), ShapeError);
  }
  CHECK_THROWS_WITH_AS((void)SpeculativeSampling::accepts(p, Distribution{}, 1, random),
                       doctest::Contains("token 1"), ShapeError);
}

TEST_CASE("verify refuses such a draft token before it tries any, even if it would not be reached") {
  const std::vector<float> logits{5.0F, 0.0F, 0.0F, 0.0F, 0.0F, 5.0F, 0.0F, 0.0F, 0.0F};
  DraftTokens guesses = chain({2, 1});  // the target says 0: the second is never tried
  Random random{1};
  CHECK(verify(guesses, logits, {}, random).next == 0);
  guesses[1].from = Distribution::certain(0);
  Random before = random;
  CHECK_THROWS_AS((void)verify(guesses, logits, {}, random), ShapeError);
  CHECK(before.uniform() == random.uniform());  // no random number was drawn
}

TEST_CASE("texts follow the target even if a draft names tokens that its distribution lacks") {
  // Each refused step is repeated without draft tokens. If the refusal depended on whether the target
  // accepts the draft tokens before the wrong one, the texts would be biased.
  const TableModel target{4, 11, 1.5F, 0.3F};
  const TableModel small = target.like(12, 1.5F);
  const SamplingOptions sampling{.temperature = 1.0F};
  constexpr std::size_t runs = 100;
  const std::vector<int> prompt{1, 0, 2, 1};
  test::RunCounts counts{target.vocabulary()};
  std::size_t refused = 0;
  test::Bench bench{target, small};
  for (std::uint64_t seed = 0; counts.samples() < test::wanted_samples; ++seed) {
    bench.cache = TableCache{};
    bench.small_cache = TableCache{};
    SpeculationOptions options = fixed(3, sampling);
    options.seed = 1000 * seed;
    Decoder<Misreports> decoder{bench.target, bench.cache, Misreports{Small{bench.small, bench.small_cache}},
                                options};
    decoder.read_prompt(prompt);
    while (decoder.text().size() < prompt.size() + 3 * runs + 8) {
      const std::size_t length = decoder.text().size();
      try {
        (void)decoder.step();
      } catch (const ShapeError&) {
        ++refused;
        CHECK(decoder.text().size() == length);
        (void)decoder.step(1);
      }
    }
    counts.add(decoder.text(), prompt.size(), runs);
  }
  CHECK(counts.p_value(target, sampling) > 0.001);
  CHECK(refused > counts.samples() / 10);
}

TEST_CASE("tokens outside the vocabulary are refused before the model reads them, at both levels") {
  for (const int token : {-1, 6, std::numeric_limits<int>::max()}) {
    CAPTURE(token);
    Pair pair;
    Decoder<Told> decoder{pair.target, pair.cache, Told{chain({1, token})}, fixed(4)};
    decoder.read_prompt(pair.prompt);
    CHECK_THROWS_WITH_AS(decoder.step(), doctest::Contains("outside the vocabulary of 6"), ShapeError);
    CHECK(copy(decoder.text()) == pair.prompt);
    CHECK(pair.cache.tokens() + 1 == pair.prompt.size());
    // Decoding can continue.
    decoder.draft().told.clear();
    decoder.generate(20);
    CHECK(copy(decoder.text()) == plain_greedy(pair.target, pair.prompt, 20));

    Pair deep;
    Decoder<Selected<Told>> above{
        deep.target, deep.cache,
        Selected<Told>{deep.target, deep.cache, Told{chain({token})}, {.length = 2, .adapt = false}},
        fixed(4)};
    above.read_prompt(deep.prompt);
    CHECK_THROWS_WITH_AS(above.generate(8), doctest::Contains("outside the vocabulary of 6"), ShapeError);
    CHECK(deep.cache.partial_rows() == 0);
  }
}

TEST_CASE("more draft tokens than requested are refused") {
  Pair pair;
  Decoder<Told> decoder{pair.target, pair.cache, Told{chain({1, 2, 3, 4, 5})}, fixed(4)};
  decoder.read_prompt(pair.prompt);
  CHECK_THROWS_WITH_AS(decoder.step(), doctest::Contains("5 draft tokens"), ShapeError);
  CHECK(copy(decoder.text()) == pair.prompt);
  decoder.draft().told.pop_back();
  CHECK_NOTHROW(decoder.step());
}

TEST_CASE("a text to be continued must consist of tokens of the vocabulary") {
  for (const int token : {-1, 6}) {
    Pair pair;
    Decoder<NoDraft> first{pair.target, pair.cache, NoDraft{}, fixed(0)};
    first.read_prompt(pair.prompt);
    Decoder<NoDraft> decoder{pair.target, pair.cache, NoDraft{}, fixed(0)};
    std::vector<int> wrong = pair.prompt;
    wrong.back() = token;
    CHECK_THROWS_WITH_AS(decoder.continue_text(wrong), doctest::Contains("outside the vocabulary of 6"),
                         ShapeError);
    CHECK(decoder.text().empty());
    CHECK_NOTHROW(decoder.continue_text(pair.prompt));
  }
}

TEST_CASE("weights that are no distribution are refused") {
  using Outcomes = std::vector<Distribution::Outcome>;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
  constexpr double largest = std::numeric_limits<double>::max();
  for (const Outcomes& outcomes :
       {Outcomes{{0, nan_value}}, Outcomes{{0, 1.0}, {1, nan_value}}, Outcomes{{0, 1.0}, {1, -0.5}},
        Outcomes{{0, infinity}}, Outcomes{{0, 0.0}, {1, 0.0}}, Outcomes{{0, largest}, {1, largest}},
        // Not in ascending order: a token could be listed and not be found.
        Outcomes{{1, 0.5}, {0, 0.5}}, Outcomes{{0, 0.5}, {0, 0.5}}}) {
    CHECK_THROWS_AS((void)Distribution{outcomes}, ShapeError);
  }
  CHECK(Distribution{Outcomes{}}.empty());
  CHECK_NOTHROW((void)Distribution{{{0, std::numeric_limits<double>::denorm_min()}}});
  CHECK_THROWS_AS((void)Distribution{}.draw(0.5), ShapeError);  // it has no token
}
