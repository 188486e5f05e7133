// SPDX-License-Identifier: Apache-2.0
//
// Prints the logits of the reference Llama for some tokens, to compare with another implementation:
// as text, or as JSON that keeps every digit.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <reference_model/llama.hpp>

#include "common/context_limit.hpp"
#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/run_tool.hpp"
#include "common/sequence.hpp"
#include "tool_plan.hpp"

namespace kvpolicy::tools {
namespace {

struct Arguments {
  std::string model;
  std::vector<int> tokens;
  PlanArguments plan;
  std::size_t prompt = 0;  // 0: all tokens
  std::size_t chunk = 512;
  bool all = false;
  ContextLimit context;
  bool json = false;
};

constexpr const char* description =
    R"(Prints the logits that a model of the Llama family computes for given tokens, in float32.

The model is a Hugging Face folder as it is downloaded: config.json with model.safetensors, or
shards with their index; LlamaForCausalLM, MistralForCausalLM, MinistralForCausalLM,
Qwen2ForCausalLM or Qwen3ForCausalLM. A GGUF file of such a model will do as well.)";

constexpr const char* examples = R"(Examples:
  # the logits after the third token
  logits --model tests/model/goldens/gqa2_d80 --tokens 1,2,3
  # of every token, fed one at a time, as JSON for another program
  logits --model tests/model/goldens/gqa2_d80 --tokens 1,2,3 --all --chunk 1 --json
  # the same where each head reads the first token and the latest alone
  logits --model tests/model/goldens/gqa2_d80 --tokens 1,2,3 --plan sink_recent:1,1
  # heads that drop rows do so after a prompt: here after the first four tokens
  logits --model tests/model/goldens/gqa2_d80 --tokens 1,2,3,4,5 --prompt 4 --plan snapkv:3,window=1

In PyTorch, to compare with the plan `full`:
  model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.float32)
  model(torch.tensor([[1, 2, 3]])).logits)";

/// Logits of every token, or of the last one only. The tokens after the prompt come one at a time, as when text is
/// generated.
std::vector<float> compute(Sequence& sequence, const Arguments& arguments, const PlanNeeds& needs,
                           const Reading& reading) {
  const std::span tokens{arguments.tokens};
  const std::span prompt = tokens.first(arguments.prompt);
  std::vector<float> logits;
  const auto add = [&](const std::vector<float>& some) {
    if (!arguments.all) logits.clear();
    logits.insert(logits.end(), some.begin(), some.end());
  };
  if (!arguments.all) add(sequence.prefill(prompt, arguments.chunk));
  for (std::size_t first = 0; arguments.all && first < prompt.size(); first += arguments.chunk) {
    add(sequence.score(prompt.subspan(first, std::min(arguments.chunk, prompt.size() - first))));
  }
  if (needs.compress) sequence.compress();
  for (const int token : tokens.subspan(arguments.prompt)) add(sequence.decode(token, reading));
  return logits;
}

void run(Arguments arguments) {
  const std::string folder = repository_path(arguments.model);
  require_model_folder(folder);
  const auto model = reference::Llama::load(folder);
  arguments.context.check(model.config(), arguments.tokens.size());
  io::OrderedJson settings;
  auto plan = make_plan<float>(arguments.plan, model.config().shape(), folder, &settings);
  const PlanNeeds needs = needs_of(plan);
  require_no_scoring(needs, "logits");
  const Reading reading = reading_of(arguments.plan.plan, needs);
  require(arguments.prompt > 0 || (!needs.compress && reading == Reading{}), "--plan ", arguments.plan.plan,
          ": drops or chooses rows once a prompt was read; --prompt N says that the first N tokens are one");
  require(arguments.prompt < arguments.tokens.size() || arguments.prompt == 0, "--prompt ", arguments.prompt,
          ": there are ", arguments.tokens.size(), " tokens, some must come after the prompt");
  if (arguments.prompt == 0) arguments.prompt = arguments.tokens.size();
  const auto sequence = make_sequence(model, std::move(plan));
  const std::vector<float> logits = compute(*sequence, arguments, needs, reading);

  const std::size_t vocabulary = model.config().vocabulary;
  const std::size_t rows = logits.size() / vocabulary;
  nlohmann::json printed = nlohmann::json::array();
  for (std::size_t row = 0; row < rows; ++row) {
    const std::span values = std::span(logits).subspan(row * vocabulary, vocabulary);
    const std::size_t position = arguments.tokens.size() - rows + row;
    const int token = arguments.tokens[position];
    if (arguments.json) {
      printed.push_back({{"position", position}, {"token", token}, {"logits", values}});
    } else {
      fmt::print("position {}, token {}: {:.6g}\n", position, token, fmt::join(values, " "));
    }
  }
  if (!arguments.json) return;
  const nlohmann::json result{{"model", arguments.model},      {"plan", arguments.plan.plan},
                              {"settings", settings},          {"chunk", arguments.chunk},
                              {"prompt", arguments.prompt},    {"vocabulary", vocabulary},
                              {"kv_bytes", sequence->bytes()}, {"rows", printed}};
  fmt::print("{}\n", as_line(result));
}

}  // namespace
}  // namespace kvpolicy::tools

int main(int argc, char** argv) {
  using namespace kvpolicy::tools;
  Arguments arguments;
  CLI::App app{description, "logits"};
  app.footer(std::string("Plans:\n") + plan_help() + "\n" + examples);
  app.add_option("--model", arguments.model, "Folder with config.json and the weights")
      ->required()
      ->type_name("DIR");
  app.add_option("--tokens", arguments.tokens, "The tokens, by number")
      ->required()
      ->delimiter(',')
      ->check(whole_number(0, std::numeric_limits<int>::max()))
      ->type_name("1,2,3");
  add_plan_options(app, arguments.plan);
  app.add_option(
         "--prompt", arguments.prompt,
         "How many of the tokens are the prompt, after which heads drop rows or choose; the others are read "
         "one at a time (default: all)")
      ->check(whole_number(1, 1'000'000))
      ->type_name("N");
  app.add_option("--chunk", arguments.chunk, "Tokens fed per step; exact plans give the same for every chunk")
      ->check(whole_number(1, 1'000'000))
      ->capture_default_str()
      ->type_name("N");
  app.add_flag("--all", arguments.all, "Logits of every token, not only of the last");
  arguments.context.add_to(app);
  app.add_flag("--json", arguments.json, "Print JSON");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
