// SPDX-License-Identifier: Apache-2.0
//
// The conversation of a chat request: messages, tools, and what else a client tells the model's chat template. What the template would
// not read is refused, because a model that does not see what its user wrote answers something else.
#pragma once

#include <cstddef>
#include <ctime>
#include <span>
#include <vector>

#include <reference_model/tokenizer/chat_template.hpp>

#include "serve/request_json.hpp"

namespace kvpolicy::serve {

struct Conversation {
  std::vector<reference::ChatMessage> messages;
  reference::ChatOptions options;
};

/// Members of a chat request that belong to the conversation.
inline constexpr std::string_view conversation_members[]{"messages", "tools", "tool_choice",
                                                         "reasoning_effort", "chat_template_kwargs"};

/// `limits`: what the body has left, for the texts of JSON in it. @throws ApiError for what is not OpenAI's form
[[nodiscard]] Conversation read_conversation(const RequestJson& body, io::JsonLimits& limits,
                                             const std::tm& now);

/// Asks the template whether it reads what each role says, each further member of a message, the tools and its own names, by changing
/// them: a few renderings, however long the conversation is.
/// @throws ApiError for what it does not; ConfigError for a conversation that it refuses
void require_all_read(const reference::ChatTemplate& chat, const Conversation& conversation);

/// Where the first messages end in `prompt`, for conversations that begin alike: what is the same in the tokens of one that parts
/// there. @throws as ChatTemplate::encode
[[nodiscard]] std::vector<std::size_t> marks_of(const reference::ChatTemplate& chat,
                                                const Conversation& conversation,
                                                std::span<const int> prompt);

}  // namespace kvpolicy::serve
