// SPDX-License-Identifier: Apache-2.0
//
// The options with which tools say how a model's weights are kept and multiplied.
#pragma once

#include <string>

#include <CLI/CLI.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::tools {

struct LoadArguments {
  std::string weights = "as-stored";    ///< or float32, int8
  std::string activations = "float32";  ///< or bfloat16

  [[nodiscard]] reference::LoadOptions options() const;
};

/// Adds --weights and --activations. `arguments` must outlive `app`.
void add_load_options(CLI::App& app, LoadArguments& arguments);

}  // namespace kvpolicy::tools
