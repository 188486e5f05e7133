// SPDX-License-Identifier: Apache-2.0
//
// When the ChunkRetrieval heads of a decoder's cache choose a new selection, and by which token's
// query.
#include <algorithm>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/decoder.hpp>

#include "decoding.hpp"

using namespace kvpolicy;
using test::copy;
using test::Decoder;
using test::fixed;
using test::Pair;
using test::plain_greedy;
using test::Selected;
using test::Small;
using test::TableModel;
using test::Tree;

namespace {

constexpr std::size_t text = TokenTree::text;

SpeculationOptions with(RefreshRule rule, std::size_t length = 4) {
  SpeculationOptions options = fixed(length, {.temperature = 1.0F});
  options.refresh_selection = rule;
  return options;
}

std::vector<test::CallRecord> refreshing(const std::vector<test::CallRecord>& calls) {
  std::vector<test::CallRecord> result;
  std::ranges::copy_if(calls, std::back_inserter(result), &test::CallRecord::refresh_selection);
  return result;
}

// The prompt is read without a selection. In the step that reads its last token, the first selected
// read (if there are any) selects by that token for the other selected reads, and the target's pass
// then makes the lasting selection by the same token.
template <class D>
void chooses_by_the_prompts_last_token(Pair& pair, Decoder<D>& decoder, const std::vector<int>& prompt) {
  std::vector<test::CallRecord>* const outer = pair.target.records;
  std::vector<test::CallRecord> calls;
  pair.target.records = &calls;
  const std::size_t before = pair.cache.chosen_at();
  const std::size_t refreshes = decoder.refreshes();
  decoder.read_prompt(prompt);
  CHECK(refreshing(calls).empty());
  CHECK(pair.cache.chosen_at() == before);
  calls.clear();
  const std::size_t length = decoder.text().size();
  (void)decoder.step();
  REQUIRE_FALSE(calls.empty());
  CHECK(calls.back().read == Read::all);
  for (const test::CallRecord& call : calls) {
    CHECK(call.refresh_selection == (&call == &calls.front() || &call == &calls.back()));
    if (!call.refresh_selection) continue;
    REQUIRE(call.selection_query.has_value());
    CHECK(call.seen + *call.selection_query == length - 1);  // the prompt's last token
  }
  CHECK(pair.cache.chosen_at() == length);
  CHECK(decoder.refreshes() == refreshes);  // it counts those since the prompt
  pair.target.records = outer;
}

// Makes `rounds` steps and checks the selection after each.
template <class D>
void chooses_every(Pair& pair, Decoder<D>& decoder, std::size_t every, std::size_t rounds) {
  chooses_by_the_prompts_last_token(pair, decoder, pair.prompt);
  std::vector<test::CallRecord> calls;
  pair.target.records = &calls;
  std::size_t chosen = decoder.text().size();  // length of the text after the last selection
  std::size_t choices = 0;
  for (std::size_t round = 0; round < rounds; ++round) {
    calls.clear();
    const std::size_t before = decoder.text().size();
    const bool due = before - chosen >= every;
    (void)decoder.step();
    for (const test::CallRecord& call : calls) {
      CHECK(call.refresh_selection == (due && call.read == Read::all));
      // By the text's last token, which no verification takes back.
      if (call.read == Read::all) CHECK(call.selection_query == before - 1 - call.seen);
    }
    if (due) {
      CHECK(pair.cache.chosen_at() == before);
      chosen = decoder.text().size();
      ++choices;
    }
    CHECK(pair.cache.chosen_at() <= pair.cache.tokens());
    CHECK(decoder.refreshes() == choices);
  }
  CHECK(choices > 3);
}

}  // namespace

TEST_CASE("every n tokens the verification selects, by the text's last token") {
  for (const std::size_t every : std::vector<std::size_t>{1, 7, 20}) {
    CAPTURE(every);
    const RefreshRule rule{.every = every, .below_acceptance = 0.0};
    Pair alone;
    Decoder<Selected<>> self{alone.target, alone.cache, Selected<>{alone.target, alone.cache}, with(rule)};
    chooses_every(alone, self, every, 60);
    Pair small;
    Decoder<Small> run{small.target, small.cache, small.small_draft(), with(rule)};
    chooses_every(small, run, every, 60);
    Pair branching;
    Decoder<Tree> tree{branching.target, branching.cache, branching.tree({text, text, 0, 1, 2}), with(rule)};
    chooses_every(branching, tree, every, 60);
  }
}

TEST_CASE("without a rule only the prompt's selection is made; later turns select again") {
  Pair pair;
  std::vector<test::CallRecord> calls;
  pair.target.records = &calls;
  Decoder<Selected<Small>> decoder{pair.target, pair.cache, pair.hierarchy(),
                                   with({.every = 0, .below_acceptance = 0.0})};
  chooses_by_the_prompts_last_token(pair, decoder, pair.prompt);
  decoder.generate(200);
  CHECK(refreshing(calls).empty());
  CHECK(decoder.refreshes() == 0);
  CHECK(pair.cache.chosen_at() == 5);
  chooses_by_the_prompts_last_token(pair, decoder, {1, 2, 3});
  decoder.read_prompt({});  // nothing to read, and no token to select by
  (void)decoder.step();
  CHECK(refreshing(calls).empty());
}

TEST_CASE("a fork that is continued selects by its last token too") {
  Pair pair;
  Decoder<NoDraft> first{pair.target, pair.cache, NoDraft{}, with({})};
  first.read_prompt(pair.prompt);
  Decoder<Selected<>> decoder{pair.target, pair.cache, Selected<>{pair.target, pair.cache}, with({})};
  decoder.continue_text(pair.prompt);
  std::vector<test::CallRecord> calls;
  pair.target.records = &calls;
  (void)decoder.step();
  CHECK(pair.cache.chosen_at() == pair.prompt.size());
  CHECK(refreshing(calls).size() == 2);
  CHECK(calls.front().seen + *calls.front().selection_query == pair.prompt.size() - 1);
}

TEST_CASE("a turn without tokens does not delay a selection that is due") {
  Pair pair;
  Decoder<Small> decoder{pair.target, pair.cache, pair.small_draft(),
                         with({.every = 4, .below_acceptance = 0.0})};
  decoder.read_prompt(pair.prompt);
  (void)decoder.step();
  const std::size_t chosen = decoder.text().size();
  while (decoder.text().size() < chosen + 4) (void)decoder.step();
  const std::size_t length = decoder.text().size();
  decoder.read_prompt({});
  (void)decoder.step();
  CHECK(decoder.refreshes() == 1);
  CHECK(pair.cache.chosen_at() == length);
}

TEST_CASE("after a prompt of one token the first verification selects") {
  Pair pair;
  Decoder<Selected<>> decoder{pair.target, pair.cache, Selected<>{pair.target, pair.cache},
                              with({.every = 0, .below_acceptance = 0.0})};
  decoder.read_prompt(std::vector<int>{2});
  CHECK(pair.cache.chosen_at() == 0);
  (void)decoder.step();
  CHECK(pair.cache.chosen_at() == 1);
  decoder.generate(50);
  CHECK(pair.cache.chosen_at() == 1);
}

TEST_CASE("a step that failed has not selected; the next one does") {
  Pair pair;
  Decoder<Small> decoder{pair.target, pair.cache, pair.small_draft(),
                         with({.every = 1, .below_acceptance = 0.0})};
  decoder.read_prompt(pair.prompt);
  pair.target.fault = test::Fault{test::Fault::Kind::nan, pair.target.calls()};
  CHECK_THROWS_AS(decoder.step(), ShapeError);
  CHECK(pair.cache.chosen_at() == 0);
  (void)decoder.step();
  CHECK(pair.cache.chosen_at() == pair.prompt.size());  // the prompt's selection
  (void)decoder.step();
  const std::size_t length = decoder.text().size();
  const std::size_t chosen = pair.cache.chosen_at();
  pair.target.fault = test::Fault{test::Fault::Kind::nan, pair.target.calls()};
  CHECK_THROWS_AS(decoder.step(), ShapeError);
  CHECK(pair.cache.chosen_at() == chosen);
  CHECK(decoder.refreshes() == 0);
  (void)decoder.step();
  CHECK(pair.cache.chosen_at() == length);
  CHECK(decoder.refreshes() == 1);
}

TEST_CASE("if acceptance falls, a new selection is made, but not too soon") {
  // A selection is good for 20 tokens, and then misleads.
  const auto decoded = [](RefreshRule rule) {
    Pair pair;
    pair.target = TableModel{6, 33, 2.0F, 0.1F};
    pair.target.fresh_for = 20;
    std::vector<test::CallRecord> calls;
    pair.target.records = &calls;
    Decoder<Selected<>> decoder{pair.target, pair.cache, Selected<>{pair.target, pair.cache}, with(rule)};
    decoder.read_prompt(pair.prompt);
    decoder.generate(1200);
    auto choices = refreshing(calls);
    std::erase_if(choices, [](const test::CallRecord& call) { return call.read == Read::selected; });
    for (std::size_t i = 1; i < choices.size(); ++i) {
      CHECK(choices[i].seen - choices[i - 1].seen >= rule.min_tokens);
    }
    return std::pair{decoder.refreshes(), decoder.statistics().acceptance()};
  };
  const auto [never, poor] = decoded({.every = 0, .below_acceptance = 0.0});
  CHECK(never == 0);
  const auto [often, good] = decoded({.every = 0, .below_acceptance = 0.7, .min_tokens = 8});
  CHECK(often > 20);
  CHECK(good > poor + 0.15);
  const auto [seldom, between] = decoded({.every = 0, .below_acceptance = 0.7, .min_tokens = 100});
  CHECK(seldom >= 1);
  CHECK(seldom <= 12);
  CHECK(between < good);
}
