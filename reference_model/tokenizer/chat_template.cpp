// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/chat_template.hpp>

#include <algorithm>
#include <array>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference {
namespace {

const std::string& template_of(const Tokenizer& tokenizer) {
  require<FormatError>(!tokenizer.chat_template().empty(),
                       "the model has no chat template: it may be a base model, which continues a text");
  return tokenizer.chat_template();
}

using Items = std::vector<std::pair<jinja::Value, jinja::Value>>;

jinja::Value given(const std::string& text) { return jinja::Value{jinja::Text{text, /*is_given=*/true}}; }

jinja::Value value_of(const ChatMessage& message) {
  Items items{{"role", given(message.role)}, {"content", given(message.content)}};
  for (const auto& [name, value] : message.more) items.emplace_back(jinja::Value{name}, value);
  return jinja::Value::dict(std::move(items));
}

}  // namespace

ChatTemplate::ChatTemplate(Tokenizer tokenizer)
    : tokenizer_{std::move(tokenizer)}, template_{template_of(tokenizer_)} {
  require_sense();
}

/// What is no template prints its own text, and a template of another model tokens that this one has never seen: they would be
/// read as letters.
void ChatTemplate::require_sense() const {
  ChatText written;
  try {
    written = render(std::array{ChatMessage{"user", "x"}});
  } catch (const ConfigError&) {
    return;  // this conversation is not one of its
  }
  require<FormatError>(!written.literal.empty(),
                       "the chat template prints nothing of a user's message; it begins ",
                       io::in_quotes(tokenizer_.chat_template()));
  std::string_view rest = written.text;
  for (std::size_t begin = 0; (begin = rest.find("<|", begin)) != rest.npos; begin += 2) {
    const std::size_t end = rest.find("|>", begin + 2);
    if (end == rest.npos) return;
    const std::string_view token = rest.substr(begin, end + 2 - begin);
    if (token.find_first_of(" \n\t<", 1) != token.npos) continue;
    require<FormatError>(tokenizer_.find(token).has_value(), "the chat template writes ",
                         io::in_quotes(token), ", which is no token of this tokenizer");
  }
}

ChatText ChatTemplate::render(std::span<const ChatMessage> messages, const ChatOptions& options) const {
  require(!messages.empty(), "a conversation needs at least one message");
  std::vector<jinja::Value> all;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    for (const std::string* text : {&messages[i].role, &messages[i].content}) {
      require(valid_utf8(*text) == *text, "message ", i, " is not UTF-8");
    }
    all.push_back(value_of(messages[i]));
  }
  std::map<std::string, jinja::Value, std::less<>> names{
      {"messages", jinja::Value::list(std::move(all))},
      {"add_generation_prompt", jinja::Value{options.add_generation_prompt}},
      {"tools", options.tools},
      {"documents", jinja::Value{jinja::None{}}}};
  for (const auto& [name, spelling] : tokenizer_.named_tokens())
    names.insert_or_assign(name, jinja::Value{spelling});
  if (!options.thinking) names.insert_or_assign("enable_thinking", jinja::Value{false});
  for (const auto& [name, value] : options.more) names.insert_or_assign(name, value);
  jinja::Text text = template_.render(std::move(names), {.now = options.now});
  return {std::move(text.text), std::move(text.given)};
}

std::vector<int> ChatTemplate::encode(std::span<const ChatMessage> messages,
                                      const ChatOptions& options) const {
  const ChatText chat = render(messages, options);
  return tokenizer_.encode(chat.text, {.add_special = false, .literal = chat.literal});
}

}  // namespace kvpolicy::reference
