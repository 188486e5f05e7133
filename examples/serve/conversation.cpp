// SPDX-License-Identifier: Apache-2.0
#include "serve/conversation.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/json_value.hpp>

namespace kvpolicy::serve {
namespace {

using reference::ChatMessage;
using reference::ChatOptions;
using reference::ChatTemplate;
namespace jinja = reference::jinja;

[[noreturn]] void refuse(const std::string& where, const std::string& why) {
  throw ApiError{400, where + " " + why, where.substr(0, where.find_first_of("[."))};
}

jinja::Value as_value(const RequestJson& json, const std::string& where) {
  try {
    return jinja::value_of(json);
  } catch (const ConfigError&) {
    refuse(where, "has a whole number that does not fit 64 bits, or is nested too deep");
  }
}

// Parts of type "text" are one text.
std::string text_of(const RequestJson& content, const std::string& where) {
  constexpr const char* wanted = "must be a text, or a list of parts of type \"text\"";
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) refuse(where, wanted);
  constexpr std::string_view known[]{"type", "text"};
  std::string text;
  for (const RequestJson& part : content) {
    if (!part.is_object() || member(part, "type") != "text" || !member(part, "text").is_string()) {
      refuse(where, wanted);
    }
    refuse_others(part, where, "messages", known);
    text += member(part, "text").get_ref<const std::string&>();
  }
  return text;
}

// Templates take the arguments of a call as an object, clients send them as a text of JSON.
RequestJson call_of(RequestJson call, const std::string& where, io::JsonLimits& limits) {
  constexpr std::string_view known[]{"id", "type", "function", "index"};
  constexpr std::string_view known_of_function[]{"name", "arguments"};
  if (!call.is_object() || !member(call, "function").is_object()) {
    refuse(where, "must be an object with a function");
  }
  refuse_others(call, where, "messages", known);
  if (member(call, "type").is_null()) call["type"] = "function";
  if (call["type"] != "function") refuse(where, "must have the type \"function\"");
  RequestJson& function = call["function"];
  refuse_others(function, where + ".function", "messages", known_of_function);
  if (!member(function, "name").is_string()) refuse(where + ".function", "must have a name");
  const RequestJson& arguments = member(function, "arguments");
  if (arguments.is_string()) {
    const auto text = arguments.get<std::string>();
    function["arguments"] =
        read_object(text.empty() ? "{}" : text, limits, where + ".function.arguments", "messages");
  } else if (!arguments.is_object()) {
    refuse(where + ".function", "must have arguments, as a text of JSON");
  }
  return call;
}

RequestJson calls_of(const RequestJson& calls, const std::string& where, io::JsonLimits& limits) {
  if (!calls.is_array()) refuse(where, "must be a list of calls");
  RequestJson all = RequestJson::array();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    all.push_back(call_of(calls[i], fmt::format("{}[{}]", where, i), limits));
  }
  return all;
}

// What clients send back of an answer although there is nothing in it.
bool is_absent(const RequestJson& value) {
  return value.is_null() || (value.is_array() && value.empty()) || value == "";
}

ChatMessage message_of(const RequestJson& given, const std::string& where, io::JsonLimits& limits) {
  if (!given.is_object() || !member(given, "role").is_string()) {
    refuse(where, "must be an object with a role and a content");
  }
  ChatMessage message{member(given, "role").get<std::string>(), {}};
  const RequestJson& content = member(given, "content");
  const bool has_calls = !is_absent(member(given, "tool_calls"));
  if (!content.is_null() || !has_calls) {
    message.content = text_of(content, where + ".content");
  } else {
    message.more.emplace_back("content", jinja::Value{jinja::None{}});
  }
  for (const auto& [name, value] : given.items()) {
    if (name == "role" || name == "content" || is_absent(value)) continue;
    const std::string member_where = where + "." + io::shortened(name, 60);
    message.more.emplace_back(
        name, as_value(name == "tool_calls" ? calls_of(value, member_where, limits) : value, member_where));
  }
  return message;
}

jinja::Value tools_of(const RequestJson& body) {
  const RequestJson& tools = member(body, "tools");
  const RequestJson& choice = member(body, "tool_choice");
  if (is_absent(tools)) {
    if (!choice.is_null() && choice != "none" && choice != "auto") {
      refuse("tool_choice", "must be \"none\" or \"auto\" where there are no tools");
    }
    return jinja::Value{jinja::None{}};
  }
  if (!tools.is_array()) refuse("tools", "must be a list of functions");
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const std::string where = fmt::format("tools[{}]", i);
    const bool is_function = tools[i].is_object() && member(tools[i], "type") == "function" &&
                             member(tools[i], "function").is_object();
    if (!is_function || !member(member(tools[i], "function"), "name").is_string()) {
      refuse(where, "must have the type \"function\", and a function with a name");
    }
  }
  // Each family of models has a notation of its own for calls.
  if (choice != "none") {
    throw ApiError{
        400,
        "tools: this server does not look for calls in what a model writes; with \"tool_choice\": \"none\" "
        "the model is told of the tools, and its answer is text",
        "tools"};
  }
  return as_value(tools, "tools");
}

ChatMessage with_content(ChatMessage message, std::string content) {
  message.content = std::move(content);
  std::erase_if(message.more, [](const auto& one) { return one.first == "content"; });
  return message;
}
ChatMessage without(ChatMessage message, std::string_view name) {
  std::erase_if(message.more, [&](const auto& one) { return one.first == name; });
  return message;
}
bool has(const ChatMessage& message, std::string_view name) {
  return std::ranges::any_of(message.more, [&](const auto& one) { return one.first == name; });
}
std::string other_text(const std::string& text) { return text.starts_with('A') ? "B" : "A"; }

// Another value of the same kind.
jinja::Value other_value(const jinja::Value& value) {
  if (value.is<bool>()) return jinja::Value{!value.as<bool>()};
  if (value.is<std::int64_t>()) return jinja::Value{value.as<std::int64_t>() == 0 ? std::int64_t{1} : 0};
  if (value.is<double>()) return jinja::Value{value.as<double>() == 0.0 ? 1.0 : 0.0};
  if (const jinja::Text* text = value.text()) return jinja::Value{other_text(text->text)};
  return jinja::Value{jinja::None{}};
}

// Compares what a template prints. Nothing is printed of a conversation that it refuses.
class Readings {
 public:
  Readings(const ChatTemplate& chat, const Conversation& conversation)
      : chat_{chat},
        conversation_{conversation},
        printed_{chat.render(conversation.messages, conversation.options).text} {}

  /// Whether the template prints something else with this message in the place of the one there.
  [[nodiscard]] bool changes_with(std::size_t place, const ChatMessage& message) const {
    std::vector<ChatMessage> other = conversation_.messages;
    other[place] = message;
    if (print(other, conversation_.options) != printed_) return true;
    // Some print of earlier answers less than of the last one, for example not how they were thought out.
    ChatOptions options = conversation_.options;
    options.add_generation_prompt = false;
    const std::span<const ChatMessage> own = conversation_.messages;
    const auto whole = print(own.first(place + 1), options);
    return whole && print(std::span<const ChatMessage>{other}.first(place + 1), options) != whole;
  }
  [[nodiscard]] bool changes_with(const ChatOptions& options) const {
    return print(conversation_.messages, options) != printed_;
  }

 private:
  [[nodiscard]] std::optional<std::string> print(std::span<const ChatMessage> messages,
                                                 const ChatOptions& options) const {
    try {
      return chat_.render(messages, options).text;
    } catch (const ConfigError&) {
      return std::nullopt;
    }
  }

  const ChatTemplate& chat_;
  const Conversation& conversation_;
  std::string printed_;
};

}  // namespace

Conversation read_conversation(const RequestJson& body, io::JsonLimits& limits, const std::tm& now) {
  const RequestJson& given = member(body, "messages");
  if (!given.is_array() || given.empty()) refuse("messages", "must be a list of at least one");
  Conversation conversation;
  for (std::size_t i = 0; i < given.size(); ++i) {
    conversation.messages.push_back(message_of(given[i], fmt::format("messages[{}]", i), limits));
  }
  conversation.options.now = now;
  conversation.options.tools = tools_of(body);
  const auto tell = [&](const std::string& name, const RequestJson& value, const std::string& where) {
    if (!value.is_null()) conversation.options.more.emplace_back(name, as_value(value, where));
  };
  tell("reasoning_effort", member(body, "reasoning_effort"), "reasoning_effort");
  const RequestJson& own = member(body, "chat_template_kwargs");
  if (own.is_null()) return conversation;
  if (!own.is_object()) refuse("chat_template_kwargs", "must be an object");
  constexpr std::string_view ours[]{"messages", "tools", "documents", "add_generation_prompt",
                                    "reasoning_effort"};
  for (const auto& [name, value] : own.items()) {
    const std::string where = "chat_template_kwargs." + io::shortened(name, 60);
    if (std::ranges::find(ours, name) != std::end(ours) || name.ends_with("_token")) {
      refuse(where, "is given to the template by the server");
    }
    tell(name, value, where);
  }
  return conversation;
}

void require_all_read(const ChatTemplate& chat, const Conversation& conversation) {
  const Readings readings{chat, conversation};
  const auto& [messages, options] = conversation;
  constexpr std::size_t most_asked = 16;
  std::set<std::string, std::less<>> asked;  // "role" or "role name"
  for (std::size_t i = messages.size(); i-- > 0;) {
    const ChatMessage& message = messages[i];
    if (asked.size() > most_asked) {
      refuse("messages", fmt::format("have more than {} roles and members of roles", most_asked));
    }
    const bool says = !message.content.empty() && !has(message, "tool_calls");
    if (says && asked.insert(message.role).second &&
        !readings.changes_with(i, with_content(message, other_text(message.content)))) {
      refuse(fmt::format("messages[{}]", i),
             fmt::format("would be left out: the model's chat template does not read what the role {} says",
                         io::in_quotes(message.role)));
    }
    for (const auto& [name, value] : message.more) {
      // These say which call a result is of, which templates know by the order, too.
      const bool only_refers = message.role == "tool" && (name == "tool_call_id" || name == "name");
      if (name == "content" || only_refers || !asked.insert(message.role + " " + name).second) continue;
      ChatMessage other = without(message, name);
      other.more.emplace_back(name, other_value(value));
      if (!readings.changes_with(i, without(message, name)) && !readings.changes_with(i, other)) {
        refuse(
            fmt::format("messages[{}]", i),
            fmt::format("has a member {} that the model's chat template does not read", io::in_quotes(name)));
      }
    }
  }
  if (!options.tools.is_none()) {
    ChatOptions other = options;
    other.tools = jinja::Value{jinja::None{}};
    if (!readings.changes_with(other)) refuse("tools", "are not read by the model's chat template");
  }
  for (std::size_t i = 0; i < options.more.size(); ++i) {
    ChatOptions missing = options, changed = options;
    missing.more.erase(missing.more.begin() + static_cast<std::ptrdiff_t>(i));
    changed.more[i].second = other_value(options.more[i].second);
    if (!readings.changes_with(missing) && !readings.changes_with(changed)) {
      const std::string& name = options.more[i].first;
      refuse(name == "reasoning_effort" ? name : "chat_template_kwargs." + io::shortened(name, 60),
             "is not read by the model's chat template");
    }
  }
}

std::vector<std::size_t> marks_of(const ChatTemplate& chat, const Conversation& conversation,
                                  std::span<const int> prompt) {
  constexpr std::size_t most_marks = 8;
  const std::vector<ChatMessage>& messages = conversation.messages;
  std::vector<std::size_t> marks;
  for (std::size_t parts = 1; parts < std::min(messages.size(), most_marks + 1); ++parts) {
    std::vector<ChatMessage> other{messages.begin(),
                                   messages.begin() + static_cast<std::ptrdiff_t>(parts + 1)};
    other.back() = with_content(other.back(), other_text(other.back().content));
    std::vector<int> tokens;
    try {
      tokens = chat.encode(other, conversation.options);
    } catch (const ConfigError&) {
      continue;  // to some templates a conversation that ends here is none
    }
    const auto common = static_cast<std::size_t>(std::ranges::mismatch(tokens, prompt).in1 - tokens.begin());
    if (common > 0 && common < prompt.size() && (marks.empty() || common > marks.back())) {
      marks.push_back(common);
    }
  }
  return marks;
}

}  // namespace kvpolicy::serve
