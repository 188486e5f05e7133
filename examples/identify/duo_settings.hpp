// SPDX-License-Identifier: Apache-2.0
//
// What `identify_heads duo` is asked to do, by the names of its options, and what that means to the
// code that does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <kvpolicy/io/json_text.hpp>
#include <reference_model/gradient/attention.hpp>
#include <reference_model/identify/duo_gates.hpp>

#include "passkey_text.hpp"

namespace kvpolicy::tools {

/// As the command line says it; `settle` makes sense of what it leaves open.
struct DuoSettings {
  std::string model;  ///< folder
  std::string text;   ///< file; empty: the shipped one
  std::string labelled;  ///< file of texts of one's own; empty: texts are drawn
  std::string labelled_digest;  ///< of that file
  std::string out;    ///< folder; empty: nothing is written
  std::string method = "optimise";
  std::string loss;  ///< empty: the method's own
  std::string mask = "both";
  std::string texts;  ///< empty: the loss's own; "own" for `labelled`
  std::string keys = "digits";
  std::string mixing = "unmodified";
  std::string reduction = "mean";
  std::string profile = "passkey";
  PasskeyTextConfig set;
  std::size_t sinks = 16;
  std::size_t recent = 128;
  std::size_t steps = 400;
  std::size_t samples = 24;
  std::size_t save_every = 20;
  std::size_t stop_after = 0;  ///< 0: at the end
  double rate = 0.02;
  double penalty = 0.05;
  double sparsity = 0.5;
  std::uint64_t threads = 0;
  bool resume = false;
  bool json = false;
};

/// Gives choices that were left open their defaults, which depend on others.
/// @throws ConfigError for choices that contradict each other.
void settle(DuoSettings& a);

/// What a streaming head sees while it is judged.
[[nodiscard]] reference::AttentionMask mask_of(const DuoSettings& a);

[[nodiscard]] reference::GateObjective objective_of(const DuoSettings& a);

[[nodiscard]] reference::GateTraining training_of(const DuoSettings& a);

/// All that the result depends on, as config.json and checkpoints keep it.
[[nodiscard]] io::Json json_of(const DuoSettings& a);

}  // namespace kvpolicy::tools
