// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/chat_template.hpp>

#include <algorithm>
#include <array>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/unicode.hpp>
#include <reference_model/tokenizer/utf8.hpp>

namespace kvpolicy::reference {
namespace {

/// Mistral's templates differ by spaces. The first two print no system message.
struct MistralSpelling {
  std::string_view user_code;
  std::string_view assistant_code;
  std::string_view system_code;  // empty: the family has no system message
  std::string_view before_user;
  std::string_view after_user;
  std::string_view before_assistant;
  std::string_view after_assistant;
  bool trims_assistant;
  bool system_in_last;  // in the last message rather than the first
};

constexpr std::array mistral_spellings = {
    MistralSpelling{"{'[INST] '+message.content+' [/INST]'}", "{message.content+eos_token}", "", "[INST] ",
                    " [/INST]", "", "</s>", false, false},
    MistralSpelling{"{'[INST] '+message.content+' [/INST]'}", "{message.content+eos_token+' '}", "",
                    "[INST] ", " [/INST]", "", "</s> ", false, false},
    MistralSpelling{"{' [INST] '+message.content+' [/INST]'}", "{' '+message.content+eos_token}",
                    "{' [INST] '+system_message+'\n\n'+message.content+' [/INST]'}", " [INST] ", " [/INST]",
                    " ", "</s>", false, false},
    MistralSpelling{"{'[INST] '+message.content+'[/INST]'}", "{' '+message.content|trim+eos_token}",
                    "{'[INST] '+system_message+'\n\n'+message.content+'[/INST]'}", "[INST] ", "[/INST]", " ",
                    "</s>", true, true},
};

constexpr std::string_view known_families =
    "ChatML (Qwen2, Qwen2.5, SmolLM2), Qwen3, Llama 2, Llama 3, Llama 3.1 to 3.3, Mistral 7B v0.1 "
    "to v0.3";

/// What Python's str.strip() removes.
std::string_view stripped(std::string_view text) {
  const auto goes = [](char32_t code) { return (code >= 0x1C && code <= 0x1F) || is_white_space(code); };
  while (!text.empty() && goes(first_code(text))) text.remove_prefix(first_character(text).bytes);
  while (!text.empty() && goes(first_code(text.substr(last_character(text))))) {
    text = text.substr(0, last_character(text));
  }
  return text;
}

std::string_view without_newlines(std::string_view text, bool at_end = true) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  while (at_end && text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

/// Builds the text, and remembers which parts are messages.
class Writer {
 public:
  Writer& markup(std::string_view text) {
    written_.text.append(text);
    return *this;
  }
  Writer& content(std::string_view text) {
    const std::size_t begin = written_.text.size();
    written_.text.append(text);
    if (!text.empty()) written_.literal.push_back({begin, written_.text.size()});
    return *this;
  }
  [[nodiscard]] ChatText take() { return std::move(written_); }

 private:
  ChatText written_;
};

using Messages = std::span<const ChatMessage>;

/// The messages after the system message.
Messages without_system(Messages messages) {
  return !messages.empty() && messages.front().role == "system" ? messages.subspan(1) : messages;
}

void write_chatml(Writer& writer, Messages messages, std::string_view system) {
  if (messages.front().role != "system" && !system.empty()) {
    writer.markup("<|im_start|>system\n").markup(system).markup("<|im_end|>\n");
  }
  for (const auto& [role, content] : messages) {
    writer.markup("<|im_start|>").markup(role).markup("\n").content(content).markup("<|im_end|>\n");
  }
}

/// An answer's thoughts are kept only after the latest question.
void write_qwen3(Writer& writer, Messages messages) {
  std::size_t question = messages.size();
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string_view content = messages[i].content;
    const bool tool = content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
    if (messages[i].role == "user" && !tool) question = i;
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    std::string_view content = messages[i].content;
    std::string_view thoughts;
    writer.markup("<|im_start|>").markup(messages[i].role).markup("\n");
    if (messages[i].role == "assistant") {
      const std::size_t first_end = content.find("</think>");
      if (first_end != content.npos) {
        thoughts = content.substr(0, first_end);
        while (thoughts.ends_with('\n')) thoughts.remove_suffix(1);
        const std::size_t begin = thoughts.rfind("<think>");
        if (begin != thoughts.npos) thoughts.remove_prefix(begin + 7);
        content = without_newlines(content.substr(content.rfind("</think>") + 8), false);
      }
      if (i > question && (i + 1 == messages.size() || !without_newlines(thoughts, false).empty())) {
        writer.markup("<think>\n").content(without_newlines(thoughts)).markup("\n</think>\n\n");
        content = without_newlines(content, false);
      }
    }
    writer.content(content).markup("<|im_end|>\n");
  }
}

void write_llama2(Writer& writer, Messages messages) {
  const Messages turns = without_system(messages);
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const std::string_view content = turns[i].content;
    if (turns[i].role == "assistant") {
      writer.markup(" ").content(stripped(content)).markup(" </s>");
    } else if (i == 0 && turns.size() < messages.size()) {
      // The template strips the whole, its own markup too: only the end of the question goes, or,
      // if the question is all white space, the line breaks before it.
      writer.markup("<s>[INST] <<SYS>>\n").content(messages.front().content).markup("\n<</SYS>>");
      if (const std::string_view question = stripped(content); !question.empty()) {
        const auto length = static_cast<std::size_t>(question.data() + question.size() - content.data());
        writer.markup("\n\n").content(content.substr(0, length));
      }
      writer.markup(" [/INST]");
    } else {
      writer.markup("<s>[INST] ").content(stripped(content)).markup(" [/INST]");
    }
  }
}

void write_llama3(Writer& writer, Messages messages, const std::string* date) {
  writer.markup("<|begin_of_text|>");
  const auto header = [&](std::string_view role) {
    writer.markup("<|start_header_id|>").markup(role).markup("<|end_header_id|>\n\n");
  };
  if (date != nullptr) {
    header("system");
    writer.markup("Cutting Knowledge Date: December 2023\nToday Date: ").markup(*date).markup("\n\n");
    if (messages.front().role == "system") writer.content(stripped(messages.front().content));
    writer.markup("<|eot_id|>");
    messages = without_system(messages);
  }
  for (const auto& [role, content] : messages) {
    header(role);
    writer.content(stripped(content)).markup("<|eot_id|>");
  }
}

void write_mistral(Writer& writer, Messages messages, const MistralSpelling& spelling) {
  const Messages turns = without_system(messages);
  const bool has_system = turns.size() < messages.size();
  require(!has_system || !spelling.system_code.empty(),
          "this Mistral template has no system message; put it into the first user message");
  writer.markup("<s>");
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const std::string_view content = turns[i].content;
    if (turns[i].role == "assistant") {
      writer.markup(spelling.before_assistant)
          .content(spelling.trims_assistant ? stripped(content) : content)
          .markup(spelling.after_assistant);
      continue;
    }
    writer.markup(spelling.before_user);
    if (has_system && i == (spelling.system_in_last ? turns.size() - 1 : 0)) {
      writer.content(messages.front().content).markup("\n\n");
    }
    writer.content(content).markup(spelling.after_user);
  }
}

void require_order(Messages messages, bool alternating) {
  require(!messages.empty(), "a conversation needs at least one message");
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    require(role == "user" || role == "assistant" || role == "system", "message ", i, " has the role ",
            io::in_quotes(role), ", must be system, user or assistant");
    require(role != "system" || i == 0, "message ", i, " has the role system; only the first may");
    require(valid_utf8(messages[i].content) == messages[i].content, "message ", i, " is not UTF-8");
  }
  const Messages turns = without_system(messages);
  require(!turns.empty(), "a conversation needs a message after the system message");
  for (std::size_t i = 0; alternating && i < turns.size(); ++i) {
    const std::string_view expected = i % 2 == 0 ? "user" : "assistant";
    require(turns[i].role == expected, "message ", i + (messages.size() - turns.size()), " has the role ",
            turns[i].role, ", must be ", expected, ": in this template they alternate");
  }
}

/// ChatML's own system message, where the template has one.
std::string default_system(std::string_view code) {
  constexpr std::string_view before = "'<|im_start|>system\n";
  constexpr std::string_view after = "<|im_end|>\n'";
  for (std::size_t at = code.find(before); at != code.npos; at = code.find(before, at + 1)) {
    const std::string_view text = code.substr(at + before.size());
    const std::size_t end = text.find('\'');
    if (end == text.npos || end == 0) continue;
    if (text.substr(0, end + 1).ends_with(after)) return std::string{text.substr(0, end + 1 - after.size())};
  }
  return {};
}

}  // namespace

ChatTemplate::ChatTemplate(Tokenizer tokenizer) : tokenizer_{std::move(tokenizer)} {
  require<FormatError>(!tokenizer_.chat_template().empty(),
                       "the model has no chat template: it may be a base model, which continues a text");
  const std::string code = normalized_template(tokenizer_.chat_template());
  const auto has = [&](std::string_view part) { return code.find(part) != code.npos; };
  const bool im_end = has("+message.content+'<|im_end|>'+'\n'}") || has("+message.content+'<|im_end|>\n'}") ||
                      has("+content+'<|im_end|>'+'\n'}") || has("+content+'<|im_end|>\n'}");
  std::vector<std::string_view> needed;
  bool known = true;
  if (has("'<|im_start|>'+message.role+'\n'+") && im_end && has("{'<|im_start|>assistant\n'}") &&
      !has("bos_token")) {
    family_ = Family::chatml;
    needed = {"<|im_start|>", "<|im_end|>"};
    system_ = default_system(code);
    if (has("reasoning_content")) {
      family_ = Family::qwen3;
      known = has("loop.index0>ns.last_query_index") && has("{'<think>\n\n</think>\n\n'}") &&
              has("enable_thinkingisfalse") && has("loop.lastor(notloop.lastandreasoning_content)") &&
              system_.empty();
    } else {
      known = !has("trim") && !has("strip(") && !has("+content+");
    }
  } else if (has("'<|start_header_id|>'+message.role+'<|end_header_id|>\n\n'+message.content|trim+'"
                 "<|eot_id|>'") &&
             has("bos_token") && has("{'<|start_header_id|>assistant<|end_header_id|>\n\n'}")) {
    family_ = Family::llama3;
    needed = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    if (has("system_message")) {
      family_ = Family::llama3_1;
      known = has("{'Cutting Knowledge Date: December 2023\n'}") &&
              has("{'Today Date: '+date_string+'\n\n'}") && has("{system_message}");
    }
  } else if (has("'<<SYS>>\n'+system_message+'\n<</SYS>>\n\n'+message.content") &&
             has("{bos_token+'[INST] '+content.strip()+' [/INST]'}") &&
             has("{' '+content.strip()+' '+eos_token}")) {
    family_ = Family::llama2;
    needed = {"<s>", "</s>"};
    known = !has("true==true") && !has("add_generation_prompt");
  } else {
    const auto spelling =
        std::find_if(mistral_spellings.begin(), mistral_spellings.end(), [&](const MistralSpelling& one) {
          return has(one.user_code) && has(one.assistant_code) &&
                 (one.system_code.empty() ? !has("system_message") : has(one.system_code));
        });
    known = spelling != mistral_spellings.end() && has("{bos_token}") &&
            (spelling->system_code.empty() ||
             has(spelling->system_in_last ? "%ifloop.lastandsystem_messageisdefined%"
                                          : "%ifloop.firstandsystem_messageisdefined%"));
    if (known) {
      family_ = Family::mistral;
      needed = {"<s>", "</s>"};
      mistral_ = static_cast<std::size_t>(spelling - mistral_spellings.begin());
    }
  }
  require<FormatError>(known, "the chat template is not known; known are those of ", known_families,
                       ". It begins ", io::in_quotes(tokenizer_.chat_template()));
  for (const std::string_view token : needed) {
    const std::optional<int> id = tokenizer_.find(token);
    require<FormatError>(id && tokenizer_.is_special(*id), "the chat template of ", name(), " needs ", token,
                         ", which is no special token of this tokenizer");
  }
}

std::string_view ChatTemplate::name() const noexcept {
  constexpr std::array<std::string_view, 6> names = {"ChatML",  "Qwen3",     "Llama 2",
                                                     "Llama 3", "Llama 3.1", "Mistral"};
  return names[static_cast<std::size_t>(family_)];
}

ChatText ChatTemplate::render(Messages messages, const ChatOptions& options) const {
  require_order(messages, family_ == Family::llama2 || family_ == Family::mistral);
  Writer writer;
  switch (family_) {
    case Family::chatml: write_chatml(writer, messages, system_); break;
    case Family::qwen3: write_qwen3(writer, messages); break;
    case Family::llama2: write_llama2(writer, messages); break;
    case Family::llama3: write_llama3(writer, messages, nullptr); break;
    case Family::llama3_1: write_llama3(writer, messages, &options.date); break;
    case Family::mistral: write_mistral(writer, messages, mistral_spellings[mistral_]); break;
  }
  if (options.add_generation_prompt) {
    if (family_ == Family::chatml || family_ == Family::qwen3) writer.markup("<|im_start|>assistant\n");
    if (family_ == Family::qwen3 && !options.thinking) writer.markup("<think>\n\n</think>\n\n");
    if (family_ == Family::llama3 || family_ == Family::llama3_1) {
      writer.markup("<|start_header_id|>assistant<|end_header_id|>\n\n");
    }
  }
  return writer.take();
}

std::vector<int> ChatTemplate::encode(Messages messages, const ChatOptions& options) const {
  const ChatText chat = render(messages, options);
  return tokenizer_.encode(chat.text, {.add_special = false, .literal = chat.literal});
}

}  // namespace kvpolicy::reference
