// SPDX-License-Identifier: Apache-2.0
//
// Faults of models, drafts and memory at every call of a decoder: each must be a named error, the text
// must stay unchanged, and later tokens must be those of a run without the fault.
#include <cstddef>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/decoder.hpp>

#include "decoding.hpp"

using namespace kvpolicy;
using test::copy;
using test::Decoder;
using test::Fault;
using test::fixed;
using test::Pair;
using test::plain_greedy;
using test::Selected;
using test::Small;
using test::TableModel;
using test::Tree;

namespace {

constexpr std::size_t text = TokenTree::text;
constexpr std::size_t wanted = 30;

enum class Where { target, small };

/// Decodes with one fault; exactly the step in which it occurs must throw the expected error.
template <class MakeDraft>
void survives(const MakeDraft& make_draft, Where where, const Fault& fault) {
  Pair pair;
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, wanted);
  auto draft = make_draft(pair);
  auto options = fixed(4);
  options.prompt_chunk = 2;
  Decoder<decltype(draft)> decoder{pair.target, pair.cache, std::move(draft), options};
  TableModel& faulty = where == Where::target ? pair.target : pair.small;
  faulty.fault = fault;
  std::size_t thrown = 0;
  const auto is_named = [&](auto&& call) {
    try {
      call();
    } catch (const ShapeError&) {
      ++thrown;
      CHECK((fault.kind == Fault::Kind::nan || fault.kind == Fault::Kind::infinite ||
             fault.kind == Fault::Kind::too_few_logits));
    } catch (const std::bad_alloc&) {
      ++thrown;
      CHECK(fault.kind == Fault::Kind::no_memory);
    } catch (const std::runtime_error&) {
      ++thrown;
      CHECK((fault.kind == Fault::Kind::throws_before || fault.kind == Fault::Kind::throws_half_way));
    }
  };
  is_named([&] { decoder.read_prompt(pair.prompt); });
  CHECK(copy(decoder.text()) == pair.prompt);
  while (decoder.text().size() < expected.size() && thrown < 3) {
    const std::vector<int> before = copy(decoder.text());
    const std::size_t already = thrown;
    is_named([&] { (void)decoder.step(expected.size() - before.size()); });
    if (thrown > already) CHECK(copy(decoder.text()) == before);
  }
  // Calls that request no logits cannot notice that they are missing.
  const bool silent = fault.kind != Fault::Kind::throws_before &&
                      fault.kind != Fault::Kind::throws_half_way && fault.kind != Fault::Kind::no_memory;
  const bool came = faulty.calls(fault.read) > fault.call;
  const bool prompt = fault.call < 2 && fault.read == Read::all && where == Where::target;
  CHECK(thrown == (came && !(silent && prompt) ? 1 : 0));
  CHECK(copy(decoder.text()) == expected);
  CHECK(pair.cache.tokens() + 1 == expected.size());
  const LevelStatistics& counted = decoder.statistics();
  CHECK(counted.tokens == wanted);
  CHECK(counted.tokens == counted.verifications + counted.accepted);
}

constexpr Fault::Kind kinds[] = {Fault::Kind::nan,           Fault::Kind::infinite,
                                 Fault::Kind::throws_before, Fault::Kind::throws_half_way,
                                 Fault::Kind::no_memory,     Fault::Kind::too_few_logits};

template <class MakeDraft>
void survives_all(const MakeDraft& make_draft, Where where, Read read) {
  for (const Fault::Kind kind : kinds) {
    for (std::size_t call = 0; call < 12; ++call) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(call);
      survives(make_draft, where, {kind, call, read});
    }
  }
}

}  // namespace

TEST_CASE("the target fails at any call") {
  const auto hierarchy = [](Pair& p) { return p.hierarchy(2); };
  survives_all(hierarchy, Where::target, Read::all);
  survives_all(hierarchy, Where::target, Read::selected);
  survives_all([](Pair& p) { return p.tree({text, text, 0, 1, 3}); }, Where::target, Read::all);
  survives_all([](Pair& p) { return p.small_draft(); }, Where::target, Read::all);
  const auto tree_inside = [](Pair& p) {
    return Selected<Tree>{p.target, p.cache, p.tree({text, text, 0}), {3, false}};
  };
  survives_all(tree_inside, Where::target, Read::all);
  survives_all(tree_inside, Where::target, Read::selected);
}

TEST_CASE("the small model fails at any call: alone, as an inner draft, and as a tree") {
  survives_all([](Pair& p) { return p.small_draft(); }, Where::small, Read::all);
  survives_all([](Pair& p) { return p.hierarchy(3); }, Where::small, Read::all);
  survives_all([](Pair& p) { return p.tree({text, text, 0, 1, 3}); }, Where::small, Read::all);
  survives_all(
      [](Pair& p) { return Selected<Tree>{p.target, p.cache, p.tree({text, text, 0, 2}), {4, false}}; },
      Where::small, Read::all);
}

TEST_CASE("repeated faults do not add up") {
  Pair pair;
  const std::vector<int> expected = plain_greedy(pair.target, pair.prompt, wanted);
  Decoder<Selected<Small>> decoder{pair.target, pair.cache, pair.hierarchy(2), fixed(4)};
  decoder.read_prompt(pair.prompt);
  std::size_t failed = 0;
  for (std::size_t round = 0; decoder.text().size() < expected.size(); ++round) {
    REQUIRE(round < 1000);
    TableModel& faulty = round % 2 == 0 ? pair.target : pair.small;
    const Read read = round % 4 == 0 ? Read::selected : Read::all;
    faulty.fault = Fault{kinds[round % 6], faulty.calls(read) + round % 3, read};
    const std::vector<int> before = copy(decoder.text());
    try {
      (void)decoder.step(expected.size() - before.size());
    } catch (const std::exception& error) {
      CHECK(dynamic_cast<const test::BrokenRule*>(&error) == nullptr);
      CHECK(copy(decoder.text()) == before);
      ++failed;
    }
    faulty.fault.reset();
  }
  CHECK(failed > 5);
  CHECK(copy(decoder.text()) == expected);
}

TEST_CASE("the next step, or the next prompt, reads the rest of a failed prompt in chunks") {
  for (const bool by_step : {true, false}) {
    CAPTURE(by_step);
    Pair pair;
    std::vector<int> prompt;
    for (int i = 0; i < 40; ++i) prompt.push_back(i * 7 % 6);
    const std::vector<int> expected = plain_greedy(pair.target, prompt, 20);
    auto options = fixed(4);
    options.prompt_chunk = 8;
    Decoder<Tree> decoder{pair.target, pair.cache, pair.tree({text, text, 0, 1}), options};
    pair.target.fault = Fault{Fault::Kind::throws_half_way, 1};
    CHECK_THROWS_AS(decoder.read_prompt(prompt), std::runtime_error);
    CHECK(copy(decoder.text()) == prompt);
    CHECK(pair.cache.tokens() == 8);
    std::vector<test::CallRecord> calls;
    pair.target.records = &calls;
    if (by_step) {
      (void)decoder.step(1);
    } else {
      decoder.read_prompt({});
    }
    REQUIRE(calls.size() >= 4);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(calls[i].tokens == (i < 3 ? 8 : 7));
      CHECK_FALSE(calls[i].refresh_selection);  // the step that reads the last token selects
    }
    decoder.generate(expected.size() - decoder.text().size());
    CHECK(copy(decoder.text()) == expected);
  }
}

TEST_CASE("rows that could not be taken back cause an error and are not used") {
  Pair pair;
  Decoder<Small> decoder{pair.target, pair.cache, pair.small_draft(), fixed(4)};
  decoder.read_prompt(pair.prompt);
  // Other code writes to the cache, more rows than it can take back.
  const std::vector<int> foreign(40, 1);
  (void)pair.target.read(pair.cache, {.tokens = foreign});
  CHECK_THROWS_AS(decoder.step(), RollbackError);
  CHECK(decoder.ending() == Ending::open);
  CHECK(copy(decoder.text()) == pair.prompt);
}
