// SPDX-License-Identifier: Apache-2.0
//
// Shows what a plan does to a text: writes one HTML page with every head's policy and bytes, the
// rows that it kept and read at each step, and the attention that they got.
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>

#include "common/asked_question.hpp"
#include "common/context_limit.hpp"
#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/progress.hpp"
#include "common/retrieval_text.hpp"
#include "common/run_tool.hpp"
#include "common/sequence.hpp"
#include "common/terminal.hpp"
#include "common/text_model.hpp"
#include "generate/prompt.hpp"
#include "tool_plan.hpp"
#include "visualize/bound_summary.hpp"
#include "visualize/page.hpp"
#include "visualize/recording.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  PlanArguments plan;
  PromptArguments prompt;
  std::size_t text = 4096;
  std::uint64_t text_seed = 1;
  RecordSettings settings;
  io::OrderedJson made_with;  // settings of the plan
  std::string out = "visualize.html";
  std::size_t threads = 0;
  ContextLimit context;
  bool json = false;
};

constexpr const char* description =
    R"(Shows what each head keeps: writes one HTML page for a plan and a text.

The page has the heads by layer, coloured by policy; the bytes of each as the text grows, beside a full
cache's; and, for the head and the step that you choose, the rows of the text that were kept, the ones
that were read, and how much attention each got. It needs no network and no other file.

Without a prompt the model reads a piece of the King James Bible with facts hidden in it ("The
key of Bamelo is 48213.") and is asked for one of them.)";

std::string footer() {
  return std::string{"Plans (--plan):\n"} + plan_help() + R"(
Examples:
  visualize --plan duo                             which heads find the key, which see only their window
  visualize --plan quest:16,256 --out quest.html   what a head that selects reads, token by token
  visualize --plan snapkv:128                      which rows a prompt's end attends to
  visualize --plan bounded:0.05                    which rows a read with a bound leaves unread
  visualize --plan search:0.125,4096               an eighth of the bytes, spent head by head
  visualize --file chapter.txt --plan int4 --max-new 100
  visualize --model path/to/Llama-3.2-1B --tokens 1,12,3 --plan kivi2 --json

Then open the page in a browser. A prompt is read in --steps pieces, with a step of the page for each;
after it each token is a step.)";
}

// Reads the prompt that was given, or the shipped text with its question, whose answer is one
// sentence.
std::vector<int> read_prompt(Arguments& arguments, const TextModel& model) {
  if (arguments.prompt.given()) return prompt_tokens(arguments.prompt, model);
  const RetrievalText text = draw_text_in_tokens(model, held_out_text(), arguments.text,
                                                 {.questions = 1, .seed = arguments.text_seed});
  if (arguments.settings.stop.empty()) arguments.settings.stop = ".";
  const EncodedText encoded{model, text};
  std::vector<int> tokens = encoded.body;
  const std::vector<int>& question = encoded.questions.front().question();
  tokens.insert(tokens.end(), question.begin(), question.end());
  return tokens;
}

Recording make_recording(Arguments& arguments) {
  set_threads(arguments.threads);
  const auto model = TextModel::load(arguments.model);
  const std::vector<int> prompt = read_prompt(arguments, model);
  arguments.context.check(model.config(), prompt.size());
  auto plan =
      make_plan<bfloat16>(arguments.plan, model.config().shape(), arguments.model, &arguments.made_with);
  arguments.settings.reading = reading_of(arguments.plan.plan, needs_of(plan));
  Progress progress;
  Recording recording =
      record(model, std::move(plan), prompt, arguments.settings, [&](std::size_t done, std::size_t total) {
        progress.update(static_cast<double>(done) / static_cast<double>(total),
                        fmt::format("{} token {} of {}", done <= prompt.size() ? "reads" : "writes",
                                    thousands(done), thousands(total)));
      });
  // The page names the model's folder without its path, which may be private.
  recording.model = last_part(arguments.model);
  recording.plan = arguments.plan.plan;
  return recording;
}

// The heads after the last step.
nlohmann::json heads_json(const Recording& recording) {
  nlohmann::json heads = nlohmann::json::array();
  const Step& last = recording.steps.back();
  for (std::size_t i = 0; i < last.heads.size(); ++i) {
    const std::size_t layer = i / recording.heads.shape().kv_heads;
    const std::size_t head = i % recording.heads.shape().kv_heads;
    const HeadStep& own = last.heads[i];
    const auto most = std::ranges::max_element(own.attention, {}, &RowAttention::share);
    heads.push_back({{"layer", layer},
                     {"kv_head", head},
                     {"policy", shown_policy(recording.heads.at(layer, head)).policy},
                     {"setting", describe(recording.heads.at(layer, head))},
                     {"rows_kept", rows_in(own.kept)},
                     {"rows_exact", rows_in(own.exact)},
                     {"rows_read", rows_in(own.read)},
                     {"bytes", own.bytes},
                     {"bytes_read", own.bytes_read}});
    if (own.unread) {
      heads.back()["unread_bound"] = own.unread->bound;
      heads.back()["unread_measured"] = own.unread->measured;
    }
    if (most != own.attention.end()) heads.back()["most_attended_row"] = most->row;
  }
  return heads;
}

nlohmann::json bound_json(const BoundSummary& summary) {
  nlohmann::json layers = nlohmann::json::array();
  for (const double share : summary.rows_read_by_layer) {
    layers.push_back(share < 0 ? nlohmann::json{} : nlohmann::json(share));
  }
  return {{"reads", summary.reads},
          {"unread_bound_largest", summary.bound.largest},
          {"unread_bound_median", summary.bound.median},
          {"unread_measured_largest", summary.measured.largest},
          {"unread_measured_median", summary.measured.median},
          {"rows_read_share", summary.rows_read},
          {"rows_read_share_by_layer", layers}};
}

void print_json(const Arguments& arguments, const Recording& recording, const HtmlPage& page) {
  const Step& last = recording.steps.back();
  nlohmann::json json{{"model", arguments.model},
                      {"plan", recording.plan},
                      {"settings", arguments.made_with},
                      {"threads", threads()},
                      {"prompt_tokens", recording.prompt_tokens},
                      {"new_tokens", recording.tokens.size() - recording.prompt_tokens},
                      {"steps", recording.steps.size()},
                      {"kv_bytes", last.bytes},
                      {"kv_bytes_full", recording.full_bytes(last)},
                      {"heads", heads_json(recording)},
                      {"least_attention_shown", page.least_shown},
                      {"page", arguments.out},
                      {"page_bytes", page.html.size()},
                      {"text", recording.new_text()}};
  if (const auto bound = summarize_bound(recording)) json["bound"] = bound_json(*bound);
  fmt::print("{}\n", as_line(json));
}

void print_summary(const Arguments& arguments, const Recording& recording, const HtmlPage& page) {
  const Step& last = recording.steps.back();
  const std::size_t full = recording.full_bytes(last);
  fmt::print("Wrote {} ({} kB): {} KV heads at {} steps of {} tokens. Open it in a browser.\n\n",
             arguments.out, thousands(page.html.size() / 1000), last.heads.size(), recording.steps.size(),
             thousands(recording.tokens.size()));
  fmt::print("  KV cache   {:MB}, {} of a full cache's {:MB}\n", Bytes{last.bytes},
             percent(static_cast<double>(last.bytes) / static_cast<double>(full)), Bytes{full});
  if (const auto bound = summarize_bound(recording)) fmt::print("{}", shown(*bound));
  if (recording.tokens.size() > recording.prompt_tokens) {
    fmt::print("  goes on    {}\n", one_line(recording.new_text(), 80));
  }
}

void run(Arguments arguments) {
  const Recording recording = make_recording(arguments);
  const HtmlPage page = write_page(recording);
  write_result(arguments.out, page.html);
  if (arguments.json) return print_json(arguments, recording, page);
  print_summary(arguments, recording, page);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "visualize"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  app.add_option("--model", arguments.model, "Hugging Face folder or GGUF file of the model")
      ->type_name("DIR")
      ->capture_default_str();
  auto* source = add_prompt_options(app, arguments.prompt, "one of, or none");
  source->add_option("--text", arguments.text, "The shipped text with a question, so many tokens")
      ->check(whole_number(256, 65536))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--text-seed", arguments.text_seed, "Another of the shipped texts")
      ->check(any_whole_number())
      ->type_name("N")
      ->capture_default_str();
  add_plan_options(app, arguments.plan);
  app.add_option("--max-new", arguments.settings.most_new, "New tokens at most, always the likeliest")
      ->check(whole_number(0, 4096))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--stop", arguments.settings.stop, "Ends after this text (shipped text: a full stop)")
      ->type_name("TEXT");
  app.add_option("--steps", arguments.settings.prompt_steps,
                 "Pieces in which the prompt is read; each is a step of the page")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--out", arguments.out, "The page")->type_name("FILE")->capture_default_str();
  app.add_option("--threads", arguments.threads, "Threads; 0: all that OpenMP offers")
      ->check(whole_number(0, most_threads))
      ->type_name("N")
      ->capture_default_str();
  arguments.context.add_to(app);
  app.add_flag("--json", arguments.json, "Print JSON about it");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
