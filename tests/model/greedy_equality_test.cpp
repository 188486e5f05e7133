// SPDX-License-Identifier: Apache-2.0
//
// Greedy speculative decoding equals plain decoding token for token, with every kind of draft, over real
// models and caches. Plain decoding reads one token after another over caches that keep and show every row,
// and shares no code with the decoder. guessing.hpp says what is checked in a run.
#include <array>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/policy/full_cache.hpp>

#include "model/guessing.hpp"
#include "support/source_dir.hpp"

namespace kvpolicy::reference::greedy_equality_test {
namespace {

// Logits spread over several units. Rounding changes them by some 1e-5; where rows are bfloat16, some of
// which it rounds to a neighbour, by some 1e-3.
constexpr float float_tie = 2e-4F;
constexpr float bfloat16_tie = 0.02F;

struct Models {
  Llama target;
  Llama near;   // agrees often with the target
  Llama other;  // hardly ever agrees
};

// Vocabularies of 16 to 64, groups of 1 to 4, 1 to 3 layers.
Models models_of(std::size_t which) {
  constexpr std::array shapes{
      TinyShape{.vocabulary = 16, .hidden = 32, .layers = 1, .q_heads = 2, .kv_heads = 2},
      TinyShape{.vocabulary = 24, .hidden = 32, .layers = 2, .q_heads = 4, .kv_heads = 2},
      TinyShape{.vocabulary = 33, .hidden = 48, .layers = 3, .q_heads = 4, .kv_heads = 1},
      TinyShape{.vocabulary = 64, .hidden = 32, .layers = 2, .q_heads = 3, .kv_heads = 3, .head_dim = 80},
  };
  const TinyShape& shape = shapes[which % shapes.size()];
  TinyShape small = shape;
  small.layers = 1;
  const Llama target = tiny_llama(shape, 100 + which);
  return {target, with_noise(target, 0.06F, 200 + which), tiny_llama(small, 300 + which)};
}

template <Element E>
PlainText plain_text(const Llama& model, std::span<const int> prompt, std::size_t chunk, std::size_t tokens) {
  KvCache<E, CpuEngine> cache{HeadPlan<E>{model.config().shape()}, cache_options()};
  return decode_plainly(model, cache, prompt, chunk, tokens);
}

// One model and prompt, decoded plainly once.
template <Element E>
struct Text {
  Text(std::size_t which, std::size_t prompt_tokens, std::size_t tokens, std::size_t prompt_chunk = 64)
      : models{models_of(which)},
        prompt{random_text(models.target.config().vocabulary, prompt_tokens, 400 + which)},
        plain{plain_text<E>(models.target, prompt, prompt_chunk, tokens)} {}

  template <class Engine = CpuEngine>
  void compare(Ledger& ledger, const Setting& setting, bool near) const {
    CAPTURE(static_cast<int>(setting.guesser));
    CAPTURE(setting.length);
    WatchedReader target{models.target, plain};
    KvCache<E, Engine> cache{
        triforce_plan<E>(models.target.config().shape(), {.chunk = setting.chunk, .budget = setting.budget}),
        cache_options()};
    const Outcome outcome =
        decode_with_guesses(target, models.target, cache, near ? models.near : models.other, prompt,
                            plain.continuation().size(), setting);
    ledger.note(plain, outcome, target, sizeof(E) == 2 ? bfloat16_tie : float_tie);
  }

  Models models;
  std::vector<int> prompt;
  PlainText plain;
};

TEST_CASE("drafts of every kind, over float caches") {
  std::array<Ledger, guessers.size()> ledgers;
  std::size_t turn = 0, texts = 0, distinct = 0;
  for (const std::size_t prompt_tokens : {2, 70, 300}) {
    for (std::size_t which = 0; which < 8; ++which) {
      if (which % runs_share != 0) continue;
      const Text<float> text{which, prompt_tokens, 40};
      ++texts;
      distinct += std::set<int>(text.plain.continuation().begin(), text.plain.continuation().end()).size();
      for (std::size_t g = 0; g < guessers.size(); ++g, ++turn) {
        CAPTURE(which);
        CAPTURE(prompt_tokens);
        text.compare(ledgers[g], {.guesser = guessers[g], .length = 1 + turn % 16, .budget = 16},
                     turn % 4 != 0);
      }
    }
  }
  // The texts are not all alike.
  CHECK(distinct >= 6 * texts);
  std::size_t runs = 0;
  for (std::size_t g = 0; g < guessers.size(); ++g) {
    CAPTURE(g);
    ledgers[g].tell("guesser " + std::to_string(g));
    runs += ledgers[g].runs;
    CHECK(ledgers[g].accepted > 0);
    CHECK(ledgers[g].accepted < ledgers[g].positions);
  }
  MESSAGE(runs << " runs");
  CHECK(runs >= 200 / runs_share);
}

TEST_CASE("budgets, chunks, divisions of the prompt, refresh rules, adaptive lengths") {
  Ledger ledger;
  std::size_t turn = 0;
  for (std::size_t which = 8; which < 12; ++which) {
    if (which % runs_share % 4 != 0) continue;
    // A text shorter than the budget, and a much longer one; prompts are read at once, in pieces, or by
    // token.
    for (const std::size_t prompt_tokens : {19, 150}) {
      for (const std::size_t prompt_chunk : {1, 17, 512}) {
        const Text<float> text{which, prompt_tokens, 40, prompt_chunk};
        for (const std::size_t chunk : {1, 3, 16}) {
          CAPTURE(which);
          CAPTURE(turn);
          Setting setting{
              .guesser = guessers[turn % guessers.size()],
              .length = turn % 17,
              .adapt = turn % 2 == 0,
              .budget = chunk * (1 + turn % 5),
              .chunk = chunk,
              .prompt_chunk = prompt_chunk,
              .refresh_selection = {.every = turn % 3 * 4, .below_acceptance = 0.9, .min_tokens = 3}};
          text.compare(ledger, setting, true);
          ++turn;
        }
      }
    }
  }
  ledger.tell("settings");
  CHECK(ledger.runs >= 68 / runs_share);
  CHECK(ledger.refreshes > 0);
}

TEST_CASE("bfloat16 caches") {
  Ledger ledger;
  for (std::size_t which = 0; which < 24; which += runs_share) {
    const Text<bfloat16> text{which, 90, 24};
    for (std::size_t g = 0; g < guessers.size(); ++g) {
      CAPTURE(which);
      text.compare(ledger, {.guesser = guessers[g], .length = 2 + (which + g) % 7, .budget = 24},
                   which % 3 != 0);
    }
  }
  ledger.tell("bfloat16");
  CHECK(ledger.runs >= 60 / runs_share);
}

TEST_CASE("the scalar engine, and threads") {
  Ledger scalar, threads;
  for (std::size_t which = 0; which < 4; which += runs_share) {
    const Text<float> text{which, 60, 24};
    for (const Guesser guesser : guessers) {
      text.compare<ScalarEngine>(scalar, {.guesser = guesser, .length = 5, .budget = 16}, true);
    }
    if (which > 0) continue;
    text.compare<cpu::Engine<>>(threads, {.guesser = Guesser::hierarchy, .budget = 16}, true);
    text.compare<cpu::Engine<>>(threads, {.guesser = Guesser::tree, .budget = 16}, true);
  }
  scalar.tell("scalar engine");
  threads.tell("threads");
  CHECK(scalar.runs >= 36 / runs_share);
  CHECK(threads.runs == 2);
}

TEST_CASE("several texts decoded together equal each by itself") {
  // The texts share a model, because they share its products, but differ in length, acceptance and end.
  const Models models = models_of(1);
  LlamaReader target{models.target}, near{models.near}, other{models.other};
  using Cache = KvCache<float, CpuEngine>;
  using SmallCache = KvCache<float, CpuEngine>;
  using Decoder = SpeculativeDecoder<LlamaReader, Cache, AnyDraft>;
  struct Member {
    PlainText plain;
    Cache cache;
    SmallCache small_cache;
    std::optional<Decoder> decoder;
    std::size_t wanted;
  };
  std::size_t runs = 0, accepted = 0;
  for (std::size_t round = 0; round < 8; round += runs_share) {
    std::vector<Member> members;
    members.reserve(5);
    for (std::size_t i = 0; i < 5; ++i) {
      const auto prompt = random_text(24, 20 + 37 * i, 1000 + 10 * round + i);
      const std::size_t wanted = 20 + 9 * i;
      Member& member = members.emplace_back(Member{
          plain_text<float>(models.target, prompt, 64, wanted),
          Cache{triforce_plan<float>(models.target.config().shape(), {.chunk = 4, .budget = 16}),
                cache_options()},
          SmallCache{triforce_draft_plan<float>((i % 2 == 0 ? models.near : models.other).config().shape(),
                                                {.sinks = 4, .recent = 26}),
                     cache_options()},
          std::nullopt, wanted});
      LlamaReader& small = i % 2 == 0 ? near : other;
      AnyDraft draft{ModelDraft{small, member.small_cache}};
      if (i == 2) draft = AnyDraft{TreeDraft{small, member.small_cache, tree_of(9)}};
      if (i >= 3) draft = AnyDraft{SelectedDraft{target, member.cache, draft}};
      member.decoder.emplace(target, member.cache, draft,
                             SpeculationOptions{.length = 3 + 2 * i, .adapt = i == 3, .prompt_chunk = 64});
      member.decoder->read_prompt(prompt);
    }
    std::vector<Decoder*> going;
    for (Member& member : members) going.push_back(&*member.decoder);
    // Texts leave the batch when they are done.
    while (!going.empty()) {
      std::size_t most = 1000;
      for (Member& member : members) {
        const std::size_t left = member.wanted + member.plain.prompt - member.decoder->text().size();
        if (left > 0) most = std::min(most, left);
      }
      for (const BatchedStep& result : step_together(target, std::span<Decoder* const>{going}, most)) {
        CHECK(result.error == nullptr);
        CHECK(!result.step.tokens.empty());
      }
      going.clear();
      for (Member& member : members) {
        if (member.decoder->text().size() < member.plain.text.size()) going.push_back(&*member.decoder);
      }
    }
    for (const Member& member : members) {
      CAPTURE(round);
      const std::size_t sure = member.plain.tokens_before_tie(float_tie);
      const auto text = member.decoder->text();
      REQUIRE(text.size() == member.plain.text.size());
      const auto equal = std::ranges::mismatch(text, member.plain.text).in1 - text.begin();
      CHECK(static_cast<std::size_t>(equal) >= member.plain.prompt + sure);
      runs += sure == member.wanted ? 1 : 0;
      accepted += member.decoder->statistics().accepted;
    }
  }
  MESSAGE("batches: " << runs << " texts, " << accepted << " guesses kept");
  CHECK(runs >= 36 / runs_share);
  CHECK(accepted > 100 / runs_share);
}

TEST_CASE("the shipped models") {
  const std::string weights = testing::source_dir() + "/reference_model/weights";
  const Llama model = Llama::load(weights + "/keyfinder");
  const Llama small = Llama::load(weights + "/keyfinder-draft");
  std::ifstream file{weights + "/heldout_kjv.txt"};
  const std::string heldout{std::istreambuf_iterator<char>{file}, {}};
  REQUIRE(heldout.size() > 20000);
  std::array<Ledger, guessers.size()> ledgers;
  std::size_t runs = 0;
  for (std::size_t i = 0; i < 2; i += runs_share) {
    std::vector<int> prompt(500 + 400 * i);
    for (std::size_t at = 0; at < prompt.size(); ++at) {
      prompt[at] = static_cast<unsigned char>(heldout[5000 * i + at]);
    }
    const PlainText plain = plain_text<float>(model, prompt, 256, 40);
    for (std::size_t g = 0; g < guessers.size(); ++g) {
      CAPTURE(i);
      CAPTURE(g);
      WatchedReader target{model, plain};
      KvCache<float, CpuEngine> cache{
          triforce_plan<float>(model.config().shape(), {.chunk = 8, .budget = 128}), cache_options()};
      const Setting setting{.guesser = guessers[g], .length = g == 4 ? 12U : 6U, .prompt_chunk = 256};
      const Outcome outcome = decode_with_guesses(target, model, cache, small, prompt, 40, setting);
      ledgers[g].note(plain, outcome, target, 1e-3F);
    }
  }
  for (std::size_t g = 0; g < guessers.size(); ++g) {
    ledgers[g].tell("shipped models, guesser " + std::to_string(g));
    runs += ledgers[g].runs;
  }
  // The equality must not come from a decoder that refuses all draft tokens.
  for (const Guesser guesser : {Guesser::small, Guesser::self, Guesser::hierarchy}) {
    const Ledger& ledger = ledgers[static_cast<std::size_t>(guesser)];
    CHECK(static_cast<double>(ledger.accepted) > 0.5 * static_cast<double>(ledger.positions));
  }
  CHECK(runs >= 12 / runs_share);
}

}  // namespace
}  // namespace kvpolicy::reference::greedy_equality_test
