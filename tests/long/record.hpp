// SPDX-License-Identifier: Apache-2.0
//
// What random tests that run for as long as one likes (./scripts/long-runs) have done, set after set, each from a seed
// of its own; the first that goes wrong ends the run and names its seed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

namespace test {

using Json = nlohmann::ordered_json;

[[nodiscard]] inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The processor's name, as the system says it; empty where it does not.
[[nodiscard]] inline std::string processor() {
  std::ifstream file{"/proc/cpuinfo"};
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return {};
}

/// One of the parts of a run: so many sets as it takes to do so much.
struct Part {
  std::string_view name;    // in the JSON
  std::string_view option;  // of the command
  std::size_t wanted = 0;
  std::size_t done = 0;
  std::size_t sets = 0;
  double seconds = 0;
  Json counts = Json::object();
  std::optional<std::uint64_t> running = std::nullopt;  // the seed of the set under way

  [[nodiscard]] Json json() const {
    Json all{{"wanted", wanted}, {"done", done}, {"complete", done >= wanted}, {"sets", sets}};
    all["seconds"] = static_cast<double>(static_cast<std::int64_t>(seconds * 10)) / 10;
    all.update(counts);
    return all;
  }
};

/// What was done so far, on the screen and in the file.
class Record {
 public:
  /// `engine`: what ran it. `file`: where it is written to, if anywhere.
  Record(std::string engine, std::uint64_t first_seed, std::string file, std::vector<Part> parts)
      : engine_{std::move(engine)},
        first_seed_{first_seed},
        file_{std::move(file)},
        parts_{std::move(parts)} {}

  [[nodiscard]] const std::string& engine() const { return engine_; }
  [[nodiscard]] Part& part(std::string_view name) {
    return *std::ranges::find(parts_, name, [](const Part& one) { return one.name; });
  }

  /// Runs sets until the part has done what is wanted; run_set(seed) returns how much it did.
  template <class RunSet>
  void run(Part& part, RunSet run_set) {
    const double start = now();
    for (std::uint64_t seed = first_seed_; part.done < part.wanted; ++seed) {
      CAPTURE(seed);
      part.running = seed;
      part.done += run_set(seed);
      part.running.reset();
      ++part.sets;
      part.seconds = now() - start;
      if (now() - told_ > 15.0 || part.done >= part.wanted) tell(part);
    }
  }

  /// Writes the file. A run that was stopped leaves what it had done up to then.
  void write(bool passed) const {
    if (file_.empty()) return;
    Json all{{"processor", processor()},
             {"threads", 1},
             {"engine", engine_},
             {"first_seed", first_seed_},
             {"passed", passed}};
    for (const Part& part : parts_) {
      if (!passed && part.running) all["failed"] = {{"part", part.name}, {"seed", *part.running}};
      all[std::string{part.name}] = part.json();
    }
    // A new file each time, so that nobody finds half of one.
    const std::string partial = file_ + ".partial";
    std::ofstream file{partial};
    file << all.dump(2) << '\n';
    file.close();
    if (!file) throw std::runtime_error("cannot write " + partial);
    std::filesystem::rename(partial, file_);
  }

  /// How the set that failed is run again, by itself. `options`: those of the command besides the parts'.
  void tell_failure(const std::string& options) const {
    for (const Part& part : parts_) {
      if (!part.running) continue;
      std::string alone = options;
      for (const Part& each : parts_) {
        alone.append(" ").append(each.option).append(&each == &part ? " 1" : " 0");
      }
      std::fprintf(stderr, "failed: %s, seed %llu; again with ./scripts/long-runs --seed %llu%s\n",
                   std::string{part.name}.c_str(), static_cast<unsigned long long>(*part.running),
                   static_cast<unsigned long long>(*part.running), alone.c_str());
    }
  }

 private:
  void tell(const Part& part) {
    std::fprintf(stderr, "%-8s  %zu of %zu, %zu sets, %.0f s\n", std::string{part.name}.c_str(), part.done,
                 part.wanted, part.sets, part.seconds);
    write(true);
    told_ = now();
  }

  std::string engine_;
  std::uint64_t first_seed_;
  std::string file_;
  std::vector<Part> parts_;
  double told_ = now();
};

/// Runs doctest's cases, which fill the record; what main returns.
inline int run_cases(Record& record, const std::string& options) {
  try {
    doctest::Context context;
    context.setOption("no-version", true);
    context.setOption("abort-after", 1);
    const bool passed = context.run() == 0;
    record.write(passed);
    if (!passed) record.tell_failure(options);
    return passed ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace test
