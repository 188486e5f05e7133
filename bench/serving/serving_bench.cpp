// SPDX-License-Identifier: Apache-2.0
//
// What the server is worth: how many sequences a memory budget carries under each plan, how many tokens a second, and
// how long clients wait. No HTTP; the scheduler is driven directly.
//
//   serving_bench --quick
//   serving_bench --model models/smollm2 --json serving.json
#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cases.hpp"
#include "common/files.hpp"
#include "common/run_tool.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

constexpr const char* description =
    R"(Measures what the server is worth at one memory budget, plan by plan: texts alone and together (which verifies),
everything queued at once, long texts that share nothing, Poisson arrivals, eight equal texts, one prefix for 32
requests, simulated hours.

A request is one of three shared texts, a text of its own and a question about a fact in the shared one; lengths of
texts and answers are log-normal. Everything is drawn by --seed.)";

constexpr const char* examples =
    R"(Without --saturate, --unshared, --rate, --batch, --prefix or --hours all of them are measured; with some, only these.

Examples:
  serving_bench --quick                                   the shipped model, under two minutes
  serving_bench --model models/smollm2 --json out.json    a pretrained one
  serving_bench --model llama3 --layers 4 --prefix        Llama-3-8B's attention without its weights
  serving_bench --saturate 100 --memory 32 --plans full duo+int4 my_plan.json
  serving_bench --unshared 48 --own 4096 --own-most 8192  long texts, of which every byte is one request's
  serving_bench --rate 2 4 8 --plans full duo+int4        arrivals a second
  serving_bench --hours 24

Times are worth something on a machine with nothing else to do.)";

// The cases that the command line asks for; without any, all.
struct Wanted {
  bool saturate, unshared, open, batch, prefix, hours;
};

// What --own, --own-most and --answer change of the traffic.
void set_lengths(const Settings& settings, Traffic& traffic) {
  if (settings.own > 0 || settings.own_most > 0) {
    traffic.own = traffic.own.around(settings.own > 0 ? settings.own : traffic.own.median, settings.own_most);
  }
  if (settings.answer > 0) traffic.answer = traffic.answer.around(settings.answer);
}

void run(Settings& settings, const std::string& command) {
  tools::set_threads(settings.threads);
  Wanted wanted{settings.saturate > 0, settings.unshared > 0, !settings.rates.empty(),
                settings.batch,        settings.prefix,       settings.hours > 0};
  if (!wanted.saturate && !wanted.unshared && !wanted.open && !wanted.batch && !wanted.prefix &&
      !wanted.hours) {
    wanted = {true, true, true, true, true, true};
  }
  if (settings.saturate == 0) settings.saturate = settings.smoke ? 6 : settings.quick ? 16 : 64;
  if (settings.unshared == 0) settings.unshared = settings.smoke ? 4 : settings.quick ? 12 : 48;
  if (settings.requests == 0) settings.requests = settings.smoke ? 6 : settings.quick ? 16 : 200;
  if (settings.hours == 0) settings.hours = settings.smoke ? 0.02 : settings.quick ? 1 : 24;
  if (settings.smoke) {
    settings.traffic.systems = {320, 448};
    settings.traffic.own = {.median = 40, .sigma = 0.5, .least = 16, .most = 80};
    settings.traffic.answer = {.median = 12, .sigma = 0.5, .least = 8, .most = 24};
    settings.long_texts.own = {.median = 300, .sigma = 0.3, .least = 200, .most = 400};
    settings.long_texts.answer = settings.traffic.answer;
  }
  set_lengths(settings, settings.traffic);
  set_lengths(settings, settings.long_texts);
  settings.long_texts.seed = settings.traffic.seed;

  std::unique_ptr<Subject> subject;
  if (settings.model == "llama3") {
    subject = std::make_unique<ShapeSubject>(settings.layers > 0 ? settings.layers : settings.smoke ? 1 : 32);
  } else {
    require(settings.layers == 0, "--layers is for --model llama3; ", settings.model, " has its own");
    tools::require_model_folder(settings.model);
    subject = std::make_unique<TextSubject>(settings.model, tools::last_part(settings.model));
  }
  if (settings.plans.empty()) settings.plans = subject->plans();
  const std::size_t budget = settings.memory > 0 ? settings.memory * mebibyte
                             : settings.smoke    ? 4 * mebibyte * (settings.model == "llama3" ? 2 : 1)
                                                 : subject->memory() * mebibyte;
  Report report{settings, *subject, budget, command};
  for (const std::string& plan : settings.plans) static_cast<void>(subject->plan(plan));  // errors come first

  if (wanted.saturate || wanted.unshared || wanted.open) {
    for (const std::string& plan : settings.plans) verify(report, settings, *subject, plan);
  }
  std::vector<double> rates = settings.rates;
  if (wanted.saturate || (wanted.open && rates.empty())) {
    for (const std::string& plan : settings.plans) {
      const Measured run = saturate(report, settings, *subject, plan, budget);
      // What the first plan can just about carry.
      if (rates.empty()) rates.push_back(std::max(0.8 * run.requests_per_second(), 1e-3));
    }
  }
  if (wanted.unshared) {
    for (const std::string& plan : settings.plans) unshared(report, settings, *subject, plan, budget);
  }
  if (wanted.open) {
    for (const double rate : rates) {
      for (const std::string& plan : settings.plans)
        open_loop(report, settings, *subject, plan, budget, rate);
    }
  }
  for (const std::string plan : {"full", "duo+int4:0.5"}) {
    if (wanted.batch) batch(report, settings, *subject, plan);
  }
  for (const std::string plan : {"full", "duo+int4:0.5"}) {
    if (wanted.prefix) prefix(report, settings, *subject, plan);
  }
  if (wanted.hours) hours(report, settings, settings.hours);
  report.progress().clear();
  require<StorageError>(!report.failed(), "a case was wrong; see above");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  settings.model = tools::repository_path(tools::shipped_model);
  const std::string command = command_of(argc, argv);
  CLI::App app{description, "serving_bench"};
  app.footer(examples);
  app.get_formatter()->column_width(26);
  const auto count = [&](const std::string& name, std::size_t& value, const std::string& what,
                         std::size_t least) {
    app.add_option(name, value, what)
        ->type_name("N")
        ->check(tools::whole_number(least, 100'000'000))
        ->capture_default_str();
  };
  app.add_option("--model", settings.model,
                 "Model folder or GGUF file, or llama3: the shape of Llama-3-8B without weights")
      ->type_name("DIR");
  count("--layers", settings.layers, "Layers of llama3; 0: all 32", 0);
  app.add_option("--plans", settings.plans,
                 "Names of plans or plan files; default: full int8 duo:0.5 duo+int4:0.5 headkv:128 (for "
                 "bytes headkv:128,kernel=29,beta=2), and search:0.2,4096 where the model has a damage.json")
      ->type_name("PLAN");
  count("--memory", settings.memory,
        "MiB for KV caches; 0: 64 (shipped model), 512, or 128 a layer of llama3", 0);
  count("--swap-memory", settings.swap_memory, "MiB for rows of requests that are moved out; 0: none is", 0);
  count("--step-tokens", settings.step_tokens, "Most tokens of prompts in a step", 1);
  count("--max-running", settings.max_running, "Most requests in a step", 1);
  count("--threads", settings.threads, "Threads of the model; 0: all that OpenMP offers", 0);
  count("--saturate", settings.saturate, "So many requests, all queued at once", 0);
  count("--unshared", settings.unshared,
        "So many requests, all queued at once, that share nothing: long texts (median 4,096 tokens), long "
        "answers (256)",
        0);
  app.add_option("--rate", settings.rates,
                 "Poisson arrivals a second; several are measured one after another. Default: 0.8 of what "
                 "the first plan "
                 "ends a second when everything is queued")
      ->type_name("R")
      ->check(tools::number_from(1e-6, 1e6));
  count("--requests", settings.requests, "Requests of each such run; 0: 200", 0);
  app.add_flag("--batch", settings.batch, "Eight equal texts, together and one after another");
  app.add_flag("--prefix", settings.prefix, "32 requests over one prefix of 8,192 tokens, and over none");
  app.add_option("--hours", settings.hours, "Simulated hours of a tiny model: does memory stay flat?")
      ->type_name("H")
      ->check(tools::number_from(0.001, 10'000));
  app.add_option("--systems", settings.traffic.systems, "Tokens of the shared texts")->type_name("N");
  app.add_option("--own", settings.own, "Tokens of a request's own text, median; default: 256")
      ->type_name("N")
      ->check(tools::number_from(1, 1e6));
  count("--own-most", settings.own_most, "Most tokens of such a text; 0: four times the median", 0);
  app.add_option("--answer", settings.answer,
                 "Tokens of an answer, median; default: 64. The longest has four times as many")
      ->type_name("N")
      ->check(tools::number_from(1, 1e6));
  app.add_option("--seed", settings.traffic.seed, "Draws texts, lengths and arrivals")
      ->check(tools::any_whole_number())
      ->capture_default_str();
  app.add_option("--json", settings.json, "Results for machines, written after each case")->type_name("FILE");
  app.add_flag("--quick", settings.quick, "Fewer requests");
  app.add_flag("--smoke", settings.smoke, "Everything tiny: a test");
  return tools::run_tool(app, argc, argv, [&] { run(settings, command); });
}
