// SPDX-License-Identifier: Apache-2.0
//
// The random tests of batches, prefixes and bounds, as often as one likes: ./scripts/long-runs. Set after set, each
// from a seed of its own; the first that goes wrong ends the run and names its seed.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/cpu.hpp>

#include "cache/bounded_text.hpp"
#include "cache/prefix_texts.hpp"
#include "support/batch_twins.hpp"
#include "support/random_saved_plan.hpp"

namespace {

using Json = nlohmann::ordered_json;

struct Settings {
  std::size_t batches = 100'000;
  std::size_t prefix_operations = 1'000'000;
  std::size_t bounds = 10'000'000;
  std::uint64_t seed = 1;
  std::string engine = "scalar";
  std::string json;
};

[[nodiscard]] double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The processor's name, as the system says it; empty where it does not.
[[nodiscard]] std::string processor() {
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
  explicit Record(Settings settings)
      : settings_{std::move(settings)},
        batches_{"batches", "--batches", settings_.batches},
        prefixes_{"prefixes", "--prefix-operations", settings_.prefix_operations},
        bounds_{"bounds", "--bounds", settings_.bounds} {}

  [[nodiscard]] const Settings& settings() const { return settings_; }
  [[nodiscard]] Part& batches() { return batches_; }
  [[nodiscard]] Part& prefixes() { return prefixes_; }
  [[nodiscard]] Part& bounds() { return bounds_; }

  /// Runs sets until the part has done what is wanted; run_set(seed) returns how much it did.
  template <class RunSet>
  void run(Part& part, RunSet run_set) {
    const double start = now();
    for (std::uint64_t seed = settings_.seed; part.done < part.wanted; ++seed) {
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
    if (settings_.json.empty()) return;
    Json all{{"processor", processor()},
             {"threads", 1},
             {"engine", settings_.engine},
             {"first_seed", settings_.seed},
             {"passed", passed}};
    for (const Part* part : {&batches_, &prefixes_, &bounds_}) {
      if (!passed && part->running) all["failed"] = {{"part", part->name}, {"seed", *part->running}};
      all[std::string{part->name}] = part->json();
    }
    // A new file each time, so that nobody finds half of one.
    const std::string partial = settings_.json + ".partial";
    std::ofstream file{partial};
    file << all.dump(2) << '\n';
    file.close();
    if (!file) throw std::runtime_error("cannot write " + partial);
    std::filesystem::rename(partial, settings_.json);
  }

  /// How the set that failed is run again, by itself.
  void tell_failure() const {
    for (const Part* part : {&batches_, &prefixes_, &bounds_}) {
      if (!part->running) continue;
      std::string alone;
      for (const Part* each : {&batches_, &prefixes_, &bounds_}) {
        alone.append(" ").append(each->option).append(each == part ? " 1" : " 0");
      }
      std::fprintf(stderr,
                   "failed: %s, seed %llu; again with ./scripts/long-runs --engine %s --seed %llu%s\n",
                   std::string{part->name}.c_str(), static_cast<unsigned long long>(*part->running),
                   settings_.engine.c_str(), static_cast<unsigned long long>(*part->running), alone.c_str());
    }
  }

 private:
  void tell(const Part& part) {
    std::fprintf(stderr, "%-8s  %zu of %zu, %zu sets, %.0f s\n", std::string{part.name}.c_str(), part.done,
                 part.wanted, part.sets, part.seconds);
    write(true);
    told_ = now();
  }

  Settings settings_;
  Part batches_;
  Part prefixes_;
  Part bounds_;
  double told_ = now();
};

Record* record = nullptr;  // doctest's cases take no arguments

void add(Json& counts, const char* name, std::size_t count) {
  counts[name] = counts.value(name, std::size_t{0}) + count;
}

template <kvpolicy::Element E, class Engine>
std::size_t run_batches(std::uint64_t seed, const kvpolicy::ModelShape& shape, Json& counts) {
  test::BatchOfTwins<E, Engine> twins{seed, shape};
  twins.run(200);
  const test::TwinCounts& own = twins.counts();
  add(counts, "sequences_stepped", own.sequences);
  add(counts, "tokens", own.tokens);
  add(counts, "tree_calls", own.tree_calls);
  add(counts, "joins", own.joins);
  add(counts, "forks", own.forks);
  add(counts, "leaves", own.leaves);
  add(counts, "rollbacks", own.rollbacks);
  add(counts, "accepts", own.accepts);
  add(counts, "commits", own.commits);
  add(counts, "compressions", own.compressions);
  return own.batches;
}

template <class Engine>
std::size_t run_prefixes(std::uint64_t seed, Json& counts) {
  const kvpolicy::ModelShape shape{1, 4, 4, 64};
  kvpolicy::testing::Random random{static_cast<unsigned>(seed)};
  const kvpolicy::CacheOptions options{.max_rollback = seed % 4 == 0 ? 5U : 0U, .page_rows = 32};
  std::vector<kvpolicy::HeadPlan<float>> plans;
  for (int i = 0; i < 2; ++i) {
    plans.push_back(test::random_saved_plan<float>(shape, random, options.max_rollback > 0));
  }
  plans.push_back(kvpolicy::HeadPlan<float>{shape});
  const std::size_t longest = seed % 8 == 1 ? 200 : 60;
  test::RandomPrefixes<float, Engine> texts{seed, plans, options, longest, seed % 3 == 0 ? 2'000'000U : 0U};
  texts.run(300);
  const test::PrefixCounts& own = texts.counts();
  const kvpolicy::PrefixStatistics statistics = texts.prefixes().statistics();
  add(counts, "lookups", statistics.lookups);
  add(counts, "hits", statistics.hits);
  add(counts, "asked_tokens", statistics.asked_tokens);
  add(counts, "found_tokens", statistics.found_tokens);
  add(counts, "keeps", own.keeps);
  add(counts, "kept", statistics.kept);
  add(counts, "evicts", own.evicts);
  add(counts, "clears", own.clears);
  add(counts, "evicted", statistics.evicted);
  return statistics.lookups + own.keeps + own.evicts + own.clears;
}

template <class Engine>
void run_all_batches(Part& part) {
  record->run(part, [&](std::uint64_t seed) {
    const kvpolicy::ModelShape shape{1 + seed % 2, 4, 1 + seed / 2 % 2, 64};
    return seed % 4 == 3 ? run_batches<kvpolicy::bfloat16, Engine>(seed, shape, part.counts)
                         : run_batches<float, Engine>(seed, shape, part.counts);
  });
}
template <class Engine>
void run_all_prefixes(Part& part) {
  record->run(part, [&](std::uint64_t seed) { return run_prefixes<Engine>(seed, part.counts); });
}

[[nodiscard]] bool is_on_cpu_engine() { return record->settings().engine == "cpu"; }

}  // namespace

TEST_CASE("random batches, bit for bit as one by one") {
  is_on_cpu_engine() ? run_all_batches<kvpolicy::cpu::Engine<>>(record->batches())
                     : run_all_batches<kvpolicy::ScalarEngine>(record->batches());
}

TEST_CASE("random texts with prefixes, bit for bit as from their beginnings") {
  is_on_cpu_engine() ? run_all_prefixes<kvpolicy::cpu::Engine<>>(record->prefixes())
                     : run_all_prefixes<kvpolicy::ScalarEngine>(record->prefixes());
}

TEST_CASE("random reads with a bound, against attention in double") {
  record->run(record->bounds(), [](std::uint64_t seed) {
    return is_on_cpu_engine() ? test::check_random_bounds<kvpolicy::cpu::Engine<>>(seed)
                              : test::check_random_bounds<kvpolicy::ScalarEngine>(seed);
  });
}

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app{
      "Random batches and random texts with prefixes, compared bit for bit with caches that are alone, and "
      "random reads "
      "with a bound, compared with attention in double. One thread."};
  app.add_option("--batches", settings.batches, "how many batches to step")->capture_default_str();
  app.add_option("--prefix-operations", settings.prefix_operations,
                 "how many calls of find, keep, evict and clear to make, as texts are read that begin alike")
      ->capture_default_str();
  app.add_option("--bounds", settings.bounds, "how many rows to bound, each time that a query's are")
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the first set of each part; the next has the next one")
      ->capture_default_str();
  app.add_option("--engine", settings.engine, "scalar, the plain one, or cpu")
      ->check(CLI::IsMember({"scalar", "cpu"}))
      ->capture_default_str();
  app.add_option("--json", settings.json, "writes there what was done, also on the way");
  CLI11_PARSE(app, argc, argv);
  try {
    Record own{settings};
    record = &own;
    doctest::Context context;
    context.setOption("no-version", true);
    context.setOption("abort-after", 1);
    const bool passed = context.run() == 0;
    own.write(passed);
    if (!passed) own.tell_failure();
    return passed ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
