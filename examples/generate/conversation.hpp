// SPDX-License-Identifier: Apache-2.0
//
// A conversation with a model over one cache: each turn's prompt is what the cache does not hold
// yet.
#pragma once

#include <string>
#include <vector>

#include <reference_model/tokenizer/chat_template.hpp>

#include "../common/text_model.hpp"

namespace kvpolicy::tools {

class Conversation {
 public:
  struct Prompt {
    std::vector<int> tokens;
    /// The cache must be empty: it is the first turn, or the template now writes the earlier turns
    /// in another way than the cache holds them (Qwen3 drops an answer's thoughts, Llama 3 the
    /// spaces around it).
    bool from_start = true;
  };

  /// `system`: the system message; empty for the template's own. `model` must outlive this object.
  /// @throws FormatError as reference::ChatTemplate
  Conversation(const TextModel& model, const std::string& system);

  /// The user's next message. The tokens follow all that the model has read and written.
  /// @throws ConfigError as ChatTemplate::render; then the message is not part of the conversation
  [[nodiscard]] Prompt ask(const std::string& message);

  /// What the model answered, without the token that ended it.
  void answered(const std::string& text);

 private:
  [[nodiscard]] std::vector<int> encode(const reference::ChatText& chat, std::size_t first) const;

  const TextModel* model_;
  reference::ChatTemplate template_;
  std::tm now_;  // when the conversation began: a later one would change what the cache has read
  std::vector<reference::ChatMessage> messages_;
  std::string prompt_;  // the text of the latest prompt and all before it
};

}  // namespace kvpolicy::tools
