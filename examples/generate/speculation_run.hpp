// SPDX-License-Identifier: Apache-2.0
//
// Decodes turns of a text speculatively, and the same turns token by token. The two alternate every
// few tens of tokens, so that both see the same state of the machine and their times can be
// compared.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <kvpolicy/speculation/decoder.hpp>

#include "../common/speculative_text.hpp"
#include "../common/text_model.hpp"

namespace kvpolicy::tools {

struct SpeculationTurn {
  std::vector<int> prompt;
  std::size_t most_new = 256;
  /// Whether the turn ends after the latest of its tokens; further tokens of the same step stay part
  /// of the text. A single token is better given as SpeculationOptions::stop_tokens, which end a text
  /// exactly. Empty: the turn does not end so.
  Stops stops = {};
  bool past_stop_tokens = false;  ///< continues after SpeculationOptions::stop_tokens
  std::string question = {};      ///< as shown; empty if the prompt is no question
  std::string answer = {};        ///< how the right answer begins, if the prompt is a question
};

/// One verification.
struct SpeculationStep {
  std::size_t turn = 0;
  std::size_t guessed = 0;
  std::vector<NewToken> tokens;
  double seconds = 0.0;
};

struct SpeculationResult {
  std::size_t prompt_tokens = 0;  ///< in all turns
  double prefill_seconds = 0.0;   ///< for the first turn's prompt, the draft's reading included
  std::vector<SpeculationStep> steps;
  std::vector<Ending> endings;  ///< one for each turn
  std::size_t tokens = 0;
  double seconds = 0.0;
  // Results of decoding token by token, if that was asked for.
  std::size_t plain_tokens = 0;
  double plain_seconds = 0.0;
  bool same_text = false;
  std::vector<LevelReport> levels;
  std::size_t refreshes = 0;

  [[nodiscard]] double seconds_per_token() const;
  [[nodiscard]] double plain_seconds_per_token() const;
  /// NaN if nothing was decoded token by token.
  [[nodiscard]] double speedup() const;
  [[nodiscard]] double tokens_per_verification() const;
  /// The prediction of speculation/cost_model.hpp for the measured acceptance, which assumes that
  /// draft tokens are accepted independently of each other.
  [[nodiscard]] double predicted_tokens_per_verification() const;
  [[nodiscard]] double predicted_speedup() const;

  [[nodiscard]] std::vector<NewToken> tokens_of_turn(std::size_t turn) const;
};

struct SpeculationWatcher {
  std::function<void(std::size_t done, std::size_t total)> reads = {};  ///< tokens of a prompt
  std::function<void(std::size_t turn)> begins = {};                    ///< after its prompt
  std::function<void(const NewToken&)> token = {};
  std::function<void(std::size_t turn)> ends = {};
};

/// `text` may have read what the first turn goes on after, whose prompt may then be empty. Caches are
/// warm before times are taken.
[[nodiscard]] SpeculationResult run_speculation(SpeculativeText& text,
                                                const std::vector<SpeculationTurn>& turns, bool beside_plain,
                                                const SpeculationWatcher& watcher = {});

}  // namespace kvpolicy::tools
