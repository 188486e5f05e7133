// SPDX-License-Identifier: Apache-2.0
//
// What a run of speculative decoding came to: tokens by who proposed them while they come, tables
// for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvpolicy/speculation/decoder.hpp>

#include "progress.hpp"
#include "speculation_run.hpp"
#include "speculative_text.hpp"
#include "token_strip.hpp"

namespace kvpolicy::tools {

/// Prints turns as they are decoded: on a terminal token by token, elsewhere turn by turn.
class SpeculationDisplay {
 public:
  /// `turns` must outlive it.
  SpeculationDisplay(const std::vector<SpeculationTurn>& turns, TokenStrip strip);
  [[nodiscard]] SpeculationWatcher watcher();

 private:
  void begin(std::size_t turn);
  void add(const NewToken& token);
  void end(std::size_t turn);

  const std::vector<SpeculationTurn>* turns_;
  TokenStrip strip_;
  Progress progress_;
  std::vector<NewToken> waiting_;  // of a turn that is shown when it ends
};

/// Of a run of `text` through `turns`.
void print_report(const SpeculativeText& text, const std::vector<SpeculationTurn>& turns,
                  const SpeculationResult& result);
[[nodiscard]] nlohmann::json as_json(const SpeculativeText& text,
                                     const std::vector<SpeculationTurn>& turns,
                                     const SpeculationResult& result, bool bytes);

}  // namespace kvpolicy::tools
