// SPDX-License-Identifier: Apache-2.0
//
// Reports a run of speculative decoding: tokens with their proposers as they are decoded, tables
// for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvpolicy/speculation/decoder.hpp>

#include "../common/progress.hpp"
#include "../common/speculative_text.hpp"
#include "speculation_run.hpp"
#include "token_strip.hpp"

namespace kvpolicy::tools {

/// Prints turns while they are decoded: on a terminal token by token, elsewhere turn by turn.
class SpeculationDisplay {
 public:
  /// `turns` must outlive this object.
  SpeculationDisplay(const std::vector<SpeculationTurn>& turns, TokenStrip strip);
  [[nodiscard]] SpeculationWatcher watcher();

 private:
  void begin(std::size_t turn);
  void add(const NewToken& token);
  void end(std::size_t turn);

  const std::vector<SpeculationTurn>* turns_;
  TokenStrip strip_;
  Progress progress_;
  std::vector<NewToken> waiting_;  // tokens of a turn that is printed when it ends
};

/// Prints the tables for the run of `text` through `turns`.
void print_report(const reference::Tokenizer& tokenizer, const SpeculativeText& text,
                  const std::vector<SpeculationTurn>& turns, const SpeculationResult& result);
[[nodiscard]] nlohmann::json as_json(const reference::Tokenizer& tokenizer, const SpeculativeText& text,
                                     const std::vector<SpeculationTurn>& turns,
                                     const SpeculationResult& result);

}  // namespace kvpolicy::tools
