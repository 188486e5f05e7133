// SPDX-License-Identifier: Apache-2.0
//
// One run of greedy speculative decoding with any kind of draft over any cache of a target model, and totals
// of many runs: whether each equals plain decoding, and its counters.
//
// A token is decided by float sums, whose order depends on how many tokens a call reads. Therefore a run
// measures how much the verifications' logits differ from those of plain decoding, and compares tokens up to
// the first that is decided by no more than `tie`; it also checks that no deviation comes near `tie`.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/speculation/ngram_draft.hpp>
#include <kvpolicy/triforce.hpp>

#include "model/speculation.hpp"

namespace kvpolicy::reference {

/// Uses one thread, because the work is too small to share.
using CpuEngine = cpu::Engine<cpu::SerialFor>;

enum class Guesser {
  small,
  self,
  hierarchy,
  hierarchy_of_runs,
  tree,
  tree_below_selected,
  ngram,
  ngram_below_selected,
  streaming_target
};
inline constexpr std::array guessers{Guesser::small,
                                     Guesser::self,
                                     Guesser::hierarchy,
                                     Guesser::hierarchy_of_runs,
                                     Guesser::tree,
                                     Guesser::tree_below_selected,
                                     Guesser::ngram,
                                     Guesser::ngram_below_selected,
                                     Guesser::streaming_target};

/// The settings in which runs differ.
struct Setting {
  Guesser guesser = Guesser::hierarchy;
  std::size_t length = 6;
  bool adapt = false;
  std::size_t budget = 32;  // for selecting heads, where the run makes the plan
  std::size_t chunk = 8;
  std::size_t prompt_chunk = 64;
  std::optional<std::size_t> commit_every = {};
  RefreshRule refresh_selection = {};
};

struct Outcome {
  std::vector<int> text;
  LevelStatistics statistics;
  std::size_t refreshes = 0;
};

inline CacheOptions cache_options() { return {.max_rollback = 24, .max_append = 20}; }

inline TokenTree tree_of(std::size_t nodes) { return best_tree(std::array{0.5, 0.2, 0.1}, nodes); }

/// `target` reads `model`; `cache` is the target's own and is empty; `small` is the draft model.
template <class Model, class Cache>
Outcome decode_with_guesses(Model& target, const Llama& model, Cache& cache, const Llama& small,
                            std::span<const int> prompt, std::size_t tokens, const Setting& setting) {
  using SmallCache = KvCache<float, CpuEngine>;
  LlamaReader small_reader{setting.guesser == Guesser::streaming_target ? model : small};
  SmallCache small_cache{triforce_draft_plan<float>(
                             (setting.guesser == Guesser::streaming_target ? model : small).config().shape(),
                             {.sinks = 4, .recent = 32}),
                         cache_options()};
  const auto below = [&]() -> AnyDraft {
    switch (setting.guesser) {
      case Guesser::small:
      case Guesser::hierarchy:
      case Guesser::hierarchy_of_runs:
      case Guesser::streaming_target: return AnyDraft{ModelDraft{small_reader, small_cache, {.chunk = 50}}};
      case Guesser::tree:
      case Guesser::tree_below_selected:
        return AnyDraft{
            TreeDraft{small_reader, small_cache, tree_of(std::max<std::size_t>(setting.length, 1))}};
      case Guesser::ngram:
      case Guesser::ngram_below_selected: return AnyDraft{NgramDraft{}};
      case Guesser::self: break;
    }
    return AnyDraft{};
  }();
  const auto draft = [&]() -> AnyDraft {
    SelectedDraftOptions middle;
    switch (setting.guesser) {
      case Guesser::hierarchy_of_runs: middle.length = 3; break;
      case Guesser::tree_below_selected: middle.length = 5; break;
      case Guesser::ngram_below_selected: middle.length = 4; break;
      case Guesser::self:
      case Guesser::hierarchy: break;
      default: return below;
    }
    return AnyDraft{SelectedDraft<Model, Cache, AnyDraft>{target, cache, below, middle}};
  }();
  SpeculativeDecoder decoder{target, cache, draft,
                             SpeculationOptions{.length = setting.length,
                                                .adapt = setting.adapt,
                                                .refresh_selection = setting.refresh_selection,
                                                .commit_every = setting.commit_every,
                                                .prompt_chunk = setting.prompt_chunk}};
  decoder.read_prompt(prompt);
  CHECK(decoder.generate(tokens) == Ending::length);
  return {{decoder.text().begin(), decoder.text().end()}, decoder.statistics(), decoder.refreshes()};
}

/// Totals over runs.
struct Ledger {
  std::size_t runs = 0;  // equal in all tokens, without a near tie
  std::size_t cut = 0;   // equal up to a near tie
  std::size_t verifications = 0, positions = 0, accepted = 0, refreshes = 0, compared = 0;
  float deviation = 0.0F;
  float margin = std::numeric_limits<float>::infinity();

  void note(const PlainText& plain, const Outcome& outcome, const WatchedReader& watched, float tie) {
    const std::size_t tokens = plain.continuation().size();
    const std::size_t sure = plain.tokens_before_tie(tie);
    REQUIRE(outcome.text.size() == plain.text.size());
    const auto equal = std::ranges::mismatch(outcome.text, plain.text).in1 - outcome.text.begin();
    CHECK(static_cast<std::size_t>(equal) >= plain.prompt + sure);
    CHECK(watched.deviation() <= tie / 4);
    CHECK(watched.compared() >= sure);
    CHECK(outcome.statistics.tokens == tokens);
    CHECK(outcome.statistics.tokens == outcome.statistics.verifications + outcome.statistics.accepted);
    sure == tokens ? ++runs : ++cut;
    verifications += outcome.statistics.verifications;
    positions += outcome.statistics.positions;
    accepted += outcome.statistics.accepted;
    refreshes += outcome.refreshes;
    compared += watched.compared();
    deviation = std::max(deviation, watched.deviation());
    for (std::size_t i = 0; i < sure; ++i) margin = std::min(margin, plain.margins[i]);
  }
  void tell(const std::string& what) const {
    MESSAGE(what << ": " << runs << " runs, " << cut << " cut at a near tie, smallest margin " << margin
                 << ", largest deviation " << deviation << " in " << compared << " rows of logits; "
                 << verifications << " verifications kept " << accepted << " of " << positions
                 << " draft tokens; " << refreshes << " refreshes");
  }
};

}  // namespace kvpolicy::reference
