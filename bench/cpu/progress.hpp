// SPDX-License-Identifier: Apache-2.0
//
// Prints a line for each case while the bench runs, with the share of all cases that is done and an
// estimate of the remaining time. The numbers for programs go to --json.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "samples.hpp"

namespace kvpolicy::bench {

/// The name of a case without the suffix that Google Benchmark adds.
[[nodiscard]] inline std::string plain_name(std::string name) {
  for (const char* part : {"/iterations:1", "/manual_time"}) {
    const std::size_t at = name.find(part);
    if (at != std::string::npos) name.erase(at, std::string{part}.size());
  }
  return name;
}

/// "1 min 05 s"
[[nodiscard]] inline std::string duration(double seconds) {
  const auto whole = static_cast<long>(seconds + 0.5);
  char text[48];
  if (whole < 60) {
    std::snprintf(text, sizeof text, "%ld s", whole);
  } else {
    std::snprintf(text, sizeof text, "%ld min %02ld s", whole / 60, whole % 60);
  }
  return text;
}

class Progress : public benchmark::BenchmarkReporter {
 public:
  /// `weights`: the estimated time of each case, in any unit, in the order in which they run.
  explicit Progress(std::vector<double> weights) : weights_{std::move(weights)} {
    for (const double weight : weights_) left_ += weight;
    total_ = left_;
  }

  bool ReportContext(const Context&) override {
    start_ = Clock::now();
    std::printf("%zu cases, about %s where nothing else runs\n", weights_.size(), duration(total_).c_str());
    return true;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (done_ < weights_.size()) left_ -= weights_[done_];
      ++done_;
      std::printf("[%3zu/%zu] %-44s %s%s\n", done_, weights_.size(), plain_name(run.benchmark_name()).c_str(),
                  said(run).c_str(), time_left().c_str());
      std::fflush(stdout);
    }
  }

 private:
  [[nodiscard]] static double counter(const Run& run, const char* name) {
    const auto found = run.counters.find(name);
    return found == run.counters.end() ? -1.0 : found->second.value;
  }
  // The reason why a case was skipped, or nothing; Google Benchmark 1.8 has another member for it
  // than 1.7.
  template <class AnyRun>
  [[nodiscard]] static std::string skipped(const AnyRun& run) {
    if constexpr (requires { run.error_occurred; }) {
      return run.error_occurred ? run.error_message : std::string{};
    } else {
      return static_cast<bool>(run.skipped) ? run.skip_message : std::string{};
    }
  }
  [[nodiscard]] static std::string said(const Run& run) {
    if (const std::string why = skipped(run); !why.empty()) return "SKIPPED: " + why;
    char text[96];
    std::snprintf(text, sizeof text, "%10.3f ms (%.3f to %.3f)", counter(run, "ms"), counter(run, "ms_p10"),
                  counter(run, "ms_p90"));
    std::string line = text;
    const auto add = [&](const char* format, const char* name, double unit = 1.0) {
      if (counter(run, name) < 0) return;
      std::snprintf(text, sizeof text, format, counter(run, name) / unit);
      line += text;
    };
    add(", %.1f MB", "bytes", 1e6);
    add(", %.1f GB/s", "GB_per_s");
    add(" = %.0f %%", "percent_of_ceiling");
    add(" of %.1f", "ceiling_GB_per_s");
    add(", %.0f GFLOP/s", "GFLOP_per_s");
    add(", %.2fx", "speedup");
    add(", append %.1f %%", "append_percent");
    add(", select %.1f %%", "select_percent");
    add(", compress %.1f %% of the last chunk", "compress_percent");
    add(", off by %.1g", "error");
    if (counter(run, "others_percent") > 5) add(", OTHERS RAN %.0f %%", "others_percent");
    return line;
  }
  [[nodiscard]] std::string time_left() const {
    const double over = total_ - left_;
    if (over <= 0.0 || done_ >= weights_.size()) return {};
    return "; " + duration(seconds_since(start_) * left_ / over) + " left";
  }

  std::vector<double> weights_;
  double total_ = 0.0;
  double left_ = 0.0;
  std::size_t done_ = 0;
  Clock::time_point start_;
};

}  // namespace kvpolicy::bench
