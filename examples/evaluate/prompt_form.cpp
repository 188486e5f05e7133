// SPDX-License-Identifier: Apache-2.0
#include "prompt_form.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <reference_model/tokenizer/chat_template.hpp>

namespace kvpolicy::tools {

PromptForm::Markup PromptForm::markup_of(const TextModel& model) {
  const std::array messages{reference::ChatMessage{"user", "x"}};
  const reference::ChatText chat = reference::ChatTemplate{model.tokenizer()}.render(messages);
  // Beside the message only its role may be there, because a template's own system message is markup.
  const auto is_message = [&](reference::ByteRange range) {
    return std::string_view{chat.text}.substr(range.begin, range.end - range.begin) == messages[0].content;
  };
  const auto found = std::ranges::find_if(chat.literal, is_message);
  require<FormatError>(found != chat.literal.end(),
                       "the chat template does not print a user's message as it is");
  const reference::ByteRange message = *found;
  return {chat.text.substr(0, message.begin), chat.text.substr(message.end)};
}

void PromptForm::Written::add_content(std::string_view more) {
  if (!more.empty()) literal.push_back({text.size(), text.size() + more.size()});
  text += more;
}

PromptForm::PromptForm(const TextModel& model, bool chat)
    : model_{&model}, chat_{chat ? std::optional{markup_of(model)} : std::nullopt} {}

// Some templates strip messages. Texts of tasks neither begin nor end with white space, so they need
// not be stripped here.
PromptForm::Written PromptForm::opened(std::string_view body) const {
  Written written{chat_->before, {}};
  written.add_content(body);
  return written;
}

std::vector<int> PromptForm::encode(const Written& written, std::size_t first) const {
  std::vector<reference::ByteRange> literal;
  for (const reference::ByteRange& range : written.literal) {
    if (range.end > first) literal.push_back({std::max(range.begin, first) - first, range.end - first});
  }
  return model_->tokenizer().encode(std::string_view{written.text}.substr(first),
                                    {.add_special = false, .literal = literal});
}

std::string PromptForm::text(std::string_view body) const {
  return chat_ ? opened(body).text : std::string{body};
}

std::vector<int> PromptForm::tokens(std::string_view body) const {
  return chat_ ? encode(opened(body)) : model_->encode(body);
}

LanguagePrompt PromptForm::ask(std::string_view body, LanguageQuestion question) const {
  LanguagePrompt prompt{std::move(question)};
  if (!chat_) {
    prompt.text = prompt.question.prompt();
    prompt.tokens = model_->encode_after(body, prompt.text);
    return prompt;
  }
  Written written = opened(body);
  const std::vector<int> front = encode(written);
  const std::size_t end = written.text.size();
  const auto& [text, lead_in, answers, choices, most, depth] = prompt.question;
  if (lead_in.empty()) {
    written.add_markup(chat_->after);
    written.add_content(std::string_view{text}.substr(std::min(text.find_first_not_of(" \n"), text.size())));
  } else {
    written.add_content(text);
    written.add_markup(chat_->after);
    written.add_content(lead_in);
  }
  prompt.text = written.text.substr(end);
  // The tokens of both parts together, where that leaves those of the first as they are.
  const std::vector<int> whole = encode(written);
  const auto rest = std::ranges::mismatch(front, whole);
  prompt.tokens = rest.in1 == front.end() ? std::vector<int>{rest.in2, whole.end()} : encode(written, end);
  return prompt;
}

std::size_t PromptForm::overhead() const {
  // A lead-in may take more tokens where no space stands before it.
  constexpr std::size_t without_space = 2;
  return tokens("").size() + (chat_ ? encode({chat_->after, {}}).size() + without_space : 0);
}

}  // namespace kvpolicy::tools
