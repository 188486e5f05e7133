// SPDX-License-Identifier: Apache-2.0
//
// What the benches of speculative decoding report about runs of run_speculation: how many draft
// tokens were accepted, and the speedup over plain decoding, which alternates with it in the same
// run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvpolicy/speculation/cost_model.hpp>

#include "common/speculative_text.hpp"
#include "generate/speculation_run.hpp"

namespace kvpolicy::bench {

/// Sums over the runs of one iteration.
struct DecodingTotal {
  double tokens = 0, seconds = 0, plain_tokens = 0, plain_seconds = 0;
  double passes = 0, places = 0, accepted = 0, middle_places = 0, middle_accepted = 0;
  double expected_tokens = 0;
  bool same = true;  ///< the tokens are those of plain decoding, where it ran as well

  void add(const tools::SpeculationResult& result) {
    tokens += static_cast<double>(result.tokens);
    seconds += result.seconds;
    plain_tokens += static_cast<double>(result.plain_tokens);
    plain_seconds += result.plain_seconds;
    passes += static_cast<double>(result.steps.size());
    const tools::LevelReport& top = result.levels.front();
    places += static_cast<double>(top.judged);
    accepted += static_cast<double>(top.accepted);
    if (result.levels.size() > 2) {
      middle_places += static_cast<double>(result.levels[1].judged);
      middle_accepted += static_cast<double>(result.levels[1].accepted);
    }
    const double acceptance = top.judged > 0 ? top.acceptance() : 0.0;
    for (const tools::SpeculationStep& step : result.steps) {
      expected_tokens += kvpolicy::expected_tokens(acceptance, step.guessed);
    }
    same = same && (result.plain_tokens == 0 || result.same_text);
  }
};

/// A fixed number of draft tokens, or one that adapts.
[[nodiscard]] inline tools::SpeculationSetup decoding_setup(tools::Structure structure, double temperature,
                                                            std::optional<std::size_t> length) {
  tools::SpeculationSetup setup;
  setup.structure = structure;
  setup.options.sampling.temperature = static_cast<float>(temperature);
  if (length) {
    setup.options.length = *length;
    setup.options.adapt = false;
  }
  return setup;
}

/// Reports the iterations of a case: sums of counts, and the median and the range of what each
/// iteration gives by itself.
inline void report_decoding(benchmark::State& state, const std::vector<DecodingTotal>& totals) {
  std::vector<double> speedups, acceptances;
  DecodingTotal sum;
  for (const DecodingTotal& total : totals) {
    speedups.push_back(total.plain_seconds / total.plain_tokens / (total.seconds / total.tokens));
    if (total.places > 0) acceptances.push_back(total.accepted / total.places);
    sum.tokens += total.tokens;
    sum.seconds += total.seconds;
    sum.plain_tokens += total.plain_tokens;
    sum.plain_seconds += total.plain_seconds;
    sum.passes += total.passes;
    sum.places += total.places;
    sum.accepted += total.accepted;
    sum.middle_places += total.middle_places;
    sum.middle_accepted += total.middle_accepted;
    sum.expected_tokens += total.expected_tokens;
  }
  state.counters["tokens_per_verification"] = sum.tokens / sum.passes;
  if (!acceptances.empty()) {
    state.counters["acceptance"] = sum.accepted / sum.places;
    state.counters["acceptance_min"] = std::ranges::min(acceptances);
    state.counters["acceptance_max"] = std::ranges::max(acceptances);
  }
  if (sum.middle_places > 0) {
    state.counters["middle_acceptance"] = sum.middle_accepted / sum.middle_places;
  }
  if (sum.plain_tokens == 0) return;
  std::ranges::sort(speedups);
  state.counters["speedup"] = speedups[speedups.size() / 2];
  state.counters["speedup_min"] = speedups.front();
  state.counters["speedup_max"] = speedups.back();
  // The time of the passes, and the tokens that they would give with independent acceptance.
  state.counters["predicted"] = sum.plain_seconds / sum.plain_tokens / (sum.seconds / sum.expected_tokens);
  state.counters["ms"] = sum.seconds / sum.tokens * 1e3;
  state.counters["plain_ms"] = sum.plain_seconds / sum.plain_tokens * 1e3;
}

/// Registers a case that measures its times itself.
template <class... Arguments>
void add_case(const std::string& name, std::size_t iterations, Arguments&&... arguments) {
  benchmark::RegisterBenchmark(name.c_str(), std::forward<Arguments>(arguments)...)
      ->Iterations(static_cast<benchmark::IterationCount>(iterations))
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace kvpolicy::bench
