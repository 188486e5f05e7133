// SPDX-License-Identifier: Apache-2.0
//
// Memory that cannot be had, at every place where it is asked for.
#include <algorithm>
#include <cstddef>
#include <new>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/speculation/ngram_draft.hpp>

#include "support/failing_new.hpp"

using namespace kvpolicy;

TEST_CASE("an index of n-grams that gets no memory is as it was, and goes on") {
  std::mt19937 random{31};
  std::vector<int> text(700);
  for (int& token : text) token = static_cast<int>(random() % 4);
  const std::vector<int> all = text;
  text.resize(200);

  struct Case {
    std::size_t size;  // 250 fits the tables of 200, 700 does not
    bool copied;       // a copy has no room to spare in the rest
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

TEST_CASE("a copied index takes tokens back and adds as many without asking for memory") {
  NgramIndex index;
  std::vector<int> text(300, 1);
  index.update(text);
  text.resize(290);
  index.update(text);
  NgramIndex copy = index;
  text.resize(295, 2);
  copy.update(text);  // makes room here
  text.resize(500, 1);
  {
    const test::FailNew fail{0};
    copy.update(text);
  }
  CHECK(std::ranges::equal(copy.text(), text));
}
