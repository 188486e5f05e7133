// SPDX-License-Identifier: Apache-2.0
#include "conversation.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace kvpolicy::tools {

Conversation::Conversation(const TextModel& model, const std::string& system)
    : model_{&model}, template_{model.tokenizer()} {
  if (!system.empty()) messages_.push_back({"system", system});
}

Conversation::Prompt Conversation::ask(const std::string& message) {
  messages_.push_back({"user", message});
  const reference::ChatText chat = template_.render(messages_);
  if (!prompt_.empty()) {
    // The model's own tokens are in the cache, so its answer need not be encoded again. What follows
    // the answer is found with another answer in its place that no template changes.
    std::vector<reference::ChatMessage> other = messages_;
    const std::string_view placeholder = "x";
    other[other.size() - 2].content = placeholder;
    const reference::ChatText next = template_.render(other);
    const std::string before = prompt_ + std::string{placeholder};
    if (next.text.starts_with(before)) {
      prompt_ = chat.text;
      return {encode(next, before.size()), false};
    }
  }
  prompt_ = chat.text;
  return {encode(chat, 0), true};
}

void Conversation::answered(const std::string& text) {
  messages_.push_back({"assistant", text});
}

std::vector<int> Conversation::encode(const reference::ChatText& chat, std::size_t first) const {
  std::vector<reference::ByteRange> literal;
  for (const reference::ByteRange& range : chat.literal) {
    if (range.begin >= first) literal.push_back({range.begin - first, range.end - first});
  }
  return model_->tokenizer().encode(std::string_view{chat.text}.substr(first),
                                    {.add_special = false, .literal = literal});
}

}  // namespace kvpolicy::tools
