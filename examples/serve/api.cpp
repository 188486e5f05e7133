// SPDX-License-Identifier: Apache-2.0
#include "serve/api.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>

#include "common/error_text.hpp"
#include "common/local_time.hpp"
#include "serve/conversation.hpp"
#include "tool_plan.hpp"

namespace kvpolicy::serve {

using nlohmann::json;

namespace {

// Members that change nothing here, and those that would have to: with these values alone, which are defaults that
// clients send, they are taken.
constexpr std::string_view read_of_all[]{"max_tokens",    "max_completion_tokens",
                                         "temperature",   "top_p",
                                         "top_k",         "seed",
                                         "stop",          "stream",
                                         "kv_plan",       "model",
                                         "stream_options"};
constexpr std::string_view ignored[]{"user",         "metadata",          "store",
                                     "service_tier", "safety_identifier", "prompt_cache_key"};

using Defaults = std::vector<std::pair<std::string_view, std::vector<RequestJson>>>;
const Defaults defaults_of_all{{"n", {1}},
                               {"presence_penalty", {0}},
                               {"frequency_penalty", {0}},
                               {"repetition_penalty", {1}},
                               {"min_p", {0}},
                               {"ignore_eos", {false}},
                               {"logit_bias", {RequestJson::object()}}};
const Defaults defaults_of_completions{
    {"best_of", {1}}, {"echo", {false}}, {"logprobs", {false}}, {"suffix", {""}}};
const Defaults defaults_of_chat{{"logprobs", {false}},
                                {"top_logprobs", {0}},
                                {"functions", {RequestJson::array()}},
                                {"function_call", {"none", "auto"}},
                                {"parallel_tool_calls", {true, false}},
                                {"response_format", {{{"type", "text"}}}},
                                {"modalities", {RequestJson::array({"text"})}},
                                {"verbosity", {"medium"}}};

bool is_among(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// @throws ApiError for a member that is not known, or has a value that is not carried out
void require_served(const RequestJson& body, bool chat) {
  constexpr std::string_view prompt[]{"prompt"};
  for (const auto& [name, value] : body.items()) {
    if (value.is_null() || is_among(read_of_all, name) || is_among(ignored, name)) continue;
    if (is_among(chat ? std::span<const std::string_view>{conversation_members} : prompt, name)) continue;
    const auto is_it = [&key = name](const auto& one) { return one.first == key; };
    const Defaults& own = chat ? defaults_of_chat : defaults_of_completions;
    auto found = std::ranges::find_if(own, is_it);
    if (found == own.end()) {
      found = std::ranges::find_if(defaults_of_all, is_it);
      if (found == defaults_of_all.end()) {
        throw ApiError{400, fmt::format("{} is not known here", io::shortened(name, 60)),
                       io::shortened(name, 60)};
      }
    }
    if (std::ranges::find(found->second, value) != found->second.end()) continue;
    throw ApiError{
        400, fmt::format("{} is not supported: it may be left out, or be {}", name, found->second[0].dump()),
        name};
  }
}

std::vector<std::string> stops_of(const RequestJson& body) {
  const RequestJson& value = member(body, "stop");
  std::vector<std::string> stops;
  if (value.is_null()) return stops;
  const auto add = [&](const RequestJson& one) {
    if (!one.is_string() || one.get_ref<const std::string&>().empty() ||
        one.get_ref<const std::string&>().size() > 1000) {
      throw ApiError{400, "stop must be a text, or a list of texts, of 1 to 1,000 bytes each", "stop"};
    }
    if (stops.size() == 8) throw ApiError{400, "stop has more than 8 texts", "stop"};
    stops.push_back(one.get<std::string>());
  };
  if (value.is_array()) {
    for (const RequestJson& one : value) add(one);
  } else {
    add(value);
  }
  return stops;
}

bool wants_usage(const RequestJson& body) {
  const RequestJson& options = member(body, "stream_options");
  if (options.is_null()) return false;
  if (!options.is_object()) throw ApiError{400, "stream_options must be an object", "stream_options"};
  for (const char* other : {"include_obfuscation", "continuous_usage_stats"}) {
    if (flag(options, other)) {
      throw ApiError{400, fmt::format("stream_options: {} is not supported", other), "stream_options"};
    }
  }
  constexpr std::string_view known[]{"include_usage", "include_obfuscation", "continuous_usage_stats"};
  refuse_others(options, "stream_options", "stream_options", known);
  return flag(options, "include_usage");
}

// Without the place of the model's files, and with the client's word for a plan.
std::string for_clients(std::string text, std::string folder, const std::string& name) {
  const auto replace = [&](std::string_view from, std::string_view to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) {
      text.replace(at, from.size(), to);
    }
  };
  while (folder.ends_with('/')) folder.pop_back();
  if (folder.find('/') != folder.npos) replace(folder, name);
  replace("--plan", "kv_plan");
  return text;
}

// Any 64 bits.
std::uint64_t seed_of(const RequestJson& body) {
  const RequestJson& seed = member(body, "seed");
  if (seed.is_number_integer()) return seed.get<std::uint64_t>();
  if (!seed.is_null()) {
    throw ApiError{400, fmt::format("seed must be a whole number of 64 bits, is {}", io::shown(seed)),
                   "seed"};
  }
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

template <class Semaphore>
class PlaceIn {
 public:
  explicit PlaceIn(Semaphore& places) : places_{places} {
    if (!places_.try_acquire_for(std::chrono::seconds{2})) {
      throw ApiError{503, "too many large requests are being read; try again later"};
    }
  }
  ~PlaceIn() { places_.release(); }
  PlaceIn(const PlaceIn&) = delete;
  PlaceIn& operator=(const PlaceIn&) = delete;

 private:
  Semaphore& places_;
};

// The API's name for the reason; a failed text has none.
json reason_of(const Outcome& outcome) { return outcome.reason == FinishReason::length ? "length" : "stop"; }
json usage_of(const Outcome& outcome) {
  return {{"prompt_tokens", outcome.prompt_tokens},
          {"completion_tokens", outcome.new_tokens},
          {"total_tokens", outcome.prompt_tokens + outcome.new_tokens},
          {"prompt_tokens_details", {{"cached_tokens", outcome.cached_tokens}}}};
}

}  // namespace

Api::Api(const tools::TextModel& model, const ServedModel& served, std::string name, std::string folder,
         const std::string& plan)
    : model_{model},
      served_{served},
      name_{std::move(name)},
      folder_{std::move(folder)},
      default_plan_{plan} {
  // The operator may name files; clients may not.
  plans_[plan] = make_plan(plan);
  try {
    chat_.emplace(model.tokenizer());
  } catch (const FormatError& error) {
    no_chat_ = error.what();
  }
}

std::shared_ptr<const Plan> Api::make_plan(const std::string& name) const {
  tools::PlanArguments arguments;
  arguments.plan = name;
  auto made = tools::make_plan<bfloat16>(arguments, served_.shape(), folder_);
  tools::require_no_scoring(tools::needs_of(made), "serve");
  tools::require_no_bound(name, "serve");
  served_.fit(made);
  return std::make_shared<const Plan>(std::move(made));
}

std::shared_ptr<const Plan> Api::plan_named(const std::string& name) const {
  const std::lock_guard lock{mutex_};
  if (const auto known = plans_.find(name); known != plans_.end()) return known->second;
  constexpr std::string_view letters = "abcdefghijklmnopqrstuvwxyz0123456789_+:=,.";
  if (name.empty() || name.size() > 100 || name.find_first_not_of(letters) != std::string::npos) {
    throw ApiError{400,
                   "kv_plan must be a name such as \"duo:0.5\", \"int4\" or \"duo+int4:0.5\", of at most 100 "
                   "letters, and no file",
                   "kv_plan"};
  }
  try {
    auto plan = make_plan(name);
    // A client that tries many names makes the server forget some, and no more.
    if (plans_.size() >= 64) {
      std::erase_if(plans_, [&](const auto& one) { return one.first != default_plan_; });
    }
    plans_[name] = plan;
    return plan;
  } catch (const Error& error) {
    throw ApiError{400, "kv_plan: " + for_clients(tools::without_cpp_type(error.what()), folder_, name_),
                   "kv_plan"};
  }
}

void Api::read_settings(const RequestJson& body, ApiRequest& request) const {
  require_served(body, request.chat);
  const RequestJson& wanted = member(body, "model");
  if (!wanted.is_null() && !wanted.is_string()) throw ApiError{400, "model must be a text", "model"};
  if (wanted.is_string()) static_cast<void>(model(wanted.get<std::string>()));
  request.stream = flag(body, "stream");
  request.include_usage = wants_usage(body);
  request.sampler.temperature = static_cast<float>(number(body, "temperature", 0, 100).value_or(1.0));
  request.sampler.top_p = static_cast<float>(number(body, "top_p", 0, 1).value_or(1.0));
  // Clients say -1 for all.
  if (member(body, "top_k") != -1) request.sampler.top_k = count(body, "top_k", 0).value_or(0);
  if (request.sampler.top_p <= 0.0F) {  // the likeliest token alone
    request.sampler.top_k = 1;
    request.sampler.top_p = 1.0F;
  }
  request.sampler.seed = seed_of(body);
  request.stops = stops_of(body);
  const RequestJson& plan = member(body, "kv_plan");
  if (!plan.is_null() && !plan.is_string()) throw ApiError{400, "kv_plan must be a text", "kv_plan"};
  request.plan_name = plan.is_null() ? default_plan_ : plan.get<std::string>();
  request.plan = plan_named(request.plan_name);
}

void Api::set_most_new(const RequestJson& body, ApiRequest& request) const {
  const auto most = count(body, "max_completion_tokens", 1);
  const std::size_t context = served_.context();
  const std::size_t room = context > request.prompt.size() ? context - request.prompt.size() : 1;
  const std::size_t otherwise = request.chat ? 512 : 16;
  request.max_new = most.value_or(
      count(body, "max_tokens", 1).value_or(context == 0 ? otherwise : std::min(otherwise, room)));
}

ApiRequest Api::completion(const std::string& text) const {
  const PlaceIn place{places_};
  io::JsonLimits limits = body_limits;
  const RequestJson body = read_object(text, limits);
  ApiRequest request;
  read_settings(body, request);
  const RequestJson& given = member(body, "prompt");
  const RequestJson& prompt =
      given.is_array() && given.size() == 1 && !given.front().is_number() ? given.front() : given;
  try {
    if (prompt.is_string()) {
      request.prompt = model_.encode(prompt.get_ref<const std::string&>());
    } else if (prompt.is_array() && !prompt.empty()) {
      for (const RequestJson& token : prompt) {
        if (!token.is_number_integer() || token.get<double>() < 0 ||
            token.get<double>() >= static_cast<double>(model_.config().vocabulary)) {
          throw ApiError{
              400, fmt::format("prompt must be one text, or tokens below {}", model_.config().vocabulary),
              "prompt"};
        }
        request.prompt.push_back(token.get<int>());
      }
    } else {
      throw ApiError{400, "prompt must be one text, or a list of tokens", "prompt"};
    }
  } catch (const Error& error) {
    throw ApiError{400, for_clients(error.what(), folder_, name_), "prompt"};
  }
  if (request.prompt.empty()) throw ApiError{400, "the prompt is empty", "prompt"};
  set_most_new(body, request);
  return request;
}

ApiRequest Api::chat(const std::string& text) const {
  const PlaceIn place{places_};
  io::JsonLimits limits = body_limits;
  const RequestJson body = read_object(text, limits);
  ApiRequest request;
  request.chat = true;
  read_settings(body, request);
  const Conversation conversation = read_conversation(body, limits, tools::local_time());
  if (!chat_) throw ApiError{400, no_chat_, "messages"};
  try {
    request.prompt = chat_->encode(conversation.messages, conversation.options);
    model_.require_rows(request.prompt);
    // Before the work that follows.
    if (const std::size_t context = served_.context(); context > 0 && request.prompt.size() >= context) {
      throw ApiError{
          400,
          fmt::format("the conversation's {} tokens leave no room for an answer in the {} that the "
                      "model was trained for; shorten it",
                      request.prompt.size(), context),
          "messages", "context_length_exceeded"};
    }
    require_all_read(*chat_, conversation);
    request.marks = marks_of(*chat_, conversation, request.prompt);
  } catch (const Error& error) {
    throw ApiError{400, for_clients(error.what(), folder_, name_), "messages"};
  }
  set_most_new(body, request);
  return request;
}

json Api::model(const std::string& name) const {
  if (name != name_) {
    throw ApiError{404,
                   fmt::format("there is no model {}, this server has \"{}\"", io::in_quotes(name), name_),
                   "model", "model_not_found"};
  }
  return {{"id", name_},
          {"object", "model"},
          {"created", 0},
          {"owned_by", "kvpolicy"},
          {"max_model_len", served_.context()},
          {"kv_plan", default_plan_}};
}

json Api::models() const { return {{"object", "list"}, {"data", json::array({model(name_)})}}; }

json Api::head(const ApiRequest& request, std::uint64_t id, bool is_piece) const {
  const char* object =
      request.chat ? (is_piece ? "chat.completion.chunk" : "chat.completion") : "text_completion";
  const auto created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  return {{"id", fmt::format("{}-{}", request.chat ? "chatcmpl" : "cmpl", id)},
          {"object", object},
          {"created", created.count()},
          {"model", name_},
          {"kv_plan", request.plan_name}};
}

json Api::answer(const ApiRequest& request, std::uint64_t id, const std::string& text,
                 const Outcome& outcome) const {
  json body = head(request, id, false);
  json choice{{"index", 0}, {"finish_reason", reason_of(outcome)}, {"logprobs", nullptr}};
  if (request.chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text}};
  } else {
    choice["text"] = text;
  }
  body["choices"] = json::array({choice});
  body["usage"] = usage_of(outcome);
  body["kv_bytes"] = outcome.kv_bytes;
  return body;
}

json Api::piece(const ApiRequest& request, std::uint64_t id, const std::string& text, bool is_first,
                const Outcome* outcome) const {
  json body = head(request, id, true);
  json choice{{"index", 0},
              {"finish_reason", outcome == nullptr ? json{} : reason_of(*outcome)},
              {"logprobs", nullptr}};
  if (request.chat) {
    json delta = json::object();
    if (is_first) delta["role"] = "assistant";
    if (is_first || !text.empty()) delta["content"] = text;
    choice["delta"] = delta;
  } else {
    choice["text"] = text;
  }
  body["choices"] = json::array({choice});
  return body;
}

json Api::usage_piece(const ApiRequest& request, std::uint64_t id, const Outcome& outcome) const {
  json body = head(request, id, true);
  body["choices"] = json::array();
  body["usage"] = usage_of(outcome);
  body["kv_bytes"] = outcome.kv_bytes;
  return body;
}

std::string metrics(const Snapshot& snapshot) {
  std::string text;
  const auto add = [&](std::string_view name, std::string_view type, std::string_view help, auto value) {
    text += fmt::format("# HELP kvpolicy_{0} {1}\n# TYPE kvpolicy_{0} {2}\nkvpolicy_{0} {3}\n", name, help,
                        type, value);
  };
  const Counters& c = snapshot.counters;
  add("requests_total", "counter", "Requests that were taken", c.requests);
  add("requests_refused_total", "counter", "Requests refused because the queue was full", c.refused);
  text +=
      "# HELP kvpolicy_requests_ended_total Requests that ended, by reason\n"
      "# TYPE kvpolicy_requests_ended_total counter\n";
  for (const FinishReason reason :
       {FinishReason::stop, FinishReason::length, FinishReason::cancelled, FinishReason::failed}) {
    text += fmt::format("kvpolicy_requests_ended_total{{reason=\"{}\"}} {}\n", name_of(reason),
                        c.ended[static_cast<std::size_t>(reason)]);
  }
  add("prompt_tokens_total", "counter", "Tokens of prompts that were read", c.prompt_tokens);
  add("cached_tokens_total", "counter", "Tokens of prompts that were found as prefixes", c.cached_tokens);
  add("new_tokens_total", "counter", "Tokens that were written", c.new_tokens);
  add("steps_total", "counter", "Calls of the model", c.steps);
  add("moved_out_total", "counter", "Sequences that were moved out of fast memory", c.moved_out);
  add("moved_in_total", "counter", "Sequences that came back", c.moved_in);
  add("first_token_seconds_sum", "counter", "Seconds from request to first token, summed",
      c.first_token_seconds);
  add("first_token_seconds_count", "counter", "First tokens", c.first_tokens);
  add("between_tokens_seconds_sum", "counter", "Seconds between tokens, summed", c.between_seconds);
  add("between_tokens_seconds_count", "counter", "Tokens after a first one", c.betweens);
  std::size_t running = 0;
  for (const RequestView& one : snapshot.requests) {
    running += one.phase == Phase::reading || one.phase == Phase::writing ? 1 : 0;
  }
  add("running", "gauge", "Requests that are read or written", running);
  add("waiting", "gauge", "Requests that wait, moved out or not", snapshot.requests.size() - running);
  add("memory_budget_bytes", "gauge", "Bytes of KV rows that there may be", snapshot.budget);
  add("memory_live_bytes", "gauge", "Bytes of KV rows in use", snapshot.live_bytes);
  add("memory_promised_bytes", "gauge", "Bytes that running requests may take yet", snapshot.promised_bytes);
  add("memory_prefix_bytes", "gauge", "Bytes that prefixes alone hold", snapshot.prefix_only_bytes);
  add("memory_moved_out_bytes", "gauge", "Bytes of sequences that wait outside", snapshot.swapped_bytes);
  const PrefixStatistics& p = snapshot.prefix_statistics;
  add("prefixes", "gauge", "Prefixes that are kept", p.prefixes);
  add("prefix_lookups_total", "counter", "Prompts that were looked up", p.lookups);
  add("prefix_hits_total", "counter", "Prompts of which a prefix was found", p.hits);
  add("prefixes_evicted_total", "counter", "Prefixes that were let go", p.evicted);
  return text;
}

json state(const Snapshot& snapshot, const Api& api) {
  json requests = json::array();
  for (const RequestView& one : snapshot.requests) {
    requests.push_back({{"id", one.id},
                        {"plan", one.plan},
                        {"phase", name_of(one.phase)},
                        {"prompt_tokens", one.prompt_tokens},
                        {"cached_tokens", one.cached_tokens},
                        {"read_tokens", one.read_tokens},
                        {"new_tokens", one.new_tokens},
                        {"max_new", one.max_new},
                        {"bytes", one.bytes},
                        {"shared_bytes", one.shared_bytes},
                        {"seconds", one.seconds}});
  }
  json prefixes = json::array();
  for (const PrefixInfo& one : snapshot.prefixes) {
    prefixes.push_back({{"plan", one.plan},
                        {"tokens", one.tokens},
                        {"parent", one.parent},
                        {"bytes", one.bytes},
                        {"freed_bytes", one.freed_bytes},
                        {"hits", one.hits}});
  }
  const Counters& c = snapshot.counters;
  return {{"model", api.model_name()},
          {"chat", api.can_chat()},
          {"requests", requests},
          {"prefixes", prefixes},
          {"memory",
           {{"budget", snapshot.budget},
            {"live", snapshot.live_bytes},
            {"promised", snapshot.promised_bytes},
            {"prefixes", snapshot.prefix_only_bytes},
            {"moved_out", snapshot.swapped_bytes}}},
          {"counters",
           {{"requests", c.requests},
            {"refused", c.refused},
            {"prompt_tokens", c.prompt_tokens},
            {"cached_tokens", c.cached_tokens},
            {"new_tokens", c.new_tokens},
            {"steps", c.steps},
            {"moved_out", c.moved_out}}}};
}

}  // namespace kvpolicy::serve
