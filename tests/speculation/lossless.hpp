// SPDX-License-Identifier: Apache-2.0
//
// Draws many texts by speculative decoding over table models and tests whether they could be plain
// samples. For tests of decoders, drafts and rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/model_draft.hpp>

#include "chi_square.hpp"
#include "support/sanitizer.hpp"
#include "table_cache.hpp"
#include "table_model.hpp"

namespace test {

// Sanitizers make it too slow for all of them; with sanitizers the tests mainly look for memory errors.
#if defined(KVPOLICY_TEST_ASAN)
inline constexpr std::size_t wanted_samples = 20'000;
#else
inline constexpr std::size_t wanted_samples = 200'000;
#endif

/// The parts of one text: the target and a small model, each with its own cache.
struct Bench {
  TableModel target;
  TableModel small;
  TableCache cache;
  TableCache small_cache;

  Bench(const TableModel& target_model, const TableModel& small_model)
      : target{target_model}, small{small_model} {}
};

/// The p-value of "200,000 runs of three tokens are distributed as `target` says". Each text continues
/// for `runs` runs, so that they begin and end anywhere in a verification. `draft(bench)` is the Draft
/// to test.
template <class Rule = kvpolicy::SpeculativeSampling, class MakeDraft>
double p_of_runs(const TableModel& target, const TableModel& small,
                 const kvpolicy::SpeculationOptions& options, MakeDraft draft, std::size_t runs = 100) {
  const std::vector<int> prompt{1, 0, 2, 1};
  RunCounts counts{target.vocabulary()};
  Bench bench{target, small};
  for (std::uint64_t text = 0; counts.samples() < wanted_samples; ++text) {
    bench.cache = TableCache{};
    bench.small_cache = TableCache{};
    auto own = options;
    own.adapt = false;
    own.seed = options.seed + 1000 * text;
    auto guesser = draft(bench);
    kvpolicy::SpeculativeDecoder<TableModel, TableCache, decltype(guesser), Rule> decoder{
        bench.target, bench.cache, std::move(guesser), own};
    decoder.read_prompt(prompt);
    // More tokens than are counted, so that the end does not shorten the last verifications.
    decoder.generate(3 * runs + 8);
    counts.add(decoder.text(), prompt.size(), runs);
  }
  return counts.p_value(target, options.sampling);
}

}  // namespace test
