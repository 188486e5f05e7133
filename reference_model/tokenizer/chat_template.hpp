// SPDX-License-Identifier: Apache-2.0
//
// Writes a conversation as the text that a model was trained on, by the template that its authors wrote (jinja/template.hpp):
//
//   const reference::ChatTemplate chat{tokenizer};
//   const std::vector<int> prompt = chat.encode({{"user", "What is the capital of France?"}});
//
// The names that a template finds are those of transformers' apply_chat_template.
#pragma once

#include <ctime>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/byte_range.hpp>
#include <reference_model/jinja/template.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::reference {

struct ChatMessage {
  std::string role;  ///< For most templates "system" as the first, then "user" and "assistant" in turn.
  std::string content;
  /// What else a message has, for example `tool_calls` or `reasoning_content`. "role" and "content" among them take the place of
  /// those above, where a content is none or a list of parts.
  std::vector<std::pair<std::string, jinja::Value>> more = {};
};

struct ChatOptions {
  bool add_generation_prompt = true;  ///< The text ends where the assistant's answer begins.
  bool thinking = true;               ///< false is told the template as `enable_thinking`: to answer at once.
  /// For templates that print the date. Without it those that can do without say a date of their own, and the others refuse.
  std::optional<std::tm> now = {};
  jinja::Value tools = jinja::Value{jinja::None{}};             ///< a list of functions as JSON schemas
  std::vector<std::pair<std::string, jinja::Value>> more = {};  ///< names of the template's own
};

struct ChatText {
  std::string text;
  std::vector<ByteRange> literal;  ///< What the messages and tools gave: no special tokens are parsed there.
};

class ChatTemplate {
 public:
  /// @throws FormatError if the tokenizer has no template, one that is not Jinja or has a statement that is not carried out, one that prints
  /// nothing of a user's message, or one that writes special tokens which the vocabulary does not have
  explicit ChatTemplate(Tokenizer tokenizer);

  /// The text with the special tokens spelled out, the bos token too.
  /// @throws ConfigError for no messages, a text that is not UTF-8, a conversation that the template refuses, or a
  /// template that does what cannot be done; FormatError for a filter, test or method that is not carried out, by its name
  [[nodiscard]] ChatText render(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;

  /// The tokens of that text. A special token's spelling inside a message is text like any other.
  /// @throws as render and Tokenizer::encode
  [[nodiscard]] std::vector<int> encode(std::span<const ChatMessage> messages,
                                        const ChatOptions& options = {}) const;

 private:
  void require_sense() const;

  Tokenizer tokenizer_;
  jinja::Template template_;
};

}  // namespace kvpolicy::reference
