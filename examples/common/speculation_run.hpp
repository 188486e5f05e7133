// SPDX-License-Identifier: Apache-2.0
//
// Decodes turns of a text by guesses, and the same turns token by token beside it, in turns of some
// tens of tokens, so that both meet the same machine and their times can be compared.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <kvpolicy/speculation/decoder.hpp>

#include "speculative_text.hpp"

namespace kvpolicy::tools {

struct SpeculationTurn {
  std::vector<int> prompt;
  std::size_t most_new = 256;
  /// The turn ends behind these tokens; what a step gave behind them stays part of the text. One
  /// token is better named as SpeculationOptions::stop_tokens, which end a text exactly.
  std::vector<int> stop = {};
  bool past_stop_tokens = false;  ///< goes on behind those
  std::string question = {};      ///< as shown; empty if the prompt is none
  std::string answer = {};        ///< the right one, if the prompt is a question
};

/// One verification.
struct SpeculationStep {
  std::size_t turn = 0;
  std::size_t guessed = 0;
  std::vector<NewToken> tokens;
  double seconds = 0.0;
};

struct SpeculationResult {
  std::size_t prompt_tokens = 0;  ///< of all turns
  double prefill_seconds = 0.0;   ///< of the first turn's prompt, the draft's reading included
  std::vector<SpeculationStep> steps;
  std::vector<Ending> endings;  ///< of each turn
  std::size_t tokens = 0;
  double seconds = 0.0;
  // Token by token, if that was asked for.
  std::size_t plain_tokens = 0;
  double plain_seconds = 0.0;
  bool same_text = false;
  std::vector<LevelReport> levels;
  std::size_t refreshes = 0;

  [[nodiscard]] double seconds_per_token() const;
  [[nodiscard]] double plain_seconds_per_token() const;
  /// NaN without plain decoding beside.
  [[nodiscard]] double speedup() const;
  [[nodiscard]] double tokens_per_verification() const;
  /// What the cost model of speculation/cost_model.hpp expects of the measured acceptance: guesses
  /// that stay or not independently of each other.
  [[nodiscard]] double predicted_tokens_per_verification() const;
  [[nodiscard]] double predicted_speedup() const;

  [[nodiscard]] std::vector<NewToken> tokens_of_turn(std::size_t turn) const;
};

struct SpeculationWatcher {
  std::function<void(std::size_t done, std::size_t total)> reads = {};  ///< tokens of a prompt
  std::function<void(std::size_t turn)> begins = {};                    ///< behind its prompt
  std::function<void(const NewToken&)> token = {};
  std::function<void(std::size_t turn)> ends = {};
};

/// `text` is empty. Caches are warm when the first time is taken.
[[nodiscard]] SpeculationResult run_speculation(SpeculativeText& text,
                                                const std::vector<SpeculationTurn>& turns,
                                                bool beside_plain,
                                                const SpeculationWatcher& watcher = {});

}  // namespace kvpolicy::tools
