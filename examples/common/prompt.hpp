// SPDX-License-Identifier: Apache-2.0
//
// The prompt of a tool: a text, a file or token numbers.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace kvpolicy::tools {

/// At most one of the three is set.
struct PromptArguments {
  std::string prompt;
  std::string file;  ///< "-": stdin
  std::vector<int> tokens;

  [[nodiscard]] bool given() const { return !prompt.empty() || !file.empty() || !tokens.empty(); }
};

/// Adds --prompt, --file and --tokens; --help shows `how_many` as the description of the group.
/// Callers may add further options to the returned group, which exclude these.
CLI::Option_group* add_prompt_options(CLI::App& app, PromptArguments& arguments, const std::string& how_many);

/// The tokens of the prompt. Texts are accepted only for models whose tokens are bytes.
/// @throws ConfigError for a text where the model has another vocabulary, for empty stdin, or if no
/// prompt was given; FormatError for a file that cannot be read
[[nodiscard]] std::vector<int> prompt_tokens(const PromptArguments& arguments,
                                             std::size_t vocabulary);

}  // namespace kvpolicy::tools
