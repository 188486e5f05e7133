// SPDX-License-Identifier: Apache-2.0
//
// Speculative sampling is lossless: for every structure of drafts, runs of three tokens must have the
// probabilities that the target alone gives them.
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/model_draft.hpp>
#include <kvpolicy/speculation/ngram_draft.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>
#include <kvpolicy/speculation/tree_draft.hpp>

#include "lossless.hpp"
#include "table_model.hpp"

using namespace kvpolicy;
using test::Bench;
using test::p_of_runs;
using test::TableCache;
using test::TableModel;

namespace {

constexpr std::size_t text = TokenTree::text;

const TableModel target{4, 11};
const TableModel small = target.like(12, 1.0F);
const TableModel wide_target{6, 21};
const TableModel wide_small = wide_target.like(22, 1.0F);

using Small = ModelDraft<TableModel, TableCache>;
using Tree = TreeDraft<TableModel, TableCache>;
template <class Inner>
using Selected = SelectedDraft<TableModel, TableCache, Inner>;

auto draft_only() {
  return [](Bench& b) { return Small{b.small, b.small_cache}; };
}
auto self_speculation() {
  return [](Bench& b) { return Selected<NoDraft>{b.target, b.cache}; };
}
auto hierarchy(std::size_t inner_length) {
  return [=](Bench& b) {
    return Selected<Small>{b.target, b.cache, Small{b.small, b.small_cache}, {inner_length, false}};
  };
}
auto tree(std::vector<std::size_t> parents) {
  return [=](Bench& b) { return Tree{b.small, b.small_cache, TokenTree{parents}}; };
}
auto tree_in_hierarchy(std::vector<std::size_t> parents) {
  return [=](Bench& b) {
    return Selected<Tree>{
        b.target, b.cache, Tree{b.small, b.small_cache, TokenTree{parents}}, {parents.size(), false}};
  };
}

/// Proposes tokens with certainty, like a search in the text, but is wrong more often: it proposes the
/// token number after the latest one. Sometimes it proposes none.
struct CertainDraft {
  static std::size_t vocabulary() { return 0; }
  static void propose(std::span<const int> tokens, std::size_t most, const SamplingOptions&, Random&,
                      DraftTokens& guesses) {
    guesses.clear();
    int last = tokens.back();
    if (tokens.size() % 5 == 0) return;
    while (guesses.size() < most) {
      last = (last + 1) % 4;
      guesses.push_back({last, Distribution::certain(last), guesses.empty() ? text : guesses.size() - 1});
    }
  }
};

/// Draws siblings independently, so they may be equal (SpecInfer), each with one child.
struct IndependentDraft {
  static std::size_t vocabulary() { return 0; }
  static void propose(std::span<const int> tokens, std::size_t most, const SamplingOptions& sampling,
                      Random& random, DraftTokens& guesses) {
    guesses.clear();
    const Distribution first = distribution_of(target.logits(tokens.back(), tokens.back()), sampling);
    for (std::size_t i = 0; i + 1 < most; i += 2) {
      guesses.push_back({first.draw(random.uniform()), first});
      const Distribution second =
          distribution_of(small.logits(tokens.back(), guesses.back().token), sampling);
      guesses.push_back({second.draw(random.uniform()), second, guesses.size() - 1});
    }
  }
};

constexpr double least = 0.001;

}  // namespace

TEST_CASE("a draft model: runs of tokens are the target's, at every length and sampling setting") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 1}, draft_only()) > least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F}, .length = 2}, draft_only()) > least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F, .top_p = 0.8F}, .length = 3},
                  draft_only()) > least);
  CHECK(p_of_runs(wide_target, wide_small, {.sampling = {.temperature = 0.7F, .top_k = 3}, .length = 5},
                  draft_only()) > least);
}

TEST_CASE("the target over selected rows as its own draft") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 2}, self_speculation()) >
        least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F, .top_p = 0.8F}, .length = 5},
                  self_speculation()) > least);
}

TEST_CASE("three levels, with several lengths of the inner draft") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3}, hierarchy(1)) > least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F, .top_p = 0.8F}, .length = 5},
                  hierarchy(2)) > least);
  CHECK(p_of_runs(wide_target, wide_small, {.sampling = {.temperature = 1.0F, .top_k = 3}, .length = 5},
                  hierarchy(3)) > least);
  // One text for each run: only the next three tokens after a prompt.
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 2}, hierarchy(2), 1) > least);
}

TEST_CASE("draft tokens without a model, each certain, alone and verified over selected rows") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3},
                  [](Bench&) { return CertainDraft{}; }) > least);
  CHECK(
      p_of_runs(target, small, {.sampling = {.temperature = 1.0F, .top_p = 0.8F}, .length = 5}, [](Bench& b) {
        return Selected<CertainDraft>{b.target, b.cache, CertainDraft{}, {2, false}};
      }) > least);
}

TEST_CASE("n-grams of the text itself, alone and verified over selected rows") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F}, .length = 5},
                  [](Bench&) { return NgramDraft{}; }) > least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F, .top_k = 3}, .length = 3}, [](Bench& b) {
          return Selected<NgramDraft>{b.target, b.cache, NgramDraft{}, {3, false}};
        }) > least);
}

TEST_CASE("trees of several shapes, siblings drawn without replacement") {
  // Three nodes at the root; two levels of two; one long branch among short ones.
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3}, tree({text, text, text})) >
        least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F, .top_p = 0.8F}, .length = 6},
                  tree({text, text, 0, 0, 1, 1})) > least);
  CHECK(p_of_runs(wide_target, wide_small, {.sampling = {.temperature = 1.0F, .top_k = 3}, .length = 8},
                  tree({text, text, text, 0, 0, 1, 3, 6})) > least);
  // More siblings than there are tokens to draw, and fewer draft tokens than the shape has nodes.
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F, .top_k = 2}, .length = 5},
                  tree({text, text, text, text, 0, 1, 1})) > least);
}

TEST_CASE("siblings drawn independently, which may be the same token") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 6},
                  [](Bench&) { return IndependentDraft{}; }) > least);
}

TEST_CASE("three levels with a tree as inner draft") {
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 1.0F}, .length = 3},
                  tree_in_hierarchy({text, text, 0})) > least);
  CHECK(p_of_runs(target, small, {.sampling = {.temperature = 0.7F, .top_p = 0.8F}, .length = 5},
                  tree_in_hierarchy({text, text, 0, 0, 1})) > least);
}
