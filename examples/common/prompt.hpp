// SPDX-License-Identifier: Apache-2.0
//
// The prompt of a tool: a text, a file or numbers of tokens.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace kvpolicy::tools {

/// At most one of the three.
struct PromptArguments {
  std::string prompt;
  std::string file;  ///< "-": stdin
  std::vector<int> tokens;

  [[nodiscard]] bool given() const { return !prompt.empty() || !file.empty() || !tokens.empty(); }
};

/// Adds --prompt, --file and --tokens; `how_many` is what --help says of them. Other sources that
/// exclude these may join the group.
CLI::Option_group* add_prompt_options(CLI::App& app, PromptArguments& arguments, const std::string& how_many);

/// The tokens of the prompt that was given. Texts are for models whose tokens are bytes.
/// @throws ConfigError where the model has another vocabulary, stdin is empty or nothing was given;
/// FormatError for a file that cannot be read.
[[nodiscard]] std::vector<int> prompt_tokens(const PromptArguments& arguments,
                                             std::size_t vocabulary);

}  // namespace kvpolicy::tools
