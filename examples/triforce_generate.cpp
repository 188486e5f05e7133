// SPDX-License-Identifier: Apache-2.0
//
// Decodes a long text speculatively, shows which model proposed each token, and prints the speedup
// over decoding token by token, measured in the same run.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <reference_model/llama.hpp>

#include "common/asked_question.hpp"
#include "common/context_limit.hpp"
#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/retrieval_text.hpp"
#include "common/run_tool.hpp"
#include "common/sequence.hpp"
#include "common/speculative_text.hpp"
#include "common/terminal.hpp"
#include "common/text_model.hpp"
#include "generate/prompt.hpp"
#include "generate/speculation_report.hpp"
#include "generate/speculation_run.hpp"
#include "generate/token_strip.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  std::string draft_model;  // empty: the small model beside the target
  std::string method = "triforce";
  PromptArguments prompt;
  std::size_t text = 7680;
  std::size_t questions = 4;
  std::uint64_t text_seed = 1;
  std::size_t most_new = 128;
  std::string stop;
  std::optional<std::size_t> length;
  std::optional<std::size_t> draft_length;
  std::string summary = "min-max";
  std::string draft_plan;  // empty: sinks and latest rows
  std::size_t threads = 0;
  bool alone = false;
  ContextLimit context;
  bool json = false;
  SpeculationSetup setup;
};

constexpr const char* description =
    R"(Decodes speculatively: drafts guess tokens, and the target verifies all guesses in one pass.

The text shows who proposed each token: a tiny draft model, the target over a few selected rows of
its cache, or the target itself. The text does not depend on the drafts: without --temperature it is
the text that decoding token by token gives, which runs as well and is compared.

Without a prompt the model reads a piece of the King James Bible with facts hidden in it
("The key of Bamelo is 48213."), goes on with it, and then answers questions about the facts.)";

std::string footer() {
  std::string text = "Ways to decode (--method):\n";
  for (const NamedStructure& s : structures()) text += fmt::format("  {:10}{}\n", s.name, s.about);
  return text + R"(
Examples:
  triforce_generate                               the shipped model with its small draft
  triforce_generate --method self                 without the small draft
  triforce_generate --summary mean --chunk 8      rows chosen as published: few digits are found
  triforce_generate --length 6 --json             six guesses each time, for another program
  triforce_generate --questions 0 --max-new 400 --temperature 0.8 --top-p 0.95 --seed 7
  triforce_generate --file chapter.txt --method ngram --max-new 200 --stop .
  triforce_generate --method streaming --draft-plan duo:0.5      the target's streaming heads guess
  triforce_generate --quantise 4                  the target's rows in 4 bits but for the latest
  triforce_generate --model DIR --draft-model DIR-draft --tokens 1,12,3

In the table a pass reads a model once, and the acceptance is the share of guesses that stayed among
those that a level verified. The gain grows with the tokens per pass of the target, and with how much
less the passes of the drafts cost: long texts and small budgets pay. docs/triforce.md explains it.)";
}

// One turn, which is the prompt that was given.
std::vector<SpeculationTurn> own_turns(const Arguments& arguments, const TextModel& model,
                                       std::vector<int>& stop_tokens) {
  SpeculationTurn turn;
  turn.most_new = arguments.most_new;
  turn.prompt = prompt_tokens(arguments.prompt, model);
  if (!arguments.stop.empty()) {
    const std::vector<int> stop = model.tokens_with(arguments.stop);
    stop_tokens.insert(stop_tokens.end(), stop.begin(), stop.end());
    turn.stops = stops_at(model.tokenizer(), arguments.stop);
  }
  return {std::move(turn)};
}

// The first turn continues the shipped text; then each question is a turn that ends with its
// sentence.
std::vector<SpeculationTurn> shipped_turns(const Arguments& arguments, const TextModel& model,
                                           std::vector<int>& stop_tokens) {
  require(arguments.stop.empty(),
          "--stop ends what follows a prompt of yours (--prompt, --file, "
          "--tokens); the shipped text goes on for --max-new tokens");
  const RetrievalText text = draw_text_in_tokens(
      model, held_out_text(), arguments.text,
      {.questions = std::max<std::size_t>(arguments.questions, 1), .seed = arguments.text_seed});
  std::vector<SpeculationTurn> turns(1);
  turns.front().prompt = model.encode(text.body);
  turns.front().most_new = arguments.most_new;
  turns.front().past_stop_tokens = true;
  for (const Question& question : text.questions) {
    if (turns.size() > arguments.questions) break;
    SpeculationTurn& turn = turns.emplace_back();
    const AskedQuestion asked{model, text.body, question};
    turn.prompt = asked.question();
    turn.most_new = 64;
    turn.question = question.text.substr(1);
    turn.answer = model.decode(asked.answer());
  }
  const std::vector<int> stop = model.tokens_with(".");
  stop_tokens.insert(stop_tokens.end(), stop.begin(), stop.end());
  return turns;
}

std::vector<SpeculationTurn> make_turns(const Arguments& arguments, const TextModel& model,
                                        std::vector<int>& stop_tokens) {
  stop_tokens = model.ends();
  return arguments.prompt.given() ? own_turns(arguments, model, stop_tokens)
                                  : shipped_turns(arguments, model, stop_tokens);
}

nlohmann::json settings_json(const Arguments& arguments) {
  const SpeculationOptions& options = arguments.setup.options;
  return {{"model", arguments.model},
          {"draft_model", arguments.draft_model},
          {"threads", threads()},
          {"chunk", arguments.setup.chunk},
          {"budget", arguments.setup.budget},
          {"summary", arguments.summary},
          {"draft_plan", arguments.draft_plan},
          {"bits", arguments.setup.bits},
          {"length", options.length},
          {"adaptive", options.adapt},
          {"draft_length", arguments.setup.middle.length},
          {"tree_nodes", arguments.setup.tree_nodes},
          {"temperature", options.sampling.temperature},
          {"top_k", options.sampling.top_k},
          {"top_p", options.sampling.top_p},
          {"seed", options.seed}};
}

void run(Arguments& arguments) {
  SpeculationSetup& setup = arguments.setup;
  setup.structure = structure_named(arguments.method);
  setup.min_max = arguments.summary == "min-max";
  if (arguments.length) {
    setup.options.length = *arguments.length;
    setup.options.adapt = false;
  }
  if (arguments.length || arguments.draft_length) {
    setup.middle.length = arguments.draft_length.value_or(setup.middle.length);
    setup.middle.adapt = false;
  }
  set_threads(arguments.threads);
  const auto model = TextModel::load(arguments.model);
  if (!arguments.draft_plan.empty()) {
    require(setup.structure == Structure::streaming,
            "--draft-plan is what the target keeps when it guesses "
            "by itself (--method streaming); --method ",
            arguments.method, " has no such cache");
    PlanArguments plan;
    plan.plan = arguments.draft_plan;
    require_no_bound(plan.plan, "triforce_generate");
    setup.draft_plan = make_plan<bfloat16>(plan, model.config().shape(), arguments.model);
  }
  const std::vector<SpeculationTurn> turns = make_turns(arguments, model, setup.options.stop_tokens);
  arguments.context.check(model.config(), turns.front().prompt.size());
  std::optional<reference::Llama> small;
  if (needs_small_model(setup.structure)) {
    if (arguments.draft_model.empty()) arguments.draft_model = draft_folder_of(arguments.model);
    require_draft_folder(arguments.draft_model);
    small.emplace(reference::Llama::load(arguments.draft_model));
  }
  SpeculativeText text{model.llama(), small ? &*small : nullptr, setup};
  if (arguments.json) {
    const SpeculationResult result = run_speculation(text, turns, !arguments.alone);
    nlohmann::json json = settings_json(arguments);
    json.update(as_json(model.tokenizer(), text, turns, result));
    fmt::print("{}\n", as_line(json));
    return;
  }
  SpeculationDisplay display{turns, {text.proposers(), model.tokenizer(), wants_colour(stdout)}};
  print_report(model.tokenizer(), text, turns,
               run_speculation(text, turns, !arguments.alone, display.watcher()));
}

CLI::Option* add_count(CLI::App& app, const char* name, std::size_t& number, std::uint64_t least,
                       const char* about) {
  return app.add_option(name, number, about)
      ->type_name("N")
      ->check(whole_number(least, 1'000'000))
      ->capture_default_str();
}

void add_options(CLI::App& app, Arguments& arguments) {
  SpeculationOptions& options = arguments.setup.options;
  app.add_option("--model", arguments.model, "Hugging Face folder or GGUF file of the target")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--draft-model", arguments.draft_model,
                 "Folder of the small model, which has the same tokens; default: the target's + \"-draft\"")
      ->type_name("DIR");
  add_prompt_options(app, arguments.prompt, "one of; without, the shipped text");
  add_count(app, "--text", arguments.text, 1, "Tokens of the shipped text");
  add_count(app, "--questions", arguments.questions, 0, "Questions about the shipped text");
  app.add_option("--text-seed", arguments.text_seed, "Another piece of it, and other facts")
      ->type_name("N")
      ->check(any_whole_number())
      ->capture_default_str();
  app.add_option("--method", arguments.method, "How to decode, see below")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--length", arguments.length,
                 "Draft tokens that the target verifies at once; default: chosen by measured times")
      ->type_name("N")
      ->check(whole_number(0, 1024));
  app.add_option("--draft-length", arguments.draft_length,
                 "Draft tokens of the small model that the target over selected rows verifies at once; "
                 "default: chosen, or 1 with --length")
      ->type_name("N")
      ->check(whole_number(0, 1024));
  app.add_option(
         "--draft-plan", arguments.draft_plan,
         "What the target keeps when it guesses (--method streaming), instead of sinks and latest rows: "
         "duo:0.5, int4")
      ->type_name("PLAN");
  add_count(app, "--budget", arguments.setup.budget, 1, "Rows that are selected in each head");
  add_count(app, "--chunk", arguments.setup.chunk, 1, "Rows that are selected together");
  app.add_option("--summary", arguments.summary, "What chunks are selected by: mean keys, or bounds")
      ->check(CLI::IsMember({"mean", "min-max"}))
      ->type_name("KIND")
      ->capture_default_str();
  add_count(app, "--refresh-every", options.refresh_selection.every, 0,
            "Choose a new selection after N tokens; 0: when guesses are refused");
  app.add_option("--quantise", arguments.setup.bits, "Bits of the target's rows")
      ->check(CLI::IsMember({2, 4, 8}))
      ->type_name("BITS");
  add_count(app, "--tree-size", arguments.setup.tree_nodes, 1, "Draft tokens of --method tree");
  add_count(app, "--max-new", arguments.most_new, 1, "New tokens at most");
  app.add_option("--stop", arguments.stop, "Ends after this text")->type_name("TEXT");
  app.add_option("--temperature", options.sampling.temperature, "0: always the likeliest token")
      ->type_name("X")
      ->capture_default_str();
  add_count(app, "--top-k", options.sampling.top_k, 0, "Only the N likeliest; 0: all");
  app.add_option("--top-p", options.sampling.top_p, "Only the likeliest that reach this share")
      ->type_name("X")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the draws with a temperature")
      ->type_name("N")
      ->check(any_whole_number())
      ->capture_default_str();
  app.add_option("--threads", arguments.threads, "Threads; 0: all that OpenMP offers")
      ->type_name("N")
      ->check(whole_number(0, most_threads))
      ->capture_default_str();
  app.add_flag("--alone", arguments.alone, "Skip plain decoding, which is done for comparison");
  arguments.context.add_to(app);
  app.add_flag("--json", arguments.json, "Print JSON");
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "triforce_generate"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  add_options(app, arguments);
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
