// SPDX-License-Identifier: Apache-2.0
//
// The common part of the benches' main: options besides those of Google Benchmark, the facts of the
// device in the context of the results, and an error message where there is no device.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "workload.hpp"

namespace kvpolicy::bench {

/// An option with a value, for one program.
struct Option {
  std::string_view name;
  std::function<void(const char*)> take;
};

/// Parses our options (--help, --smoke, --samples, `options`), finds the device, lets
/// `add_cases(run)` register benchmarks and runs them. Returns the program's exit status.
/// `add_cases(run)` register benchmarks and runs them. Returns the program's status.
template <class AddCases>
int run_program(int argc, char** argv, std::string_view usage, bool flushes,
                const std::vector<Option>& options, AddCases add_cases) {
  Run run;
  std::vector<char*> rest{argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--help" || option == "-h") {
      std::fputs(usage.data(), stdout);
      return 0;
    }
    if (option == "--smoke") {
      run.smoke = true;
      run.samples = 2;
      continue;
    }
    const auto own = std::ranges::find(options, option, &Option::name);
    if (option != "--samples" && own == options.end()) {
      rest.push_back(argv[i]);
      continue;
    }
    if (++i == argc) {
      std::fprintf(stderr, "%s needs a value; --help says more\n", option.data());
      return 2;
    }
    if (own != options.end()) {
      own->take(argv[i]);
    } else {
      run.samples = static_cast<std::size_t>(std::max(1, std::atoi(argv[i])));
    }
  }
  auto count = static_cast<int>(rest.size());
  try {
    run.device = device_info();
    gpu::check(cudaStreamCreate(&run.stream), "cudaStreamCreate");
    run.timer = std::make_unique<Timer>(run.smoke || !flushes ? 4096 : 4 * run.device.l2_bytes, run.stream);
    const std::size_t copied = run.smoke
                                   ? std::size_t{1} << 20
                                   : std::min<std::size_t>(std::size_t{4} << 30, run.device.memory_bytes / 8);
    run.copy_bytes_per_second = copy_bandwidth(*run.timer, copied, run.stream);
    const auto say = [](const char* key, const std::string& value) {
      benchmark::AddCustomContext(key, value);
    };
    say("device", run.device.name);
    say("driver", run.device.driver);
    say("target", run.device.target);
    say("multiprocessors", std::to_string(run.device.multiprocessors));
    say("memory_GiB", std::to_string(static_cast<double>(run.device.memory_bytes) / 0x1p30));
    say("nominal_GB_per_s", std::to_string(run.device.bytes_per_second * 1e-9));
    say("nominal_TFLOP_per_s", std::to_string(run.device.flops_per_second * 1e-12));
    say("nominal_from", run.device.limits);
    say("copy_GB_per_s", std::to_string(run.copy_bytes_per_second * 1e-9));
    say("empty_sample_us", std::to_string(empty_sample(*run.timer) * 1e6));
    say("dtype", "bfloat16, head_dim 128");
    say("smoke", run.smoke ? "yes" : "no");

    benchmark::Initialize(&count, rest.data());
    if (benchmark::ReportUnrecognizedArguments(count, rest.data())) return 2;
    const auto cases = add_cases(run);
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
  return run.failed ? 1 : 0;
}

/// Registers one case with a fixed number of samples, each of which reports its own time.
template <class Body>
void add_case(const std::string& name, std::size_t samples, benchmark::TimeUnit unit, Body body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Unit(unit)
      ->Iterations(static_cast<benchmark::IterationCount>(samples));
}

}  // namespace kvpolicy::bench
