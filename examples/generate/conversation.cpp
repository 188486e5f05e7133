// SPDX-License-Identifier: Apache-2.0
#include "conversation.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include "../common/local_time.hpp"

namespace kvpolicy::tools {

Conversation::Conversation(const TextModel& model, const std::string& system)
    : model_{&model}, template_{model.tokenizer()}, now_{local_time()} {
  if (!system.empty()) messages_.push_back({"system", system});
}

Conversation::Prompt Conversation::ask(const std::string& message) {
  std::vector<reference::ChatMessage> messages = messages_;
  messages.push_back({"user", message});
  reference::ChatText chat = template_.render(messages, {.now = now_});
  // The cache holds the latest prompt and the model's own tokens after it. Where the template
  // writes both as they are, only what follows them is read.
  const std::string held = prompt_.empty() ? "" : prompt_ + messages_.back().content;
  const bool from_start = held.empty() || !chat.text.starts_with(held);
  Prompt prompt{encode(chat, from_start ? 0 : held.size()), from_start};
  messages_ = std::move(messages);
  prompt_ = std::move(chat.text);
  return prompt;
}

void Conversation::answered(const std::string& text) { messages_.push_back({"assistant", text}); }

std::vector<int> Conversation::encode(const reference::ChatText& chat, std::size_t first) const {
  std::vector<reference::ByteRange> literal;
  for (const reference::ByteRange& range : chat.literal) {
    if (range.end > first) literal.push_back({std::max(range.begin, first) - first, range.end - first});
  }
  return model_->tokenizer().encode(std::string_view{chat.text}.substr(first),
                                    {.add_special = false, .literal = literal});
}

}  // namespace kvpolicy::tools
