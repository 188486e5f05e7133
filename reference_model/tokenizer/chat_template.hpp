// SPDX-License-Identifier: Apache-2.0
//
// Writes a conversation as the text that a model was trained on:
//
//   const reference::ChatTemplate chat{tokenizer};
//   const std::vector<int> prompt = chat.encode({{"user", "What is the capital of France?"}});
//
// There is no Jinja interpreter here. The templates of the supported families are recognised by the
// parts that print messages; any other template is refused, for a wrong prompt only shows in poor
// answers. Tools and tool calls are not supported.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::reference {

struct ChatMessage {
  std::string role;  ///< "system", only as the first; "user" or "assistant"
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = true;  ///< The text ends where the assistant's answer begins.
  bool thinking = true;               ///< Qwen3: false tells the model to answer at once.
  /// Llama 3.1 and later: today's date in the system message. The default is what the templates say
  /// where no clock is at hand.
  std::string date = "26 Jul 2024";
};

struct ChatText {
  std::string text;
  std::vector<ByteRange> literal;  ///< Where the messages' contents are: no special tokens are parsed there.
};

class ChatTemplate {
 public:
  /// Recognises the tokenizer's template.
  /// @throws FormatError if it has none, one of no known family, or one whose special tokens the
  /// vocabulary does not have
  explicit ChatTemplate(Tokenizer tokenizer);

  /// The family, for example "ChatML".
  [[nodiscard]] std::string_view name() const noexcept;

  /// The text with the special tokens spelled out, the bos token too.
  /// @throws ConfigError for no messages, an unknown role, or an order of roles that the family
  /// does not have
  [[nodiscard]] ChatText render(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;

  /// The tokens of that text. A special token's spelling inside a message is text like any other.
  /// @throws as render and Tokenizer::encode
  [[nodiscard]] std::vector<int> encode(std::span<const ChatMessage> messages,
                                        const ChatOptions& options = {}) const;

 private:
  enum class Family : std::uint8_t { chatml, qwen3, llama2, llama3, llama3_1, mistral };

  Tokenizer tokenizer_;
  Family family_ = Family::chatml;
  std::string system_;       // ChatML's system message where the conversation has none; empty for none
  std::size_t mistral_ = 0;  // which of Mistral's spellings
};

/// What a Jinja template does, in one spelling: its tags alone, "{...}" for those that print,
/// without white space, with 'single quotes', and message.role for message['role'].
/// @throws FormatError if text between tags would be printed, or a tag does not end
[[nodiscard]] std::string normalized_template(std::string_view jinja);

}  // namespace kvpolicy::reference
