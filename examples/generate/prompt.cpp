// SPDX-License-Identifier: Apache-2.0
#include "prompt.hpp"

#include <iostream>
#include <limits>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "../common/run_tool.hpp"

namespace kvpolicy::tools {

CLI::Option_group* add_prompt_options(CLI::App& app, PromptArguments& arguments,
                                      const std::string& how_many) {
  auto* source = app.add_option_group("Prompt", how_many);
  source->add_option("--prompt,prompt", arguments.prompt, "The prompt itself")->type_name("TEXT");
  source->add_option("--file", arguments.file, "A file with the prompt; - for stdin")->type_name("PATH");
  source->add_option("--tokens", arguments.tokens, "The prompt as numbers of tokens")
      ->delimiter(',')
      ->check(whole_number(0, std::numeric_limits<int>::max()))
      ->type_name("N,N,...");
  source->require_option(0, 1);
  return source;
}

std::string prompt_text(const PromptArguments& arguments) {
  require(arguments.given(), "there is no prompt; give one of --prompt TEXT, --file PATH, --tokens N,N,...");
  if (!arguments.prompt.empty()) return arguments.prompt;
  require(arguments.tokens.empty(), "--tokens is no text; give --prompt TEXT or --file PATH");
  if (arguments.file != "-") return io::read_text_file(arguments.file);
  std::string text = io::read_text_stream(std::cin, "stdin");
  require(!text.empty(), "stdin is empty, expected a prompt");
  return text;
}

std::vector<int> prompt_tokens(const PromptArguments& arguments, const TextModel& model) {
  return arguments.tokens.empty() ? model.encode(prompt_text(arguments)) : arguments.tokens;
}

}  // namespace kvpolicy::tools
