// SPDX-License-Identifier: Apache-2.0
//
// The random tests of batches, prefixes and bounds on the host, as often as one likes: ./scripts/long-runs.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <kvpolicy/cpu.hpp>

#include "cache/bounded_text.hpp"
#include "cache/prefix_texts.hpp"
#include "long/record.hpp"
#include "support/batch_twins.hpp"
#include "support/random_saved_plan.hpp"

namespace {

using test::Json;

struct Settings {
  std::size_t batches = 100'000;
  std::size_t prefix_operations = 1'000'000;
  std::size_t bounds = 10'000'000;
  std::uint64_t seed = 1;
  std::string engine = "scalar";
  std::string json;
};

test::Record* record = nullptr;  // doctest's cases take no arguments

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
void run_all_batches(test::Part& part) {
  record->run(part, [&](std::uint64_t seed) {
    const kvpolicy::ModelShape shape{1 + seed % 2, 4, 1 + seed / 2 % 2, 64};
    return seed % 4 == 3 ? run_batches<kvpolicy::bfloat16, Engine>(seed, shape, part.counts)
                         : run_batches<float, Engine>(seed, shape, part.counts);
  });
}
template <class Engine>
void run_all_prefixes(test::Part& part) {
  record->run(part, [&](std::uint64_t seed) { return run_prefixes<Engine>(seed, part.counts); });
}

[[nodiscard]] bool is_on_cpu_engine() { return record->engine() == "cpu"; }

}  // namespace

TEST_CASE("random batches, bit for bit as one by one") {
  is_on_cpu_engine() ? run_all_batches<kvpolicy::cpu::Engine<>>(record->part("batches"))
                     : run_all_batches<kvpolicy::ScalarEngine>(record->part("batches"));
}

TEST_CASE("random texts with prefixes, bit for bit as from their beginnings") {
  is_on_cpu_engine() ? run_all_prefixes<kvpolicy::cpu::Engine<>>(record->part("prefixes"))
                     : run_all_prefixes<kvpolicy::ScalarEngine>(record->part("prefixes"));
}

TEST_CASE("random reads with a bound, against attention in double") {
  record->run(record->part("bounds"), [](std::uint64_t seed) {
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
  test::Record own{settings.engine,
                   settings.seed,
                   settings.json,
                   {{"batches", "--batches", settings.batches},
                    {"prefixes", "--prefix-operations", settings.prefix_operations},
                    {"bounds", "--bounds", settings.bounds}}};
  record = &own;
  return test::run_cases(own, " --device-bounds 0 --engine " + settings.engine);
}
