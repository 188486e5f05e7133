// SPDX-License-Identifier: Apache-2.0
#include "prompt.hpp"

#include <iostream>
#include <limits>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "exam.hpp"
#include "run_tool.hpp"

namespace kvpolicy::tools {

CLI::Option_group* add_prompt_options(CLI::App& app, PromptArguments& arguments, const std::string& how_many) {
  auto* source = app.add_option_group("Prompt", how_many);
  source->add_option("--prompt", arguments.prompt, "The prompt itself")->type_name("TEXT");
  source->add_option("--file", arguments.file, "A file with the prompt; - for stdin")
      ->type_name("PATH");
  source->add_option("--tokens", arguments.tokens, "The prompt as numbers of tokens")
      ->delimiter(',')
      ->check(whole_number(0, std::numeric_limits<int>::max()))
      ->type_name("N,N,...");
  source->require_option(0, 1);
  return source;
}

std::vector<int> prompt_tokens(const PromptArguments& arguments, std::size_t vocabulary) {
  if (!arguments.tokens.empty()) return arguments.tokens;
  require(arguments.given(),
          "there is no prompt; give one of --prompt TEXT, --file PATH, --tokens N,N,...");
  require(vocabulary == 256, "the model has a vocabulary of ", vocabulary,
          ", not of bytes, and this program has no tokenizer: give the prompt as --tokens N,N,...");
  if (!arguments.prompt.empty()) return tokens_of(arguments.prompt);
  if (arguments.file != "-") return tokens_of(io::read_text_file(arguments.file));
  const std::string text = io::read_text_stream(std::cin, "stdin");
  require(!text.empty(), "stdin is empty, expected a prompt");
  return tokens_of(text);
}

}  // namespace kvpolicy::tools
