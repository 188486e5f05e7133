// SPDX-License-Identifier: Apache-2.0
//
// The prompt of a tool: a text, a file or tokens by number.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "../common/text_model.hpp"

namespace kvpolicy::tools {

/// At most one of the three is set.
struct PromptArguments {
  std::string prompt;
  std::string file;  ///< "-": stdin
  std::vector<int> tokens;

  [[nodiscard]] bool given() const { return !prompt.empty() || !file.empty() || !tokens.empty(); }
};

/// Adds --prompt (whose name may be left out), --file and --tokens. --help shows `how_many` as the
/// description of the group.
/// Callers may add further options to the returned group, which exclude these.
CLI::Option_group* add_prompt_options(CLI::App& app, PromptArguments& arguments, const std::string& how_many);

/// The text of --prompt or --file.
/// @throws ConfigError for empty stdin, or if there is no text; FormatError for a file that cannot
/// be read
[[nodiscard]] std::string prompt_text(const PromptArguments& arguments);

/// The tokens of the prompt. @throws as prompt_text, and as TextModel::encode for a text
[[nodiscard]] std::vector<int> prompt_tokens(const PromptArguments& arguments, const TextModel& model);

}  // namespace kvpolicy::tools
