// SPDX-License-Identifier: Apache-2.0
//
// Compares the draft tokens with a search through the text from its end, over random texts that grow
// and shrink.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/speculation/ngram_draft.hpp>

using namespace kvpolicy;

namespace {

using Text = std::vector<int>;

// The definition: from the longest n-gram to the shortest, and from the text's end to its beginning.
Text oracle(const Text& text, std::size_t most_guesses, const NgramDraftConfig& config) {
  for (std::size_t n = config.max_ngram; n >= config.min_ngram; --n) {
    for (std::size_t end = text.size(); end-- > n;) {  // an occurrence that ends before `end`
      if (!std::equal(text.end() - static_cast<std::ptrdiff_t>(n), text.end(),
                      text.begin() + static_cast<std::ptrdiff_t>(end - n))) {
        continue;
      }
      Text longer = text;
      for (std::size_t i = 0; i < most_guesses; ++i) longer.push_back(longer[end + i]);
      return {longer.begin() + static_cast<std::ptrdiff_t>(text.size()), longer.end()};
    }
  }
  return {};
}

Text proposed(NgramDraft& draft, const Text& text, std::size_t most) {
  Random random;
  DraftTokens guesses(3);  // overwritten
  draft.propose(text, most, {}, random, guesses);
  CHECK(is_chain(guesses));
  Text tokens;
  for (const DraftToken& guess : guesses) {
    CHECK(guess.from == Distribution::certain(guess.token));
    CHECK(guess.level == 0);
    tokens.push_back(guess.token);
  }
  return tokens;
}

}  // namespace

TEST_CASE("what followed before is proposed again") {
  NgramDraft draft;
  CHECK(proposed(draft, {1, 2, 3, 4, 5, 9, 1, 2, 3}, 2) == Text{4, 5});
  // The longest n-gram counts, then its latest occurrence.
  CHECK(proposed(draft, {7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2}, 1) == Text{3});
  CHECK(proposed(draft, {7, 1, 2, 3, 8, 1, 2, 4, 6, 1, 2}, 1) == Text{4});
  // It continues with its own draft tokens.
  CHECK(proposed(draft, {5, 6, 7, 5, 6}, 7) == Text{7, 5, 6, 7, 5, 6, 7});
  CHECK(proposed(draft, {3, 3, 3}, 4) == Text{3, 3, 3, 3});
  // There is no earlier occurrence yet.
  CHECK(proposed(draft, {1, 2, 3, 4}, 4).empty());
  CHECK(proposed(draft, {1}, 4).empty());
  CHECK(proposed(draft, {1, 1}, 4).empty());
  CHECK(proposed(draft, {1, 2, 3, 1, 2}, 0).empty());
  NgramDraft single{{.max_ngram = 1, .min_ngram = 1}};
  CHECK(proposed(single, {1, 1}, 2) == Text{1, 1});
  CHECK(proposed(single, {-1, std::numeric_limits<int>::max(), -1}, 2) ==
        Text{std::numeric_limits<int>::max(), -1});
}

TEST_CASE("any history of texts: the draft tokens are those of a search") {
  for (unsigned seed = 1; seed <= 24; ++seed) {
    CAPTURE(seed);
    std::mt19937 random{seed};
    const std::size_t least = 1 + random() % 3;
    const NgramDraftConfig config{.max_ngram = least + random() % 4, .min_ngram = least};
    const int words = std::vector{1, 2, 3, 8, 50}[random() % 5];
    NgramDraft draft{config};
    Text text;
    std::size_t guessed = 0;
    for (int call = 0; call < 120; ++call) {
      switch (random() % 6) {
        case 0:  // it shrinks, a little or a lot
          text.resize(text.size() - random() % (1 + std::min<std::size_t>(text.size(), 9)));
          break;
        case 1:
          if (random() % 8 == 0) text.resize(random() % (text.size() + 1));
          break;
        case 2:  // another text, or one other token
          if (!text.empty() && random() % 4 == 0) {
            text[random() % text.size()] = static_cast<int>(random()) % words;
          }
          break;
        case 3:  // a part is repeated
          if (!text.empty()) {
            const std::size_t first = random() % text.size();
            const std::size_t last = std::min(text.size(), first + random() % 12);
            const Text part(text.begin() + static_cast<std::ptrdiff_t>(first),
                            text.begin() + static_cast<std::ptrdiff_t>(last));
            text.insert(text.end(), part.begin(), part.end());
          }
          break;
        default:
          for (std::size_t i = random() % 10; i > 0; --i) {
            text.push_back(static_cast<int>(random() % static_cast<unsigned>(words)));
          }
      }
      if (text.empty()) text.push_back(0);
      if (random() % 40 == 0) draft = NgramDraft{draft};  // a copy continues like its original
      const std::size_t most = 1 + random() % 12;
      const Text guesses = proposed(draft, text, most);
      CHECK(guesses == oracle(text, most, config));
      guessed += guesses.size();
    }
    CHECK(guessed > 0);
  }
}

TEST_CASE("a long text: through every size of the tables, and back to the beginning") {
  std::mt19937 random{77};
  const NgramDraftConfig config;
  NgramDraft draft{config};
  Text text;
  for (int i = 0; i < 6000; ++i) text.push_back(static_cast<int>(random() % 30));
  for (std::size_t size = 2; size <= text.size(); size += 1 + random() % 97) {
    const Text part(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
    REQUIRE(proposed(draft, part, 3) == oracle(part, 3, config));
  }
  for (std::size_t size = text.size(); size > 2; size -= std::min(size - 2, 1 + random() % 97)) {
    const Text part(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
    REQUIRE(proposed(draft, part, 3) == oracle(part, 3, config));
  }
  // One token differs somewhere, and all tokens after it stay.
  NgramIndex index;
  index.update(text);
  for (const std::size_t changed : {0u, 1u, 1023u, 1024u, 1025u, 2047u, 2048u, 3500u, 5999u}) {
    text[changed] += 100;
    CAPTURE(changed);
    REQUIRE(proposed(draft, text, 3) == oracle(text, 3, config));
    index.update(text);
    REQUIRE(std::ranges::equal(index.text(), text));
  }
}

TEST_CASE("the index holds the text that it got, and forgets n-grams that were removed") {
  NgramIndex index{{.max_ngram = 2, .min_ngram = 2}};
  CHECK_FALSE(index.continuation());
  index.update(Text{1, 2, 9, 1, 2});
  CHECK(index.continuation() == 2);
  CHECK(std::ranges::equal(index.text(), Text{1, 2, 9, 1, 2}));
  index.update(Text{1, 2});
  CHECK_FALSE(index.continuation());
  index.update(Text{1, 2, 1, 2});
  CHECK(index.continuation() == 2);
  index.update({});
  CHECK(index.text().empty());
  CHECK_FALSE(index.continuation());
}
