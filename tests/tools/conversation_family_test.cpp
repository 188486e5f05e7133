// SPDX-License-Identifier: Apache-2.0
//
// A conversation under the template of every family: the cache goes on where the template writes an
// answer as it is, and begins again where it does not.
#include <generate/conversation.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "byte_model.hpp"
#include "support/source_dir.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

const nlohmann::json& goldens() {
  static const nlohmann::json all =
      nlohmann::json::parse(io::read_text_file(testing::source_dir() + "/tests/tokenizer/goldens/chat.json"));
  return all;
}

/// All of ASCII as tokens of one character, and the special tokens of a template.
TextModel model_with(const std::string& chat_template, const std::vector<std::string>& special) {
  reference::TokenizerParts parts;
  parts.origin = "ascii";
  parts.chat_template = chat_template;
  parts.named_tokens = {{"bos_token", special[0]}, {"eos_token", special[1]}};
  for (int c = 1; c < 128; ++c) parts.tokens.emplace_back(1, static_cast<char>(c));
  for (const std::string& token : special) {
    parts.added.push_back({.id = static_cast<int>(parts.tokens.size()), .special = true});
    parts.tokens.push_back(token);
  }
  const std::size_t vocabulary = parts.tokens.size();
  return {random_byte_model(vocabulary), reference::Tokenizer{parts}};
}

}  // namespace

TEST_CASE("after every answer the cache holds what the template writes, in every family") {
  const std::vector<std::string> answers{"It is so.", " It is so.", "It is so.\n",
                                         "<think>\nwell\n</think>\n\nIt is so."};
  // For each answer whether the template writes it as it is (=), so that the cache goes on.
  const std::vector<std::pair<std::string, std::string>> written{
      {"ChatML", "===="},  {"Qwen3", "===r"},        {"Llama 2", "r=rr"},
      {"Llama 3", "=rr="}, {"Mistral v0.3", "r=rr"}, {"Mistral v0.2 with a system message", "rrrr"},
      {"Mistral", "===="}};
  REQUIRE(goldens().size() > 10);
  for (const auto& golden : goldens()) {
    const auto name = golden["name"].get<std::string>();
    const auto family =
        std::ranges::find_if(written, [&](const auto& known) { return name.starts_with(known.first); });
    REQUIRE(family != written.end());
    const TextModel model = model_with(golden["template"], golden["tokens"]);
    for (std::size_t i = 0; i < answers.size(); ++i) {
      CAPTURE(name);
      CAPTURE(answers[i]);
      Conversation conversation{model, ""};
      std::vector<int> held = conversation.ask("Is it?").tokens;
      const std::vector<int> said = model.encode_after({}, answers[i]);
      held.insert(held.end(), said.begin(), said.end());
      conversation.answered(answers[i]);
      const Conversation::Prompt next = conversation.ask("Why?");
      CHECK(next.from_start == (family->second[i] == 'r'));
      if (next.from_start) held.clear();
      held.insert(held.end(), next.tokens.begin(), next.tokens.end());
      const std::vector<reference::ChatMessage> messages{
          {"user", "Is it?"}, {"assistant", answers[i]}, {"user", "Why?"}};
      CHECK(held == reference::ChatTemplate{model.tokenizer()}.encode(messages));
    }
  }
}

TEST_CASE("a message that is refused is not part of the conversation") {
  const TextModel model = model_with(goldens().front()["template"], goldens().front()["tokens"]);
  Conversation conversation{model, ""};
  CHECK_THROWS_AS((void)conversation.ask("\xFF"), ConfigError);
  CHECK(conversation.ask("so").tokens == reference::ChatTemplate{model.tokenizer()}.encode(
                                             std::vector<reference::ChatMessage>{{"user", "so"}}));
}
