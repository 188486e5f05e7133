// SPDX-License-Identifier: Apache-2.0
//
// Shows that lossless_test.cpp would notice sampling that is not lossless: decoders that are wrong on
// purpose fail the same test beyond doubt. Also tests the tools of that test with known values.
#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/model_draft.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>
#include <kvpolicy/speculation/tree_draft.hpp>

#include "chi_square.hpp"
#include "lossless.hpp"
#include "table_model.hpp"

using namespace kvpolicy;
using test::Bench;
using test::p_of_runs;
using test::TableCache;
using test::TableModel;

namespace {

// The small model errs often, the selected rows seldom, so errors of the lower level show above.
const TableModel target{4, 11, 1.5F, 0.3F};
const TableModel small = target.like(12, 2.5F);

using Small = ModelDraft<TableModel, TableCache>;

/// Resamples like the published code of TriForce at its middle level: from p, and reports p.
struct PublishedResampling : SpeculativeSampling {
  static Distribution after_refusal(const Distribution& p, const Distribution&) { return p; }
};
/// Accepts a token a little too often.
struct TooEager : SpeculativeSampling {
  static bool accepts(const Distribution& p, const Distribution& q, int guess, Random& random) {
    return random.uniform() * q(guess) < 1.15 * p(guess);
  }
};
/// Draws siblings without replacement, but reports distributions with replacement.
struct ForgetsReplacement {
  TreeDraft<TableModel, TableCache> tree;
  [[nodiscard]] std::size_t vocabulary() const { return tree.vocabulary(); }
  void propose(std::span<const int> text, std::size_t most, const SamplingOptions& sampling, Random& random,
               DraftTokens& guesses) {
    tree.propose(text, most, sampling, random, guesses);
    for (DraftToken& guess : guesses) guess.from = guesses.front().from;
  }
};

template <class Rule>
auto hierarchy(std::size_t inner_length) {
  return [=](Bench& b) {
    return SelectedDraft<TableModel, TableCache, Small, Rule>{
        b.target, b.cache, Small{b.small, b.small_cache}, {inner_length, false}};
  };
}
auto draft_only() {
  return [](Bench& b) { return Small{b.small, b.small_cache}; };
}

constexpr double doubtless = 1e-6;

}  // namespace

TEST_CASE("the published resampling at the middle level is biased, and the test sees it") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3},
                  hierarchy<PublishedResampling>(1)) < doubtless);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F, .top_p = 0.8F}, .length = 5},
                  hierarchy<PublishedResampling>(2)) < doubtless);
}

TEST_CASE("accepting too often is seen at either level") {
  CHECK(p_of_runs<TooEager>(target, small, {.sampling = {.temperature = 1.0F}, .length = 3}, draft_only()) <
        doubtless);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3}, hierarchy<TooEager>(2)) <
        doubtless);
}

TEST_CASE("a draft that reports another distribution than it drew from is seen") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3}, [](Bench& b) {
          const std::vector<std::size_t> parents(3, TokenTree::text);
          return ForgetsReplacement{{b.small, b.small_cache, TokenTree{parents}}};
        }) < doubtless);
}

TEST_CASE("chi-square: values from tables") {
  using test::chi_square_p;
  CHECK(chi_square_p(3.841459, 1) == doctest::Approx(0.05).epsilon(1e-5));
  CHECK(chi_square_p(18.307038, 10) == doctest::Approx(0.05).epsilon(1e-5));
  CHECK(chi_square_p(23.209251, 10) == doctest::Approx(0.01).epsilon(1e-5));
  CHECK(chi_square_p(124.342113, 100) == doctest::Approx(0.05).epsilon(1e-5));
  CHECK(chi_square_p(1106.9690, 1000) == doctest::Approx(0.01).epsilon(1e-4));
  for (const double x : {0.0, 0.3, 1.0, 7.0, 60.0}) {
    CHECK(chi_square_p(x, 2) == doctest::Approx(std::exp(-x / 2.0)).epsilon(1e-9));
    CHECK(chi_square_p(x, 4) == doctest::Approx(std::exp(-x / 2.0) * (1.0 + x / 2.0)).epsilon(1e-9));
  }
  CHECK(chi_square_p(std::nan(""), 3) == 0.0);
}

TEST_CASE("temperature, top-k and top-p by their definitions") {
  const std::vector<float> logits{std::log(0.2F), std::log(0.5F), std::log(0.2F), std::log(0.1F)};
  const auto is = [&](const SamplingOptions& options, const std::vector<double>& expected) {
    const std::vector<double> share = test::shaped(logits, options);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      CHECK(share[i] == doctest::Approx(expected[i]).epsilon(1e-6));
    }
  };
  is({.temperature = 1.0F}, {0.2, 0.5, 0.2, 0.1});
  is({.temperature = 0.0F}, {0.0, 1.0, 0.0, 0.0});
  is({.temperature = 0.5F}, {0.04 / 0.34, 0.25 / 0.34, 0.04 / 0.34, 0.01 / 0.34});
  is({.temperature = 1.0F, .top_k = 2}, {2.0 / 7.0, 5.0 / 7.0, 0.0, 0.0});
  is({.temperature = 1.0F, .top_p = 0.6F}, {2.0 / 7.0, 5.0 / 7.0, 0.0, 0.0});
  is({.temperature = 1.0F, .top_p = 0.85F}, {2.0 / 9.0, 5.0 / 9.0, 2.0 / 9.0, 0.0});
  is({.temperature = 1.0F, .top_k = 3, .top_p = 0.5F}, {0.0, 1.0, 0.0, 0.0});
}

TEST_CASE("plain draws of the model pass, draws of a slightly different one do not") {
  const auto counted = [](const TableModel& source) {
    test::RunCounts counts{4};
    Random random{3};
    std::vector<int> text{1, 0, 2, 1};
    while (text.size() < 4 + 3 * test::wanted_samples) {
      const std::vector<double> share =
          test::shaped(source.logits(text[text.size() - 2], text.back()), {.temperature = 1.0F});
      double left = random.uniform();
      int token = 0;
      while (token < 3 && (left -= share[static_cast<std::size_t>(token)]) >= 0.0) ++token;
      text.push_back(token);
    }
    counts.add(text, 4, test::wanted_samples);
    return counts.p_value(target, {.temperature = 1.0F});
  };
  CHECK(counted(target) > 0.001);
  CHECK(counted(target.like(5, 0.3F)) < 1e-6);
}
