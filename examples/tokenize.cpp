// SPDX-License-Identifier: Apache-2.0
//
// Shows how a model's tokenizer reads texts, and turns tokens back into text.
#include <charconv>
#include <cstddef>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/load_tokenizer.hpp>

#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/run_tool.hpp"

namespace kvpolicy::tools {
namespace {

using reference::Tokenizer;

struct Arguments {
  std::string model;
  std::optional<std::string> text;
  std::optional<std::string> file;
  bool null_data = false;
  bool decode = false;
  bool plain = false;
  bool no_special = false;
  bool json = false;
};

constexpr const char* description =
    R"(Turns text into the tokens of a model, and back.

The model is a folder as it is downloaded, with tokenizer.json or tokenizer.model, or a GGUF file. A model
of 256 tokens that has neither reads bytes. docs/tokenizers.md says which tokenizers are supported.)";

constexpr const char* examples = R"(Examples:
  # each token of a text, by number and as the vocabulary spells it
  tokenize --model reference_model/weights/keyfinder "Ünder"
  # and back
  tokenize --model reference_model/weights/keyfinder --decode "195 156 110 100 101 114"
  # many texts, one on each line of a file: one array of tokens a line
  tokenize --model reference_model/weights/keyfinder --file chapter.txt --json)";

std::vector<int> numbers_in(std::string_view text) {
  std::vector<int> numbers;
  constexpr std::string_view between = " ,\t\r\n[]";
  while (true) {
    const std::size_t begin = text.find_first_not_of(between);
    if (begin == text.npos) return numbers;
    text.remove_prefix(begin);
    const std::string_view word = text.substr(0, text.find_first_of(between));
    int number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    require<FormatError>(error == std::errc{} && end == word.data() + word.size() && number >= 0,
                         io::in_quotes(word), " is not a token; with --decode, give whole numbers");
    numbers.push_back(number);
    text.remove_prefix(word.size());
  }
}

void print_tokens(const Tokenizer& tokenizer, const std::vector<int>& tokens) {
  for (const int token : tokens) {
    fmt::print("{:>8}  {}\n", token, io::shortened(tokenizer.token_text(token), 200));
  }
}

/// One text, or one line of numbers. `many` asks for one line of output.
void show(const Tokenizer& tokenizer, const Arguments& arguments, std::string_view text, bool many) {
  if (arguments.decode) {
    const std::string decoded = tokenizer.decode(numbers_in(text), {.skip_special = !arguments.no_special});
    fmt::print("{}\n", arguments.json || many ? as_line(nlohmann::json(decoded)) : decoded);
    return;
  }
  const std::vector<int> tokens =
      tokenizer.encode(text, {.add_special = !arguments.no_special, .parse_special = !arguments.plain});
  if (arguments.json || many) {
    fmt::print("{}\n", as_line(nlohmann::json(tokens)));
  } else {
    print_tokens(tokenizer, tokens);
  }
}

void run(const Arguments& arguments) {
  const auto tokenizer = reference::load_tokenizer(repository_path(arguments.model));
  require(arguments.text.has_value() != arguments.file.has_value(), "give either a text or --file");
  if (arguments.text) return show(tokenizer, arguments, *arguments.text, false);
  const std::string all = *arguments.file == "-" ? io::read_text_stream(std::cin, "standard input")
                                                 : io::read_text_file(repository_path(*arguments.file));
  const char end = arguments.null_data ? '\0' : '\n';
  for (std::string_view rest = all; !rest.empty();) {
    const std::string_view text = rest.substr(0, rest.find(end));
    show(tokenizer, arguments, text, true);
    rest.remove_prefix(text.size() < rest.size() ? text.size() + 1 : text.size());
  }
}

}  // namespace
}  // namespace kvpolicy::tools

int main(int argc, char** argv) {
  using namespace kvpolicy::tools;
  Arguments arguments;
  CLI::App app{description, "tokenize"};
  app.footer(examples);
  app.add_option("--model", arguments.model, "Folder with the tokenizer")->required()->type_name("DIR");
  app.add_option("text", arguments.text, "The text; with --decode, the tokens");
  app.add_option("--file", arguments.file, "Texts, one on each line; - reads standard input")
      ->type_name("FILE");
  app.add_flag("--null-data", arguments.null_data, "Texts in the file end with a NUL byte, not a newline");
  app.add_flag("--decode", arguments.decode, "The other way: from tokens, by number, to text");
  app.add_flag("--plain", arguments.plain,
               "The spelling of a special token, such as <|im_end|>, is text like any other");
  app.add_flag("--no-special", arguments.no_special,
               "Adds no special tokens around the text; with --decode, spells out those that are there");
  app.add_flag("--json", arguments.json, "Print JSON: an array of tokens, or a string");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
