// SPDX-License-Identifier: Apache-2.0
//
// identify_heads duo: DuoAttention's identification, and the methods that its paper compares it
// with.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/identify/duo_gates.hpp>
#include <reference_model/identify/head_ablation.hpp>
#include <reference_model/identify/head_profile.hpp>
#include <reference_model/llama.hpp>

#include <fmt/format.h>

#include <common/files.hpp>
#include <common/heat_map.hpp>
#include <common/json_line.hpp>
#include <common/progress.hpp>
#include <common/retrieval_text.hpp>
#include <common/run_tool.hpp>
#include <common/sequence.hpp>
#include <common/stopwatch.hpp>
#include <common/terminal.hpp>
#include <common/text_model.hpp>

#include "duo_checkpoint.hpp"
#include "duo_settings.hpp"
#include "own_texts.hpp"
#include "passkey_text.hpp"
#include "subcommands.hpp"

namespace kvpolicy::tools {
namespace {

namespace fs = std::filesystem;
using Arguments = DuoSettings;

constexpr const char* footer = R"(
A gate of 1 says that a KV head needs the whole text, a gate of 0 that the first and the latest rows
are enough. Methods:
  optimise  DuoAttention: all gates are trained at once. Each head mixes full and streaming attention
            by its gate; the training closes gates as long as the model's results stay the same. Heads
            that can replace each other are found together.
  ablation  Each head by itself is made a streaming head; its gate is the increase of the loss, on a
            logarithmic scale. This takes a run of the model for each head.
  profile   The baseline of the paper: the attention that a head pays to passkeys, or to rows that a
            streaming head would not have. This takes one run for each text.

Losses of optimise: distill compares hidden states on questions and answers about passkeys; lm is the
usual loss on plain text, which hardly ever needs far rows. --mask says what a streaming head sees
during identification; the gates are written for --sinks and --recent either way.

The shipped model reads a text of 1 Ki to 8 Ki bytes, which are its tokens, so its streaming heads have 16 sinks and 128
recent rows by default, where the paper's have 128 and 256. Texts come from the first 30 % of the
held-out text; measure on the rest.

Texts of your own are token ids, in a file for --labelled:
  {"format": "kvpolicy labelled texts", "version": 1, "texts": [
    {"tokens": [5, 9, 2, 7, 9, 2], "labelled": [[3, 6]],
     "passkeys": [{"hidden": [1, 3], "answer": [4, 6]}]}, ...]}
Ranges are [first, end], from 0, end not included; labelled are the tokens that count in a loss:
questions and answers, or nearly all of a plain text. passkeys may be left out except for --profile
passkey; ablation counts only their answers if there are any. Training takes the texts in turn,
ablation and profile the first --samples of them. Texts no longer than --sinks and --recent
together say nothing about heads.

Files in --out: full_attention_heads.tsv and config.json, as DuoAttention publishes them; config.json
also says how the gates were found. During training there is checkpoint.json, from which --resume
continues to the same gates, bit for bit. With --resume a command may be repeated until it is done:
gates in --out that were found with the same settings are not computed again.

Examples:
  identify_heads duo --out gates
  identify_heads duo --out gates --steps 2000 --context 4096 --sinks 128 --recent 256
  identify_heads duo --out gates --resume
  identify_heads duo --method profile --profile outside
  identify_heads duo --model llama --labelled texts.json --sinks 128 --recent 256 --out gates
)";

/// The gates that a method found, and the facts about the method that are written with them.
struct Found {
  HeadGates gates;
  io::Json numbers = io::Json::object();
  bool complete = true;
};

/// Returns text `number`, counted from 0, of those that heads are identified on.
using TextOf = std::function<reference::LabelledText(std::size_t number)>;

/// The model must outlive the result.
TextOf drawn_texts(const Arguments& a, const TextModel& model) {
  const std::string plain = a.text.empty() ? identification_text() : io::read_text_file(a.text);
  return [&model, plain, set = a.set, keys = a.texts != "plain"](std::size_t number) {
    return keys ? passkey_text(model, plain, set, number) : plain_text(model, plain, set, number);
  };
}

/// Loads the texts of a file and fixes the settings that a file leaves without meaning.
TextOf own_texts(Arguments& a) {
  const std::size_t vocabulary = reference::load_llama_config(a.model).vocabulary;
  LabelledTexts own = load_labelled_texts(a.labelled, vocabulary);
  if (a.method == "profile" && a.profile == "passkey") require_passkeys(own, a.labelled);
  a.labelled_digest = own.digest;
  a.samples = std::min(a.samples, own.texts.size());  // each text once
  return [texts = std::move(own.texts)](std::size_t number) { return texts[number % texts.size()]; };
}

std::string checkpoint_path(const Arguments& a) { return (fs::path{a.out} / "checkpoint.json").string(); }

bool is_there(const fs::path& path) {
  std::error_code ignored;  // on any error the file counts as missing
  return fs::exists(path, ignored);
}

/// The mean over the steps [first, last).
double mean_of(const std::vector<double>& values, std::size_t first, std::size_t last) {
  return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(first),
                         values.begin() + static_cast<std::ptrdiff_t>(last), 0.0) /
         static_cast<double>(last - first);
}

Found optimise(const Arguments& a, const reference::Llama& model, const TextOf& text_of) {
  DuoCheckpoint so_far;
  so_far.settings = json_of(a);
  const bool begun = a.resume && is_there(checkpoint_path(a));
  if (begun) so_far = load_checkpoint(checkpoint_path(a), so_far.settings);
  const std::size_t first = so_far.state.step;
  reference::GateTrainer trainer = begun ? reference::GateTrainer{model, training_of(a), so_far.state}
                                         : reference::GateTrainer{model, training_of(a)};
  const std::size_t last = a.stop_after > 0 ? std::min(a.stop_after, a.steps) : a.steps;
  // The losses of single texts vary a lot, so each line shows the mean since the line before.
  const std::size_t line = std::max<std::size_t>(a.steps / 10, 1);
  io::Json lines = io::Json::array();
  Progress progress{!a.json};
  const Stopwatch took;
  std::size_t told = 0;
  const auto tell = [&](std::size_t done, double rate) {
    const double loss = mean_of(so_far.losses, told, done);
    const double penalty = mean_of(so_far.penalties, told, done);
    told = done;
    lines.push_back({{"step", done}, {"loss", loss}, {"penalty", penalty}});
    progress.note(
        fmt::format("  step {:>5}   loss {:.6f}   penalty {:.6f}   rate {:.4f}", done, loss, penalty, rate));
  };
  for (std::size_t done = line; done <= first; done += line) {
    tell(done, a.rate * reference::rate_factor(done - 1, a.steps));
  }
  for (std::size_t done = first; done < last;) {
    const reference::GateStep step = trainer.step(text_of(done));
    ++done;
    so_far.losses.push_back(step.loss);
    so_far.penalties.push_back(step.penalty);
    progress.update(static_cast<double>(done - first) / static_cast<double>(last - first),
                    fmt::format("step {} of {}, loss {:.5f}", done, a.steps, step.loss));
    if (done % line == 0 || done == a.steps) tell(done, step.rate);
    if (!a.out.empty() && done < a.steps && (done % a.save_every == 0 || done == last)) {
      so_far.state = trainer.state();
      save_checkpoint(checkpoint_path(a), so_far);
    }
  }
  if (last > first) {
    progress.note(fmt::format("  {} steps in {}, {:.3f} s each", last - first, duration(took.seconds()),
                              took.seconds() / static_cast<double>(last - first)));
  }
  Found found{.gates = trainer.state().gates};
  found.complete = trainer.done();
  found.numbers["losses"] = std::move(lines);
  return found;
}

Found measure(const Arguments& a, const reference::Llama& model, const TextOf& text_of) {
  std::vector<reference::LabelledText> texts;
  for (std::size_t number = 0; number < a.samples; ++number) texts.push_back(text_of(number));
  Progress progress{!a.json};
  const auto report = [&](std::size_t done, std::size_t total) {
    progress.update(static_cast<double>(done) / static_cast<double>(total),
                    fmt::format("run {} of {}", done, total));
  };
  Found found;
  if (a.method == "profile") {
    const auto what = a.profile == "outside" ? reference::ProfileOf::outside : reference::ProfileOf::passkey;
    found.gates = reference::profile_heads(model, texts, mask_of(a), what, report);
    return found;
  }
  const reference::HeadAblation ablation =
      reference::ablate_heads(model, texts, mask_of(a), objective_of(a), report);
  found.gates = reference::gates_of_rises(ablation);
  found.numbers["loss"] = ablation.loss;
  for (std::size_t layer = 0; layer < ablation.losses.layers(); ++layer) {
    const auto row = ablation.losses.layer(layer);
    found.numbers["losses"].push_back(std::vector<double>(row.begin(), row.end()));
  }
  return found;
}

/// Writes the published files; the second also says how the gates were found.
void write(const Arguments& a, const Found& found) {
  const fs::path folder{a.out};
  io::save_duo_pattern(folder, {.gates = found.gates, .sinks = a.sinks, .recent = a.recent});
  io::Json config = {{"sink_size", a.sinks}, {"recent_size", a.recent}};
  config.update(json_of(a));
  for (const auto& [name, value] : found.numbers.items()) config[name] = value;
  io::write_text_file(folder / io::duo_config_file, as_line(config, 2) + "\n");
  std::error_code ignored;
  fs::remove(checkpoint_path(a), ignored);
}

void show(const Arguments& a, const Found& found) {
  if (a.json) {
    io::Json json = json_of(a);
    for (std::size_t layer = 0; layer < found.gates.layers(); ++layer) {
      const auto row = found.gates.layer(layer);
      json["gates"].push_back(std::vector<double>(row.begin(), row.end()));
    }
    json["complete"] = found.complete;
    for (const auto& [name, value] : found.numbers.items()) json[name] = value;
    fmt::print("{}\n", as_line(json));
    return;
  }
  const HeadKinds kinds = head_kinds(found.gates, a.sparsity);
  fmt::print("\nGates; at a sparsity of {} the framed heads keep the whole text:\n\n{}\n", a.sparsity,
             heat_map(found.gates, kinds, wants_colour(stdout)));
  fmt::print("{}", io::format_duo_gates(found.gates));
  if (!found.complete) {
    fmt::print("\nStopped early; --resume --out {} goes on.\n", a.out);
  } else if (a.out.empty()) {
    fmt::print("\nNothing was written; --out FOLDER keeps the gates.\n");
  } else {
    fmt::print("\n{} holds them; use them with --plan duo@{}:{}\n", a.out, a.out, a.sparsity);
  }
}

/// Gates that were found before with exactly these settings; none if there are none or the settings
/// differ.
std::optional<Found> found_before(const Arguments& a) {
  const fs::path folder{a.out};
  if (!is_there(folder / io::duo_config_file) || !is_there(folder / io::duo_gates_file)) return {};
  const std::string path = (folder / io::duo_config_file).string();
  const io::Json config = io::parse_json(io::read_text_file(path), path);
  io::Json wanted = json_of(a);
  wanted["sink_size"] = a.sinks;
  wanted["recent_size"] = a.recent;
  for (const auto& [name, value] : wanted.items()) {
    if (!config.is_object() || !config.contains(name) || config[name] != value) return {};
  }
  return Found{.gates = io::load_duo_pattern(folder).gates};
}

void run(Arguments a) {
  settle(a);
  TextOf text_of;
  if (!a.labelled.empty()) {
    require_model_folder(a.model);
    text_of = own_texts(a);
  }
  if (a.resume && !is_there(checkpoint_path(a))) {
    if (const auto before = found_before(a)) {
      if (!a.json) fmt::print("{} holds what would be found: nothing is left to do.\n", a.out);
      return show(a, *before);
    }
  }
  set_threads(a.threads);
  const auto model = TextModel::load(a.model);
  if (!text_of) {
    model.require_reads_texts();
    a.context.check(model.config(), a.set.context);
    text_of = drawn_texts(a, model);
  }
  const Found found =
      a.method == "optimise" ? optimise(a, model.llama(), text_of) : measure(a, model.llama(), text_of);
  if (!a.out.empty() && found.complete) write(a, found);
  show(a, found);
}

}  // namespace

void add_duo(CLI::App& app, std::function<void()>& work) {
  // lives as long as the command line that fills it
  const auto a = std::make_shared<Arguments>();
  a->model = repository_path(shipped_model);
  CLI::App* command = app.add_subcommand(
      "duo", "A gate for each KV head: DuoAttention's training, ablation or attention profiles");
  command->footer(footer);
  command->get_formatter()->column_width(26);
  const auto text = [&](const char* name, std::string& value, const char* about, const char* type) {
    return command->add_option(name, value, about)->type_name(type);
  };
  const auto choice = [&](const char* name, std::string& value, const char* about,
                          std::vector<std::string> choices) {
    return command->add_option(name, value, about)
        ->check(CLI::IsMember(std::move(choices)))
        ->type_name("NAME");
  };
  text("--model", a->model, "Hugging Face folder of the model", "DIR")->capture_default_str();
  text("--out", a->out, "Folder that the gates go to", "DIR");
  choice("--method", a->method, "optimise, ablation or profile, see below",
         {"optimise", "ablation", "profile"})
      ->capture_default_str();
  choice("--loss", a->loss, "distill or lm; default: distill, for ablation lm", {"distill", "lm"});
  choice("--mask", a->mask, "What streaming heads see: both, or only sinks or recent rows",
         {"both", "sinks", "recent"})
      ->capture_default_str();
  add_count(*command, "--sinks", a->sinks, "First rows of a streaming head", 0, 1'000'000);
  add_count(*command, "--recent", a->recent, "Latest rows of a streaming head", 1, 1'000'000);
  add_count(*command, "--steps", a->steps, "Steps of training, a text each; the paper's are 2000", 1,
            10'000'000);
  add_count(*command, "--samples", a->samples, "Texts of ablation and profile", 1, 1'000'000);
  CLI::Option* own = text("--labelled", a->labelled, "Texts of your own, as token ids", "FILE");
  // The options for drawing texts have no meaning for texts from a file.
  own->excludes(add_count(*command, "--context", a->set.context, "Tokens of the longest text, all included",
                          256, 10'000'000));
  own->excludes(add_count(*command, "--lengths", a->set.lengths, "Different lengths", 1, 1'000'000));
  own->excludes(add_count(*command, "--passkeys", a->set.passkeys, "Passkeys in a text", 1, 1000));
  own->excludes(choice("--passkey-kind", a->keys, "digits, or the published 32 words", {"digits", "words"})
                    ->capture_default_str());
  own->excludes(choice("--texts", a->texts,
                       "passkeys or plain; default: passkeys, for training with lm plain",
                       {"passkeys", "plain"}));
  own->excludes(text("--text", a->text, "Plain text instead of the shipped one", "FILE"));
  choice("--mixing", a->mixing, "Full attention from the unmodified run, or from the mixed one",
         {"unmodified", "mixed"})
      ->capture_default_str();
  choice("--reduction", a->reduction, "Losses as means, or as the paper's sums", {"mean", "sum"})
      ->capture_default_str();
  choice("--profile", a->profile, "Attention to passkeys, or outside sinks and recent rows",
         {"passkey", "outside"})
      ->capture_default_str();
  command->add_option("--rate", a->rate, "Learning rate of AdamW")
      ->check(CLI::PositiveNumber)
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--penalty", a->penalty, "Weight of the penalty on open gates")
      ->check(CLI::PositiveNumber)
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--sparsity", a->sparsity, "Share of streaming heads in the picture")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X")
      ->capture_default_str();
  add_count(*command, "--save-every", a->save_every, "Steps between checkpoints", 1, 10'000'000);
  add_count(*command, "--stop-after", a->stop_after, "Stop at that step, to continue later; 0: never", 0,
            10'000'000);
  command->add_flag(
      "--resume", a->resume,
      "Continue from the checkpoint in --out if there is one; do nothing if its gates are complete");
  own->excludes(command->add_option("--seed", a->set.seed, "Other texts")
                    ->check(any_whole_number())
                    ->type_name("N")
                    ->capture_default_str());
  command->add_option("--threads", a->threads, "Threads; 0: all that OpenMP offers")
      ->check(whole_number(0, most_threads))
      ->type_name("N")
      ->capture_default_str();
  a->context.add_to(*command);
  command->add_flag("--json", a->json, "Print JSON");
  command->callback([a, &work] { work = [a] { run(*a); }; });
}

}  // namespace kvpolicy::tools
