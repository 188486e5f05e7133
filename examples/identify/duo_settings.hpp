// SPDX-License-Identifier: Apache-2.0
//
// The settings of `identify_heads duo`, named like its options, and their translation for the code
// that does the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <common/context_limit.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/gradient/attention.hpp>
#include <reference_model/identify/duo_gates.hpp>

#include "passkey_text.hpp"

namespace kvpolicy::tools {

/// The settings as given on the command line; `settle` fills in those that are left open.
struct DuoSettings {
  std::string model;            ///< a folder
  std::string text;             ///< a file; empty: the shipped text
  std::string labelled;         ///< a file of the user's texts; empty: texts are drawn
  std::string labelled_digest;  ///< digest of that file
  std::string out;              ///< a folder; empty: nothing is written
  std::string method = "optimise";
  std::string loss;  ///< empty: the default of the method
  std::string mask = "both";
  std::string texts;  ///< empty: the default of the loss; "own" for `labelled`
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
  std::size_t stop_after = 0;  ///< 0: trains to the end
  double rate = 0.02;
  double penalty = 0.05;
  double sparsity = 0.5;
  std::uint64_t threads = 0;
  ContextLimit context;
  bool resume = false;
  bool json = false;
};

/// Gives settings that were left open their defaults, which depend on other settings.
/// @throws ConfigError for settings that contradict each other
void settle(DuoSettings& a);

/// The rows that a streaming head sees during identification.
[[nodiscard]] reference::AttentionMask mask_of(const DuoSettings& a);

[[nodiscard]] reference::GateObjective objective_of(const DuoSettings& a);

[[nodiscard]] reference::GateTraining training_of(const DuoSettings& a);

/// Everything that the result depends on, as config.json and checkpoints store it.
[[nodiscard]] io::Json json_of(const DuoSettings& a);

}  // namespace kvpolicy::tools
