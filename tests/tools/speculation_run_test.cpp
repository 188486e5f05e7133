// SPDX-License-Identifier: Apache-2.0
#include <common/speculative_text.hpp>
#include <generate/speculation_run.hpp>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <reference_model/llama.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

// A random model of 64 tokens, which is its own small model.
const reference::Llama& model() {
  static const auto loaded = reference::Llama::load("tests/model/goldens/gqa2_d80");
  return loaded;
}

SpeculationSetup setup_of(Structure structure) {
  SpeculationSetup setup;
  setup.structure = structure;
  setup.options.length = 4;
  setup.options.adapt = false;
  return setup;
}

std::vector<int> prompt() {
  std::vector<int> tokens;
  for (int i = 0; i < 90; ++i) tokens.push_back((i * 7 + i / 5) % 64);
  return tokens;
}

}  // namespace

TEST_CASE("the numbers that a run reports add up") {
  for (const NamedStructure& s : structures()) {
    CAPTURE(s.name);
    SpeculativeText text{model(), &model(), setup_of(s.structure)};
    SpeculationTurn first;
    first.prompt = prompt();
    first.most_new = 40;
    SpeculationTurn second;
    second.prompt = {1, 2, 3};
    second.most_new = 17;
    std::size_t seen = 0;
    std::vector<std::size_t> begun;
    std::vector<std::size_t> ended;
    const SpeculationResult result =
        run_speculation(text, {first, second}, true,
                        {.begins = [&](std::size_t turn) { begun.push_back(turn); },
                         .token = [&](const NewToken&) { ++seen; },
                         .ends = [&](std::size_t turn) { ended.push_back(turn); }});
    CHECK(result.tokens == 57);
    CHECK(result.plain_tokens == 57);
    CHECK(seen == 57);
    CHECK(begun == std::vector<std::size_t>{0, 1});
    CHECK(ended == begun);
    CHECK(result.endings == std::vector<Ending>{Ending::length, Ending::length});
    CHECK(result.tokens_of_turn(0).size() == 40);
    CHECK(result.tokens_of_turn(1).size() == 17);
    CHECK(text.text().size() == 90 + 3 + 57);

    // Levels are compared with steps, which are counted in another way.
    REQUIRE(!result.levels.empty());
    const LevelReport& target = result.levels.front();
    CHECK(target.name == "target");
    CHECK(target.passes == result.steps.size());
    CHECK(target.tokens == 57);
    std::size_t from_others = 0;
    std::size_t guessed = 0;
    for (const SpeculationStep& step : result.steps) {
      guessed += step.guessed;
      for (const NewToken& token : step.tokens) from_others += token.level > 0;
    }
    CHECK(target.accepted == from_others);
    CHECK(guessed == text.guessed());
    CHECK(target.judged >= target.accepted);
    CHECK(result.levels.size() == text.proposers().size());
    const bool no_draft_cache = s.structure == Structure::plain || s.structure == Structure::self ||
                                s.structure == Structure::halves || s.structure == Structure::ngram;
    CHECK((text.draft_bytes() == 0) == no_draft_cache);
    CHECK(result.seconds > 0.0);
    CHECK(result.plain_seconds > 0.0);
    CHECK(result.speedup() == doctest::Approx(result.plain_seconds / 57 / (result.seconds / 57)));
    if (s.structure == Structure::plain) {
      CHECK(result.same_text);
      CHECK(std::isnan(target.acceptance()));
      CHECK(result.predicted_tokens_per_verification() == doctest::Approx(1.0));
    }
    if (s.structure == Structure::self || s.structure == Structure::triforce) {
      // The text is shorter than the budget, so the middle level reads what the target reads.
      CHECK(target.acceptance() > 0.5);
      CHECK(result.tokens_per_verification() > 2.0);
    }
  }
}

TEST_CASE("a fork continues like its origin, and does not change it") {
  for (const Structure structure : {Structure::triforce, Structure::draft, Structure::tree}) {
    CAPTURE(named(structure).name);
    SpeculativeText text{model(), &model(), setup_of(structure)};
    text.read(prompt());
    const auto fork = text.fork(setup_of(structure));
    while (fork->text().size() < 130) static_cast<void>(fork->step(130 - fork->text().size()));
    CHECK(text.text().size() == 90);
    while (text.text().size() < 130) static_cast<void>(text.step(130 - text.text().size()));
    CHECK(std::vector<int>(text.text().begin(), text.text().end()) ==
          std::vector<int>(fork->text().begin(), fork->text().end()));
  }
}

TEST_CASE("one reading of a prompt serves other selections, and drafts that read it under other plans") {
  SpeculativeText text{model(), nullptr, setup_of(Structure::plain)};
  text.read(prompt());
  SpeculationTurn turn;  // goes on after what was read
  turn.most_new = 40;
  const auto plain = text.fork(setup_of(Structure::plain));
  const auto expected = run_speculation(*plain, {turn}, false).tokens_of_turn(0);

  SpeculationSetup few = setup_of(Structure::self);
  few.chunk = 4;
  few.budget = 8;
  SpeculationSetup means = few;
  means.min_max = false;
  SpeculationSetup window = setup_of(Structure::streaming);
  window.sinks = 2;
  window.recent = 6;
  SpeculationSetup whole = setup_of(Structure::streaming);
  using Full = FullCache<DenseStorage<bfloat16>>;
  whole.draft_plan = HeadPlan<bfloat16>{model().config().shape(), Full::Config{}};
  for (const SpeculationSetup& setup : {few, means, window, whole}) {
    CAPTURE(setup.budget);
    CAPTURE(setup.draft_plan.has_value());
    const auto fork = text.fork(setup);
    const SpeculationResult result = run_speculation(*fork, {turn}, true);
    CHECK(result.same_text);
    const auto tokens = result.tokens_of_turn(0);
    REQUIRE(tokens.size() == expected.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) CHECK(tokens[i].token == expected[i].token);
    CHECK(result.levels.front().judged > 0);
    // A draft that reads what the target reads is hardly ever refused; one of 8 rows is.
    const bool all = setup.draft_plan.has_value();
    CHECK((result.levels.front().acceptance() > 0.9) == all);
  }
  CHECK(text.text().size() == 90);

  // A streaming draft gets its plan from the fork's setup, not from the text that it was forked from.
  const auto streaming = text.fork(window);
  const auto wide = streaming->fork(whole);
  CHECK(run_speculation(*wide, {turn}, true).levels.front().acceptance() > 0.9);
}

TEST_CASE("a turn ends after its stop text, wherever steps end") {
  SpeculativeText text{model(), nullptr, setup_of(Structure::plain)};
  SpeculationTurn turn;
  turn.prompt = prompt();
  turn.most_new = 30;
  const auto all = run_speculation(text, {turn}, false).tokens_of_turn(0);
  REQUIRE(all.size() == 30);
  for (const std::size_t at : {0U, 1U, 7U, 20U}) {
    const std::vector<int> stop{all[at].token, all[at + 1].token, all[at + 2].token};
    turn.stops = [&](std::span<const int> said) {
      return said.size() >= 3 && std::ranges::equal(said.last(3), stop);
    };
    std::size_t ends = 0;  // the first position where the three tokens occur
    while (all[ends].token != stop[0] || all[ends + 1].token != stop[1] || all[ends + 2].token != stop[2]) {
      ++ends;
    }
    for (const Structure structure : {Structure::plain, Structure::self}) {
      SpeculativeText other{model(), nullptr, setup_of(structure)};
      const auto result = run_speculation(other, {turn}, true);
      CHECK(result.tokens_of_turn(0).size() == ends + 3);
      CHECK(result.endings.front() == Ending::stop_token);
    }
  }
}

TEST_CASE("options that do not work are refused by name") {
  CHECK_THROWS_WITH_AS(static_cast<void>(structure_named("tri")),
                       doctest::Contains("triforce, self, halves, draft"), ConfigError);
  for (const NamedStructure& s : structures()) CHECK(structure_named(s.name) == s.structure);
  CHECK_THROWS_WITH_AS((SpeculativeText{model(), nullptr, setup_of(Structure::triforce)}),
                       doctest::Contains("triforce needs a small model"), ConfigError);
  SpeculativeText text{model(), nullptr, setup_of(Structure::self)};
  text.read(prompt());
  CHECK_THROWS_AS(static_cast<void>(text.fork(setup_of(Structure::draft))), ConfigError);
  CHECK(draft_folder_of("a/b/") == "a/b-draft");
}
