// SPDX-License-Identifier: Apache-2.0
//
// Results: a line for who watches, and JSON like that of the other benches, which is written after every case.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <string>
#include <thread>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <hwy/highway.h>

#include "bench/cpu/machine.hpp"
#include "common/files.hpp"
#include "common/progress.hpp"
#include "common/sequence.hpp"
#include "common/terminal.hpp"
#include "drive.hpp"
#include "settings.hpp"

namespace kvpolicy::bench {

/// The command without what is this machine's business: of paths the last part, and not where results go.
[[nodiscard]] inline std::string command_of(int argc, char** argv) {
  std::string command = "serving_bench";
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--json" && i + 1 < argc) {
      ++i;
      continue;
    }
    if (word.starts_with("--json=")) continue;
    const std::string last = std::filesystem::path{word}.lexically_normal().filename().string();
    command += " " + (word.find('/') == std::string::npos ? word : last);
  }
  return command;
}

class Report {
 public:
  Report(const Settings& settings, const Subject& subject, std::size_t budget, const std::string& command)
      : path_{settings.json} {
    const Machine here = machine();
    const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
    Json context{{"date", fmt::format("{:%FT%TZ}", fmt::gmtime(now))},
                 {"command", command},
                 {"cpu", here.cpu},
                 {"num_cpus", std::thread::hardware_concurrency()},
                 {"threads", tools::threads()},
                 {"target", hwy::TargetName(HWY_TARGET)},
                 {"smoke", settings.smoke},
                 {"quick", settings.quick}};
    context.update(subject.about());
    context["memory_bytes"] = budget;
    context["swap_bytes"] = settings.swap_memory * mebibyte;
    context["step_tokens"] = settings.step_tokens;
    context["max_running"] = settings.max_running;
    context["traffic"] = settings.traffic.json();
    json_ = {{"context", context}, {"benchmarks", Json::array()}};
    fmt::print("{}, {} threads, compiled for {}: {}, {} layers, {:.0f} MiB for KV caches\n", here.cpu,
               tools::threads(), hwy::TargetName(HWY_TARGET), context["model"].get<std::string>(),
               context["layers"].get<std::size_t>(), static_cast<double>(budget) / mebibyte);
    std::fflush(stdout);
  }

  /// `line`: what a person reads of it.
  void add(const std::string& name, Json entry, const std::string& line) {
    progress_.clear();
    fmt::print("{:<28} {}\n", name, line);
    std::fflush(stdout);
    Json named{{"name", name}};
    named.update(entry);
    json_["benchmarks"].push_back(std::move(named));
    if (!path_.empty()) tools::write_result(path_, json_.dump(1) + "\n");
  }
  void wrong(const std::string& name, const std::string& why) {
    progress_.clear();
    fmt::print(stderr, "wrong: {}: {}\n", name, why);
    failed_ = true;
  }
  [[nodiscard]] bool failed() const { return failed_; }
  [[nodiscard]] tools::Progress& progress() { return progress_; }

 private:
  std::string path_;
  Json json_ = Json::object();
  tools::Progress progress_;
  bool failed_ = false;
};

[[nodiscard]] inline double mebibytes(std::size_t bytes) { return static_cast<double>(bytes) / mebibyte; }

[[nodiscard]] inline Json json_of(const Measured& run) {
  Json entry{{"seconds", run.seconds},
             {"requests", run.requests},
             {"refused", run.refused},
             {"failed", run.failed},
             {"sequences_at_once", run.most_running},
             {"mean_sequences_at_once", run.mean_running},
             {"most_waiting", run.most_waiting},
             {"requests_per_second", run.requests_per_second()},
             {"tokens_per_second", run.tokens_per_second()},
             {"prompt_tokens", run.prompt_tokens},
             {"cached_tokens", run.cached_tokens},
             {"new_tokens", run.new_tokens},
             {"found_share", run.found_share()},
             {"first_token_ms", run.first_token.at(0.5) * 1e3},
             {"first_token_ms_p99", run.first_token.at(0.99) * 1e3},
             {"between_ms", run.between.at(0.5) * 1e3},
             {"between_ms_p99", run.between.at(0.99) * 1e3},
             {"moved_out", run.moved_out},
             {"budget_bytes", run.budget},
             {"peak_bytes", run.peak_bytes}};
  if (run.asked > 0) {
    entry["asked"] = run.asked;
    entry["right"] = run.right;
  }
  return entry;
}

[[nodiscard]] inline std::string line_of(const Measured& run) {
  std::string line = fmt::format(
      "{} at once (mean {:.1f}), {:.2f} requests/s, {:.0f} tokens/s, first token {:.0f} ms (99 %: {:.0f}), "
      "between {:.1f} ms ({:.1f}), {} of prompts found, {} moved out, at most {:.1f} of {:.0f} MiB",
      run.most_running, run.mean_running, run.requests_per_second(), run.tokens_per_second(),
      run.first_token.at(0.5) * 1e3, run.first_token.at(0.99) * 1e3, run.between.at(0.5) * 1e3,
      run.between.at(0.99) * 1e3, tools::percent(run.found_share()), run.moved_out, mebibytes(run.peak_bytes),
      mebibytes(run.budget));
  if (run.refused > 0) line += fmt::format(", {} refused", run.refused);
  if (run.asked > 0) {
    line += fmt::format(", {} right",
                        tools::percent(static_cast<double>(run.right) / static_cast<double>(run.asked)));
  }
  return line;
}

}  // namespace kvpolicy::bench
