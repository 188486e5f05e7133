// SPDX-License-Identifier: Apache-2.0
//
// Continues a prompt under one plan, and prints what its KV cache cost.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/sampler.hpp>

#include "common/context_limit.hpp"
#include "common/device.hpp"
#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/load_arguments.hpp"
#include "common/plan_name.hpp"
#include "common/progress.hpp"
#include "common/run_tool.hpp"
#include "common/sequence.hpp"
#include "common/stopwatch.hpp"
#include "common/terminal.hpp"
#include "common/text_model.hpp"
#include "generate/conversation.hpp"
#include "generate/new_text.hpp"
#include "generate/plan_view.hpp"
#include "generate/prompt.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  PlanArguments plan;
  std::string device = "cpu";
  std::string dtype = "bfloat16";
  LoadArguments load;
  PromptArguments prompt;
  bool chat = false;
  std::string system;
  std::size_t most_new = 0;
  std::string stop;
  reference::SamplerConfig sampler;
  std::size_t chunk = 512;
  std::size_t threads = 0;
  ContextLimit context;
  bool stream = false;
  bool json = false;
};

constexpr const char* description =
    R"(Continues a prompt with a model of the Llama family under a plan for its KV cache.

The text goes to stdout; after it the memory and time of the cache go to stderr. Text becomes tokens by
the tokenizer in the model's folder; a model of 256 tokens, such as the shipped one, reads bytes.)";

std::string footer() {
  return std::string{"Plans (--plan):\n"} + plan_help() + R"(
Examples:
  generate --model models/smollm2 --chat --plan duo:0.5 "What is the capital of France?"
  generate --model models/smollm2 --chat          a conversation, a message on each line
  generate --prompt 'The key of Bamelo is 48213. What is the key of Bamelo? ' --stop .
  generate --file chapter.txt --plan duo --max-new 200 --stream
  generate --file chapter.txt --temperature 0.8 --top-p 0.95 --seed 7
  echo 'In the beginning' | generate --file - --plan int4
  generate --model path/to/Llama-3.2-1B --tokens 1,12,3 --plan kivi2 --json)";
}

// The properties of a plan that do not depend on its element type.
struct MadePlan {
  PlanNeeds needs;
  io::OrderedJson settings;
  UnusedBudgets unused;
};

std::unique_ptr<Sequence> make_cache(const Arguments& arguments, const TextModel& model, const Device& device,
                                     std::size_t prompt, MadePlan& made) {
  const auto plan_of = [&]<Element E>() {
    auto plan = make_plan<E>(arguments.plan, model.config().shape(), arguments.model, &made.settings);
    made.needs = needs_of(plan);
    made.unused = unused_budgets(plan, prompt);
    return plan;
  };
  if (arguments.dtype == "float32") {
    return make_sequence(model.llama(), plan_of.operator()<float>());
  }
  return device.make_sequence(plan_of.operator()<bfloat16>());
}

struct Generated {
  MadePlan plan;
  std::size_t prompt_tokens = 0;
  std::vector<int> tokens;
  std::string text;
  const char* ended_by = "max-new";
  double prefill_ms = 0;
  double compress_ms = 0;
  double decode_ms = 0;  // per token; 0 if there is only one
  std::size_t weight_bytes = 0;
  std::size_t bytes = 0;
  std::size_t bytes_read = 0;
};

// Prints text whole at its end, or piece by piece.
class Printer {
 public:
  explicit Printer(const Arguments& arguments)
      : silent_{arguments.json}, stream_{arguments.stream || is_terminal(stdout)} {}

  void piece(const std::string& text) const {
    if (stream_) print(text);
  }
  void whole(const std::string& text) const {
    if (!stream_) print(text);
  }

 private:
  void print(const std::string& text) const {
    if (silent_ || text.empty()) return;
    fmt::print("{}", is_terminal(stdout) ? printable(text) : text);
    std::fflush(stdout);
  }

  bool silent_;
  bool stream_;
};

// A cache, and the texts that are read into it and written after them.
class Session {
 public:
  Session(const Arguments& arguments, const TextModel& model, const Device& device)
      : arguments_{&arguments}, model_{&model}, device_{&device}, sampler_{arguments.sampler} {}

  /// Forgets what was read.
  void clear() {
    cache_.reset();
    last_.clear();
    in_cache_.clear();
  }

  /// Reads a prompt after all that was read and written before, and goes on.
  Generated go_on(std::span<const int> prompt) {
    std::vector<int> tokens = std::exchange(last_, {});
    tokens.insert(tokens.end(), prompt.begin(), prompt.end());
    const std::size_t most = room(tokens.size());
    Generated result;
    if (!cache_) cache_ = make_cache(*arguments_, *model_, *device_, tokens.size(), plan_);
    result.plan = plan_;
    result.prompt_tokens = prompt.size();
    std::vector<float> logits = read(tokens, result);
    write(prompt, std::move(logits), most, result);
    result.weight_bytes = model_->llama().weight_bytes();
    result.bytes = cache_->bytes();
    result.bytes_read = cache_->bytes_read(reading());
    return result;
  }

 private:
  // How many new tokens there may be after so many more of the prompt.
  [[nodiscard]] std::size_t room(std::size_t prompt) const {
    const std::size_t context = model_->config().max_positions;
    if (arguments_->context.beyond || context == 0) return arguments_->most_new;
    const std::size_t tokens = prompt + (cache_ ? cache_->tokens() : 0);
    arguments_->context.check(model_->config(), tokens);
    return std::min(arguments_->most_new, context - tokens + 1);  // the last token is not read
  }

  [[nodiscard]] Reading reading() const { return reading_of(arguments_->plan.plan, plan_.needs); }

  std::vector<float> read(std::span<const int> tokens, Generated& result) {
    const Stopwatch prefill;
    Progress progress;
    std::vector<float> logits =
        cache_->prefill(tokens, arguments_->chunk, [&](std::size_t done, std::size_t total) {
          progress.update(static_cast<double>(done) / static_cast<double>(total),
                          fmt::format("reads token {} of {}", thousands(done), thousands(total)));
        });
    result.prefill_ms = prefill.milliseconds();
    in_cache_.insert(in_cache_.end(), tokens.begin(), tokens.end());
    if (plan_.needs.compress) {
      const Stopwatch compress;
      if (plan_.needs.scoring) {
        reference::RepeatRequest ask = model_->repeat_request();
        ask.beyond_context = arguments_->context.beyond;
        cache_->score_rows(in_cache_, ask);
      }
      cache_->compress();
      result.compress_ms = compress.milliseconds();
    }
    return logits;
  }

  void write(std::span<const int> prompt, std::vector<float> logits, std::size_t most, Generated& result) {
    const Printer printer{*arguments_};
    NewText text{model_->tokenizer(), arguments_->stop, prompt};
    if (most < arguments_->most_new) result.ended_by = "context";
    const std::size_t read_before = cache_->tokens();
    const Stopwatch decode;
    while (result.tokens.size() < most) {
      if (!result.tokens.empty()) logits = cache_->decode(result.tokens.back(), reading());
      const int token = sampler_.next(logits);
      if (model_->is_end(token)) {
        result.ended_by = "end of text";
        break;
      }
      result.tokens.push_back(token);
      printer.piece(text.add(token));
      if (text.stopped()) {
        result.ended_by = "stop";
        break;
      }
    }
    const std::size_t steps = cache_->tokens() - read_before;
    if (steps > 0) result.decode_ms = decode.milliseconds() / static_cast<double>(steps);
    if (steps < result.tokens.size()) last_ = {result.tokens.back()};
    in_cache_.insert(in_cache_.end(), result.tokens.begin(),
                     result.tokens.begin() + static_cast<std::ptrdiff_t>(steps));
    printer.piece(text.finish());
    printer.whole(text.text());
    result.text = text.text();
  }

  const Arguments* arguments_;
  const TextModel* model_;
  const Device* device_;
  reference::Sampler sampler_;
  MadePlan plan_;
  std::unique_ptr<Sequence> cache_;
  std::vector<int> last_;      // the latest new token, if the cache has not read it
  std::vector<int> in_cache_;  // all tokens that it has read
};

void print_json(const Arguments& arguments, const Generated& result) {
  const nlohmann::json json{{"model", arguments.model},
                            {"plan", arguments.plan.plan},
                            {"settings", result.plan.settings},
                            {"device", arguments.device},
                            {"dtype", arguments.dtype},
                            {"weights", arguments.load.weights},
                            {"activations", arguments.load.activations},
                            {"weight_bytes", result.weight_bytes},
                            {"threads", threads()},
                            {"temperature", arguments.sampler.temperature},
                            {"seed", arguments.sampler.seed},
                            {"prompt_tokens", result.prompt_tokens},
                            {"tokens", result.tokens},
                            {"text", result.text},
                            {"ended_by", result.ended_by},
                            {"kv_bytes", result.bytes},
                            {"kv_bytes_read_per_token", result.bytes_read},
                            {"prefill_ms", result.prefill_ms},
                            {"compress_ms", result.compress_ms},
                            {"decode_ms_per_token", result.decode_ms}};
  fmt::print("{}\n", as_line(json));
}

void print_costs(const Arguments& arguments, const Generated& result) {
  fmt::print(stderr,
             "\n  plan {}: {} prompt tokens, {} new ones\n"
             "  KV cache  {:MB}, of which a token reads {:MB}\n"
             "  prefill   {} ms\n"
             "  decode    {} ms/token\n",
             arguments.plan.plan, thousands(result.prompt_tokens), thousands(result.tokens.size()),
             Bytes{result.bytes}, Bytes{result.bytes_read}, fixed(result.prefill_ms, 0),
             fixed(result.decode_ms, 2));
  if (!result.plan.settings.empty()) {
    fmt::print(stderr, "  settings  {}\n", shown_settings(result.plan.settings));
  }
  if (result.plan.unused.heads > 0) {
    fmt::print(stderr, "  budgets   {}\n", shown_unused(result.plan.unused, result.prompt_tokens));
  }
  if (result.compress_ms > 0) {
    fmt::print(stderr, "  compress  {} ms, once after the prompt\n", fixed(result.compress_ms, 0));
  }
}

void print_result(const Arguments& arguments, const Generated& result) {
  if (arguments.json) return print_json(arguments, result);
  fmt::print("\n");
  std::fflush(stdout);
  print_costs(arguments, result);
}

// One line from stdin, after a prompt sign on a terminal; nothing at its end.
std::optional<std::string> read_line() {
  const bool asks = is_terminal(stdin) && is_terminal(stdout);
  if (asks) {
    fmt::print("> ");
    std::fflush(stdout);
  }
  std::string line;
  if (std::getline(std::cin, line)) return line;
  if (asks) fmt::print("\n");
  return {};
}

// Each line is a message; the cache holds the conversation, and only what is new is read.
void converse(const Arguments& arguments, const TextModel& model, Session& session) {
  require(!arguments.json, "--json with --chat needs a message: generate --chat --json \"...\"");
  Conversation conversation{model, arguments.system};
  while (const auto line = read_line()) {
    if (line->find_first_not_of(" \t\r") == std::string::npos) continue;
    const Conversation::Prompt prompt = conversation.ask(*line);
    if (prompt.from_start) session.clear();
    const Generated result = session.go_on(prompt.tokens);
    conversation.answered(result.text);
    fmt::print("\n");
    std::fflush(stdout);
    fmt::print(stderr, "  [{} tokens read, {} written at {} ms each; KV cache {:MB}]\n",
               thousands(result.prompt_tokens), thousands(result.tokens.size()), fixed(result.decode_ms, 1),
               Bytes{result.bytes});
  }
}

void run(const Arguments& arguments) {
  require(arguments.device == "cpu" || arguments.dtype == "bfloat16",
          "a GPU keeps rows in bfloat16; --dtype ", arguments.dtype, " is for --device cpu");
  set_threads(arguments.threads);
  const auto model = TextModel::load(arguments.model, arguments.load.options());
  const Device device = open_device(arguments.device, model.llama());
  Session session{arguments, model, device};
  if (!arguments.chat) {
    return print_result(arguments, session.go_on(prompt_tokens(arguments.prompt, model)));
  }
  if (!arguments.prompt.given()) return converse(arguments, model, session);
  Conversation conversation{model, arguments.system};
  const Conversation::Prompt prompt = conversation.ask(prompt_text(arguments.prompt));
  print_result(arguments, session.go_on(prompt.tokens));
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "generate"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  app.add_option("--model", arguments.model, "Hugging Face folder or GGUF file of the model")
      ->type_name("DIR")
      ->capture_default_str();
  add_prompt_options(app, arguments.prompt, "one of");
  auto* chat = app.add_flag("--chat", arguments.chat,
                            "The prompt is a message to the model; without one, each line of stdin is");
  app.add_option("--system", arguments.system, "System message instead of the model's own")
      ->type_name("TEXT")
      ->needs(chat);
  add_plan_options(app, arguments.plan);
  add_device_option(app, arguments.device);
  app.add_option("--dtype", arguments.dtype, "Element type of cached rows")
      ->check(CLI::IsMember({"bfloat16", "float32"}))
      ->type_name("TYPE")
      ->capture_default_str();
  add_load_options(app, arguments.load);
  app.add_option("--max-new", arguments.most_new,
                 "New tokens at most; default: 64, with --chat 512 for each answer")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000));
  app.add_option("--stop", arguments.stop, "Ends after this text, which is printed")->type_name("TEXT");
  app.add_option("--temperature", arguments.sampler.temperature, "0: always the likeliest token")
      ->type_name("X")
      ->capture_default_str();
  app.add_option("--top-k", arguments.sampler.top_k, "Only the N likeliest; 0: all")
      ->type_name("N")
      ->check(whole_number(0, 1'000'000'000))
      ->capture_default_str();
  app.add_option("--top-p", arguments.sampler.top_p, "Only the likeliest that reach this share")
      ->type_name("X")
      ->capture_default_str();
  app.add_option("--seed", arguments.sampler.seed, "Seed of the draws with a temperature")
      ->type_name("N")
      ->check(any_whole_number())
      ->capture_default_str();
  app.add_option("--chunk", arguments.chunk, "Prompt tokens read at once")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--threads", arguments.threads, "Threads; 0: all that OpenMP offers")
      ->type_name("N")
      ->check(whole_number(0, most_threads))
      ->capture_default_str();
  arguments.context.add_to(app);
  app.add_flag("--stream", arguments.stream, "Print text as it comes; a terminal always gets it so");
  app.add_flag("--json", arguments.json, "Print JSON");
  return run_tool(app, argc, argv, [&] {
    if (arguments.most_new == 0) arguments.most_new = arguments.chat ? 512 : 64;
    run(arguments);
  });
}
