// SPDX-License-Identifier: Apache-2.0
//
// Allocation failures at every place that allocates.
#include <algorithm>
#include <cstddef>
#include <new>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/speculation/ngram_draft.hpp>

#include "decoding.hpp"
#include "support/failing_new.hpp"

using namespace kvpolicy;

TEST_CASE("an index of n-grams stays unchanged if memory runs out, and continues") {
  std::mt19937 random{31};
  std::vector<int> text(700);
  for (int& token : text) token = static_cast<int>(random() % 4);
  const std::vector<int> all = text;
  text.resize(200);

  struct Case {
    std::size_t size;  // 250 fits into the tables of 200, 700 does not
    bool copied;       // a copy has no spare capacity in its other members
    std::size_t least_failures;
  };
  for (const auto [size, copied, least_failures] :
       {Case{700, false, 4}, Case{700, true, 4}, Case{250, true, 4}, Case{250, false, 0}}) {
    const std::vector<int> longer(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(size));
    std::size_t failures = 0;
    for (std::size_t successes = 0;; ++successes) {
      NgramIndex original;
      original.update(text);
      NgramIndex index = original;
      if (!copied) index = std::move(original);
      const std::optional<std::size_t> before = index.continuation();
      bool failed = false;
      {
        const test::FailNew fail{successes};
        try {
          index.update(longer);
        } catch (const std::bad_alloc&) {
          failed = true;
        }
      }
      if (!failed) {
        CHECK(std::ranges::equal(index.text(), longer));
        break;
      }
      ++failures;
      CHECK(std::ranges::equal(index.text(), text));
      CHECK(index.continuation() == before);
      index.update(longer);
      NgramIndex fresh;
      fresh.update(longer);
      CHECK(index.continuation() == fresh.continuation());
    }
    CHECK(failures >= least_failures);
  }
}

TEST_CASE("a copied index removes tokens and adds as many without allocating") {
  NgramIndex index;
  std::vector<int> text(300, 1);
  index.update(text);
  text.resize(290);
  index.update(text);
  NgramIndex copy = index;
  text.resize(295, 2);
  copy.update(text);  // allocates the capacity here
  text.resize(500, 1);
  {
    const test::FailNew fail{0};
    copy.update(text);
  }
  CHECK(std::ranges::equal(copy.text(), text));
}

TEST_CASE("a step that runs out of memory leaves the text unchanged, and the next one continues") {
  using test::copy;
  using test::Pair;
  constexpr std::size_t text = TokenTree::text;
  // In the first step, which allocates memory for all later ones, and in a later step.
  const auto runs_out_in = [](auto make_draft, std::size_t already) {
    bool done = false;
    std::size_t failures = 0;
    for (std::size_t successes = 0; !done; ++successes) {
      REQUIRE(successes < 2000);
      CAPTURE(successes);
      Pair pair;
      const std::vector<int> expected = test::plain_greedy(pair.target, pair.prompt, 12);
      auto draft = make_draft(pair);
      test::Decoder<decltype(draft)> decoder{pair.target, pair.cache, std::move(draft), test::fixed(4)};
      decoder.read_prompt(pair.prompt);
      for (std::size_t step = 0; step < already; ++step) (void)decoder.step();
      const std::vector<int> before = copy(decoder.text());
      done = true;
      try {
        const test::FailNew fail{successes};
        (void)decoder.step();
      } catch (const std::bad_alloc&) {
        done = false;
        ++failures;
      }
      if (!done) CHECK(copy(decoder.text()) == before);
      decoder.generate(expected.size() - decoder.text().size());
      CHECK(copy(decoder.text()) == expected);
      const LevelStatistics& counted = decoder.statistics();
      CHECK(counted.tokens == 12);
      CHECK(counted.tokens == counted.verifications + counted.accepted);
    }
    CHECK(failures > 10);
  };
  const auto runs_out = [&](auto make_draft) {
    runs_out_in(make_draft, 0);
    runs_out_in(make_draft, 1);
  };
  runs_out([](Pair& p) { return p.small_draft(); });
  runs_out([](Pair& p) { return p.hierarchy(2); });
  runs_out([](Pair& p) { return test::Selected<NgramDraft>{p.target, p.cache, NgramDraft{}, {2, false}}; });
  runs_out([](Pair& p) { return p.tree({text, text, 0, 1, 3}); });
  runs_out([](Pair& p) {
    p.small = p.target.like(1, 0.0F);  // its draft tokens are accepted
    return p.tree({text, text, 0, 2});
  });
  runs_out([](Pair& p) {
    return test::Selected<test::Tree>{p.target, p.cache, p.tree({text, text, 0}), {3, false}};
  });
}

TEST_CASE("a tree draft that ran out of memory can then draft for any text") {
  const std::vector<std::size_t> parents{TokenTree::text, TokenTree::text, 0, 2, 3};
  std::size_t failures = 0;
  bool done = false;
  for (std::size_t successes = 0; !done; ++successes) {
    REQUIRE(successes < 2000);
    CAPTURE(successes);
    test::Pair pair;
    test::Tree draft = pair.tree(parents);
    Random random;
    DraftTokens guesses;
    done = true;
    try {
      const test::FailNew fail{successes};
      draft.propose(pair.prompt, 5, {}, random, guesses);
    } catch (const std::bad_alloc&) {
      done = false;
      ++failures;
    }
    // As if some of its draft tokens had been accepted.
    const std::vector<int> text = test::plain_greedy(pair.small, pair.prompt, 4);
    draft.propose(text, 5, {}, random, guesses);
    test::Pair fresh;
    DraftTokens expected;
    fresh.tree(parents).propose(text, 5, {}, random, expected);
    REQUIRE(guesses.size() == expected.size());
    for (std::size_t i = 0; i < guesses.size(); ++i) {
      CHECK(guesses[i].token == expected[i].token);
      CHECK(guesses[i].parent == expected[i].parent);
    }
  }
  CHECK(failures > 10);
}
