// SPDX-License-Identifier: Apache-2.0
//
// Texts longer than those that a model was trained on: refused, unless the user asks for them.
#pragma once

#include <cstddef>

#include <CLI/CLI.hpp>

#include <reference_model/config.hpp>

namespace kvpolicy::tools {

struct ContextLimit {
  bool beyond = false;

  /// Adds --beyond-context.
  void add_to(CLI::App& app);

  /// @throws ConfigError that says what would fit, if a text of so many tokens is longer than the
  /// texts that the model was trained on and --beyond-context was not given
  void check(const reference::LlamaConfig& config, std::size_t tokens) const;
};

}  // namespace kvpolicy::tools
