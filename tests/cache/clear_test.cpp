// SPDX-License-Identifier: Apache-2.0
//
// A new text in a cleared cache must give byte for byte the results of a new cache.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "support/compare.hpp"
#include "support/memory.hpp"
#include "support/small_cache.hpp"

using namespace kvpolicy;

namespace {

// All results of a text of its own: outputs, and everything that is saved.
struct Outcome {
  std::vector<float> outputs;
  std::string file;
  std::size_t bytes = 0;
  std::size_t observed = 0;
};

Outcome feed(test::SmallCache& cache) {
  Outcome outcome;
  const auto step = [&](std::size_t tokens, const AttendOptions& options = {}) {
    const auto out = test::small_step(cache, tokens, options);
    outcome.outputs.insert(outcome.outputs.end(), out.begin(), out.end());
  };
  step(11);
  cache.compress();
  step(2, {.read = Read::selected, .refresh_selection = true});
  step(20);
  cache.truncate(cache.tokens() - 2);
  step(1, {.read = Read::selected});
  outcome.file = test::saved(cache);
  outcome.bytes = cache.bytes();
  outcome.observed = cache.observed_rows();
  return outcome;
}

bool same(const Outcome& a, const Outcome& b) {
  return test::same_bits(a.outputs, b.outputs) && a.file == b.file && a.bytes == b.bytes &&
         a.observed == b.observed;
}

}  // namespace

TEST_CASE("a cleared cache equals a new one, and reads a new text like a new one") {
  test::CountingResource memory;
  {
    CacheOptions options = test::small_options();
    options.memory = &memory;
    const auto make = [&] { return test::SmallCache{test::small_plan(), options}; };
    test::SmallCache fresh = make();
    const std::string empty = test::saved(fresh);
    const std::size_t empty_bytes = fresh.bytes();
    const Outcome expected = feed(fresh);

    test::SmallCache cache = make();
    for (int text = 0; text < 3; ++text) {
      CAPTURE(text);
      // The calls before must not matter: a longer text, other logits, or no calls at all.
      const std::vector<float> sinks(9, 0.5F);
      if (text == 1)
        test::small_step(cache, 70, {.scale = 0.3F, .softcap = 5.0F, .attention_sink_bias = sinks});
      cache.clear();
      CHECK(cache.tokens() == 0);
      CHECK(cache.commit_point() == 0);
      CHECK(cache.observed_rows() == 0);
      CHECK(cache.bytes() == empty_bytes);
      CHECK(memory.live_bytes() == fresh.bytes() + empty_bytes);
      CHECK(test::saved(cache) == empty);
      CHECK(same(feed(cache), expected));
    }
  }
  CHECK(memory.live_blocks() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("clear drops a pending tree, and keeps the rows of forks") {
  CacheOptions options = test::small_options();
  options.max_rollback = 4;
  HeadPlan<FullCache<DenseStorage<float16>>> plan{test::small_shape};
  KvCache cache{plan, options};
  test::small_step(cache, 40);
  const auto fork = cache.fork();
  const std::string before = test::saved(fork);
  const TokenTree tree{std::vector<std::size_t>{TokenTree::text, TokenTree::text}};
  test::small_step(cache, 2, {.tree = &tree});
  cache.clear();
  CHECK(test::saved(fork) == before);
  CHECK(fork.shared_bytes() == 0);
  test::small_step(cache, 40);  // no tree is pending any more
  CHECK(test::saved(cache) == before);
}
