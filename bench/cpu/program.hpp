// SPDX-License-Identifier: Apache-2.0
//
// Options of the CPU bench, the facts and limits of the machine, and the list of cases: which of
// them run, and in which order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/cpu/matrix_unit.hpp>

#include "progress.hpp"
#include "workload.hpp"

namespace kvpolicy::bench {

/// The options of the command line.
struct Options {
  Run run;
  std::string filter = ".";
  std::string json;
  std::string scores;  ///< a file of head scores; empty: the sample that is built in
  std::vector<std::size_t> threads;
  std::vector<char*> rest;  ///< for Google Benchmark
};

/// Parses the options. Returns the program's exit status if there is nothing to run.
[[nodiscard]] inline std::optional<int> parse_options(int argc, char** argv, std::string_view usage,
                                                      Options& options) {
  options.rest.push_back(argv[0]);
  double memory_gib = 0.0;
  std::size_t most = pool_of(0).threads();
  for (int i = 1; i < argc; ++i) {
    std::string_view name = argv[i];
    std::string value;
    const auto flag = [&](std::string_view wanted) { return name == wanted; };
    if (flag("--help") || flag("-h")) {
      std::fputs(usage.data(), stdout);
      return 0;
    }
    if (flag("--smoke")) {
      options.run.smoke = true;
      continue;
    }
    if (flag("--quick")) {
      options.run.quick = true;
      options.run.case_seconds = 0.25;
      continue;
    }
    if (flag("--cached")) {
      options.run.cached = true;
      continue;
    }
    if (name.starts_with("--benchmark_filter=")) {  // our option is needed, because it knows how
                                                    // many cases remain
      options.filter = name.substr(name.find('=') + 1);
      continue;
    }
    const bool ours = flag("--filter") || flag("--json") || flag("--seconds") || flag("--threads") ||
                      flag("--memory") || flag("--scores") || flag("--spoil");
    if (!ours) {
      options.rest.push_back(argv[i]);
      continue;
    }
    if (++i == argc) {
      std::fprintf(stderr, "%s needs a value; --help says more\n", argv[i - 1]);
      return 2;
    }
    value = argv[i];
    if (flag("--filter")) options.filter = value;
    if (flag("--json")) options.json = value;
    if (flag("--scores")) options.scores = value;
    if (flag("--seconds")) options.run.case_seconds = std::atof(value.c_str());
    if (flag("--memory")) memory_gib = std::atof(value.c_str());
    if (flag("--threads")) most = static_cast<std::size_t>(std::max(1, std::atoi(value.c_str())));
    if (flag("--spoil")) {
      options.run.spoil = value == "output"    ? Spoil::output
                          : value == "rows"    ? Spoil::rows
                          : value == "silence" ? Spoil::silence
                                               : Spoil::nothing;
    }
  }
  if (!(options.run.case_seconds > 0.0)) {
    std::fprintf(stderr, "--seconds must be a positive number; --help says more\n");
    return 2;
  }
  Run& run = options.run;
  run.machine = machine();
  run.machine.cores = most;
  run.memory_bytes = memory_gib > 0.0 ? static_cast<std::size_t>(memory_gib * 0x1p30)
                                      : std::min(run.machine.memory_bytes / 3, std::size_t{6} << 30);
  options.threads = most == 1 || run.quick ? std::vector{most} : std::vector{std::size_t{1}, most};
  return std::nullopt;
}

/// The cases that match the filter, in the order in which they are added.
class CaseList {
 public:
  explicit CaseList(const std::string& filter) : filter_{filter} {}

  /// Adds a case unless the filter excludes it; returns whether it will run. `weight`: its
  /// approximate seconds.
  bool add(const std::string& name, double weight, std::function<void(benchmark::State&)> body) {
    if (!std::regex_search(name, filter_)) return false;
    benchmark::RegisterBenchmark(name.c_str(), std::move(body))
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(1);
    weights_.push_back(weight);
    return true;
  }
  [[nodiscard]] const std::vector<double>& weights() const { return weights_; }

 private:
  std::regex filter_;
  std::vector<double> weights_;
};

/// Measures the limits of the machine and reports them, on the terminal and in the results.
inline void measure_ceilings(Run& run, const std::vector<std::size_t>& threads) {
  const std::size_t bytes =
      run.smoke ? std::size_t{1} << 20 : std::max(4 * run.machine.l3_bytes, std::size_t{256} << 20);
  run.reader = std::make_unique<Reader>(bytes);
  const auto say = [](const std::string& key, const std::string& value) {
    benchmark::AddCustomContext(key, value);
  };
  say("cpu", run.machine.cpu);
  say("cores", std::to_string(run.machine.cores));
  say("l3_MiB", std::to_string(run.machine.l3_bytes >> 20));
  say("target", hwy::TargetName(HWY_TARGET));
  say("prompts_in", std::string{name_of(cpu::matrix_unit())});
  say("smoke", run.smoke ? "yes" : "no");
  say("quick", run.quick ? "yes" : "no");
  say("cached", run.cached ? "yes" : "no");
  std::printf("%s, %zu threads at most, L3 %zu MiB, compiled for %s, prompts in %s\n",
              run.machine.cpu.c_str(), run.machine.cores, run.machine.l3_bytes >> 20,
              hwy::TargetName(HWY_TARGET), std::string{name_of(cpu::matrix_unit())}.c_str());
  for (const std::size_t count : threads) {
    const Pool pool = pool_of(count);
    const std::size_t rounds = run.smoke ? 1 : run.quick ? 4 : 8;
    run.fma_ceiling[count] = fma_ceiling(pool, count, run.smoke ? 1 : 50);
    const double gigabytes = run.reading(count, rounds) * 1e-9;
    const double gigaflops = run.fma_ceiling[count] * 1e-9;
    const std::string tail = "_threads_" + std::to_string(count);
    say("read_GB_per_s" + tail, std::to_string(gigabytes));
    say("fma_GFLOP_per_s" + tail, std::to_string(gigaflops));
    std::printf("%zu thread%s: reads %.1f GB/s, %.0f GFLOP/s of float multiply-adds\n", count,
                count == 1 ? "" : "s", gigabytes, gigaflops);
  }
  std::fflush(stdout);
}

/// The whole program; `add_cases(run, list, options)` adds the cases. Returns the exit status.
template <class AddCases>
int run_program(int argc, char** argv, std::string_view usage, AddCases add_cases) {
  Options options;
  if (const auto status = parse_options(argc, argv, usage, options)) return *status;
  std::vector<std::string> own;
  if (!options.json.empty()) {
    own = {"--benchmark_out=" + options.json, "--benchmark_out_format=json"};
    for (std::string& option : own) options.rest.push_back(option.data());
  }
  Run& run = options.run;
  try {
    CaseList list{options.filter};
    add_cases(run, list, options);
    const bool lists = std::ranges::any_of(
        options.rest, [](std::string_view option) { return option.starts_with("--benchmark_list_tests"); });
    auto count = static_cast<int>(options.rest.size());
    benchmark::Initialize(&count, options.rest.data());
    if (benchmark::ReportUnrecognizedArguments(count, options.rest.data())) return 2;
    if (list.weights().empty()) {
      std::fprintf(stderr, "no case fits '%s'; --benchmark_list_tests shows their names\n",
                   options.filter.c_str());
      return 2;
    }
    if (!lists) measure_ceilings(run, options.threads);
    Progress progress{list.weights()};
    benchmark::RunSpecifiedBenchmarks(&progress);
    benchmark::Shutdown();
    run.drop_rig();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
  return run.failed ? 1 : 0;
}

}  // namespace kvpolicy::bench
