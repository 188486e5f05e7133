// SPDX-License-Identifier: Apache-2.0
//
// A cache whose full pages are in slow memory: its results are bit for bit those without slow memory, its
// fast memory is as small as promised, and it survives every failure of the slow memory.
#include <doctest/doctest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/dump.hpp"
#include "cache/random_operations.hpp"
#include "support/slow_memory.hpp"

using namespace kvpolicy;

namespace {

using Plan = HeadPlan<float>;
using Cache = KvCache<float>;
constexpr std::size_t kv_heads = 12;
constexpr ModelShape shape{.layers = 1, .q_heads = kv_heads, .kv_heads = kv_heads, .head_dim = 64};

Plan every_head(std::size_t first) {
  return test::plan_of<float>(shape, test::some_heads(first, shape.kv_head_count(), false));
}

// The rows up to which the head's selection was made, if it selects.
std::size_t selected_until(const Cache& cache, std::size_t layer, std::size_t head) {
  std::size_t until = 0;
  test::for_each_shipped<float>([&]<class P>() {
    if constexpr (SelectingPolicy<P>) {
      if (cache.plan().has<P>(layer, head)) until = cache.policy<P>(layer, head).selected_until();
    }
  });
  return until;
}

// Number of rows on slow pages among those that a read shows.
std::size_t slow_rows(const Cache& cache, std::size_t layer, std::size_t head, Read read,
                      const SlowMemory& slow) {
  std::size_t rows = 0;
  for (const Segment& segment : cache.segments(layer, head, read)) {
    segment.for_each_run([&](const RowRun& run) {
      for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
        rows += slow.holds(segment.keys.address_of(i).page) || slow.holds(segment.values.address_of(i).page);
      }
    });
  }
  return rows;
}

// Caches of the same text, without and with slow memory.
struct Pair {
  Cache fast, slow;

  template <class Act>
  void each(Act act) {
    act(fast);
    act(slow);
  }
};

// Makes the same random call on both, which must give the same bits.
void random_call(test::Random& random, Pair& pair, std::size_t max_append) {
  const std::size_t tokens = test::one_of(random, std::vector<std::size_t>{1, 1, 1, 2, 3, 8, 17, 40, 70});
  AttendOptions options;
  options.read = test::below(random, 2) == 0 ? Read::selected : Read::all;
  options.refresh_selection = test::below(random, 4) == 0;
  const bool apart = tokens <= max_append && test::below(random, 3) == 0;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    test::Chunk<> chunk{random, shape, tokens};
    test::Chunk<> other = chunk;
    const auto run = [&](Cache& cache, test::Chunk<>& own) {
      if (apart) {
        own.append(cache, l);
        own.attend(cache, l, options);
      } else {
        own.step(cache, l, options);
      }
    };
    run(pair.fast, chunk);
    run(pair.slow, other);
    REQUIRE(test::same_bits(chunk.out.numbers(), other.out.numbers()));
    REQUIRE(test::same_bits(chunk.log_sum_exp, other.log_sum_exp));
  }
}

}  // namespace

TEST_CASE("slow memory changes no bit of any output, whatever the heads and the calls") {
  for (std::size_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    test::Random random{300 + seed};
    test::FailingSlowMemory slow;
    CacheOptions options{.max_rollback = seed % 2 == 0 ? 0 : std::size_t{20},
                         .max_append = 8,
                         .page_rows = seed == 0 || seed == 3 ? std::size_t{16} : std::size_t{64}};
    CacheOptions with_slow = options;
    with_slow.slow_memory = &slow;
    {
      std::vector<Pair> pairs;
      // In groups of eight heads, each of which has a head that keeps all rows.
      pairs.push_back({Cache{every_head(8 * seed), options}, Cache{every_head(8 * seed), with_slow}});
      pairs[0].each([](Cache& cache) {
        test::Random prompt{9};
        test::feed(cache, prompt, {100});
      });
      for (std::size_t i = 0; i < 24; ++i) {
        CAPTURE(i);
        Pair& pair = pairs[test::below(random, pairs.size())];
        const std::size_t what = test::below(random, 20);
        const std::size_t span = pair.fast.tokens() - pair.fast.commit_point();
        if (what < 5 && span > 0) {
          const std::size_t to = pair.fast.tokens() - test::below(random, span + 1);
          pair.each([&](Cache& cache) { cache.truncate(to); });
        } else if (what == 5) {
          pair.each([](Cache& cache) { cache.compress(); });
        } else if (what == 6 && pairs.size() == 1) {
          pairs.push_back({pair.fast.fork(), pair.slow.fork()});
        } else if (what == 7 && pairs.size() == 2) {
          pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(test::below(random, 2)));
        } else {
          random_call(random, pair, options.max_append);
        }
        for (Pair& one : pairs) {
          // A selected read sees slow pages only if nothing was selected yet.
          for (std::size_t h = 0; h < kv_heads; ++h) {
            if (selected_until(one.slow, 0, h) > 0) {
              CHECK(slow_rows(one.slow, 0, h, Read::selected, slow) == 0);
            }
          }
          CHECK(one.fast.slow_bytes() == 0);
        }
        if (pairs.size() == 1) CHECK(pairs[0].slow.slow_bytes() == slow.live_bytes());
        CHECK(slow.faults() == 0);
      }
      CHECK(slow.written_bytes() > 0);
    }
    CHECK(slow.live_blocks() == 0);
  }
}

TEST_CASE("a plan predicts the bytes in slow memory") {
  using Quantized = QuantizedResidualCache<float, Granularity::per_channel>;
  using Window = SinkRecentCache<DenseStorage<float>>;
  using Retrieval = ChunkRetrievalCache<PerTokenStorage<float>>;
  constexpr ModelShape small{.layers = 1, .q_heads = 4, .kv_heads = 4, .head_dim = 64};
  Plan plan{small};
  plan.set(0, 1, Quantized::Config{.storage = {.bits = 4, .key_group = 16, .residual = 40}});
  plan.set(0, 2, Window::Config{.sinks = 4, .recent = 100});
  plan.set(0, 3, Retrieval::Config{.chunk = 8, .budget = 32, .storage = {.bits = 8, .residual = 10}});
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  const CacheOptions options{.max_rollback = 5, .page_rows = 32, .memory = &memory, .slow_memory = &slow};
  Cache cache{plan, options};
  test::Random random{1};
  for (std::size_t i = 0; i < 120; ++i) {
    CAPTURE(cache.tokens());
    test::feed(cache, random, {1 + i % 9});
    const MemoryEstimate estimate = plan.memory(cache.tokens(), options);
    CHECK(cache.slow_bytes() == estimate.slow);
    CHECK(cache.slow_bytes() == slow.live_bytes());
    CHECK(cache.bytes() - cache.slow_bytes() == memory.live_bytes());
    // Without a selection the copies of one are missing: at most 32 + 7 rows, 2 pages of 8 bits for each
    // side.
    const std::size_t committed = cache.commit_point();
    const std::size_t in_whole_pages = (committed - std::min<std::size_t>(committed, 10)) / 32 * 32;
    const std::size_t pages = (std::min<std::size_t>(in_whole_pages, 39) + 31) / 32;
    CHECK(cache.bytes() + 2 * pages * 32 * (64 + 4) == estimate.total());
  }
  // Computed by hand: n rows are committed, 9 pages of 32 dense rows are full.
  const std::size_t n = cache.commit_point();
  CHECK(n == 586);
  const std::size_t full = 2 * 18 * 32 * 64 * 4;
  const std::size_t four_bits =
      2 * (544 / 32) * 32 * 32 + (544 / 32) * (2 * 64 * 2 * 2) + (544 / 32) * 32 * 4;
  const std::size_t eight_bits = 2 * (576 / 32) * 32 * (64 + 4);
  CHECK(cache.slow_bytes() == full + four_bits + eight_bits);
  // A new selection makes copies; later rows stay in fast memory until the next selection.
  test::feed(cache, random, {3}, {.read = Read::selected, .refresh_selection = true});
  CHECK(cache.bytes() <= plan.memory(cache.tokens(), options).total());
  CHECK(cache.bytes() - cache.slow_bytes() == memory.live_bytes());
  test::feed(cache, random, {70}, {.read = Read::selected});
  CHECK(cache.slow_bytes() < plan.memory(cache.tokens(), options).slow);
  CHECK(cache.slow_bytes() == slow.live_bytes());
  test::feed(cache, random, {1}, {.read = Read::selected, .refresh_selection = true});
  test::feed(cache, random, {1, 1, 1, 1, 1});  // until no rollback can restore the selection before
  test::feed(cache, random, {1});
  CHECK(cache.slow_bytes() == plan.memory(cache.tokens(), options).slow);
}

TEST_CASE("slow pages: are written once, never read by selected reads, kept by forks") {
  using Retrieval = ChunkRetrievalCache<DenseStorage<float>>;
  constexpr ModelShape small{.layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 64};
  test::FailingSlowMemory slow;
  Plan plan{small, Retrieval::Config{.chunk = 8, .budget = 64}};
  Cache cache{plan, {.slow_memory = &slow}};
  test::Random random{2};
  test::feed(cache, random, {1000, 1, 2, 500});
  const std::size_t page = 64 * 64 * sizeof(float);
  CHECK(slow.written_bytes() == 2 * 2 * (1503 / 64) * page);
  CHECK(slow.take_fetched_bytes() == 0);  // the scalar engine reads slow memory in place
  test::feed(cache, random, {1}, {.read = Read::selected, .refresh_selection = true});
  const std::size_t fetched = slow.take_fetched_bytes();
  CHECK(fetched > 0);
  CHECK(fetched <= 2 * 2 * (64 + 7) * 64 * sizeof(float));  // only the selected rows
  for (int i = 0; i < 200; ++i) test::feed(cache, random, {1}, {.read = Read::selected});
  CHECK(slow.take_fetched_bytes() == 0);
  CHECK(slow.written_bytes() == 2 * 2 * (1503 / 64) * page);
  const std::size_t live = slow.live_bytes();
  const Cache fork = cache.fork();
  CHECK(slow.live_bytes() == live);
  CHECK(fork.slow_bytes() == live);
  CHECK(test::dump(fork) == test::dump(cache));
}

// KIVI's flush quantises keys long before values. A full page of keys must wait for the page of values with
// the same rows; otherwise the rows in between would be read from slow memory.
TEST_CASE("slow pages: keys and values of a row leave fast memory together") {
  using Retrieval = ChunkRetrievalCache<PerChannelStorage<float>>;
  constexpr ModelShape small{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  Retrieval::Config config{.chunk = 16, .budget = 320};
  config.storage = {.bits = 4, .key_group = 16, .residual = 48, .flush = Flush::kivi};
  test::FailingSlowMemory slow;
  Cache cache{Plan{small, config}, {.page_rows = 16, .slow_memory = &slow}};
  test::Random random{4};
  test::feed(cache, random, {150});  // 144 keys are quantised, 102 values
  const std::size_t key_page = 16 * 32 + 2 * 64 * 2, value_page = 16 * 32 + 2 * 16 * 2;
  CHECK(cache.slow_bytes() == 96 / 16 * (key_page + value_page));
  test::feed(cache, random, {1}, {.read = Read::selected});
  CHECK(slow_rows(cache, 0, 0, Read::all, slow) == 96);
  CHECK(slow_rows(cache, 0, 0, Read::selected, slow) == 0);
}

// Every call to the slow memory fails once, in every call of the cache.
TEST_CASE("failing slow memory: the call throws StorageError, and the cache goes on") {
  struct Case {
    std::string what;
    std::size_t first_head;  // index into all_heads
    std::size_t tokens;
    AttendOptions options;
  };
  const std::vector<Case> cases{
      {"a long step", 0, 70, {}},
      {"a step", 12, 9, {}},
      {"a selected read that chooses", 12, 2, {.read = Read::selected, .refresh_selection = true}},
      {"a refresh after the call", 12, 20, {.refresh_selection = true}},
  };
  std::size_t failed_calls = 0;
  for (const Case& one : cases) {
    CAPTURE(one.what);
    const auto make = [&](test::FailingSlowMemory& memory, test::Random& random) {
      Cache cache{every_head(one.first_head), {.max_rollback = 4, .page_rows = 16, .slow_memory = &memory}};
      test::feed(cache, random, {40, 1}, {.refresh_selection = true});
      test::feed(cache, random, {30, 2, 9}, {.read = Read::selected});
      return cache;
    };
    test::FailingSlowMemory slow_too;
    test::Random first_random{11};
    const Cache first = make(slow_too, first_random);
    for (std::size_t n = 0;; n += n < 4 ? 1 : 7) {
      CAPTURE(n);
      REQUIRE(n < 500);
      test::FailingSlowMemory slow;
      test::Random random{11};
      Cache cache = make(slow, random);
      Cache control = first.fork();
      test::Random control_random = first_random;
      const auto before = test::dump(cache);
      test::Chunk<> chunk{random, shape, one.tokens};
      test::Chunk<> control_chunk{control_random, shape, one.tokens};
      slow.fail_after(n);
      bool failed = false;
      try {
        chunk.step(cache, 0, one.options);
      } catch (const StorageError&) {
        failed = true;
      }
      const bool untouched = slow.failures() == 0;
      slow.fail_after(test::never);
      if (failed) {
        ++failed_calls;
        CHECK(test::dump(cache) == before);
        chunk.step(cache, 0, one.options);
      }
      control_chunk.step(control, 0, one.options);
      CHECK(test::same_bits(chunk.out.numbers(), control_chunk.out.numbers()));
      // A refresh that failed after its call is made up for by the next selected read.
      const AttendOptions next{.read = Read::selected, .refresh_selection = true};
      test::Chunk<> last{random, shape, 3};
      test::Chunk<> control_last = last;
      last.step(cache, 0, next);
      control_last.step(control, 0, next);
      CHECK(test::same_bits(last.out.numbers(), control_last.out.numbers()));
      CHECK(test::dump(cache, false) == test::dump(control, false));
      CHECK(cache.slow_bytes() == slow.live_bytes());
      if (untouched) break;
    }
  }
  CHECK(failed_calls >= 8);
}

// A failing write after a step does not make the step fail: its rows stay in fast memory, and later calls
// that add rows throw as long as the error remains.
TEST_CASE("slow memory that can no longer be written") {
  constexpr ModelShape small{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  test::FailingSlowMemory slow;
  Cache cache{Plan{small}, {.page_rows = 16, .slow_memory = &slow}};
  Cache control{Plan{small}, {.page_rows = 16}};
  test::Random random{3}, control_random{3};
  test::feed(cache, random, {15});
  test::feed(control, control_random, {15});
  slow.fail_after(2);  // pages for keys and values exist, but writing both fails
  test::feed(cache, random, {1});
  test::feed(control, control_random, {1});
  CHECK(slow.failures() == 2);
  CHECK(cache.slow_bytes() == 0);
  CHECK(cache.bytes() == control.bytes());
  test::Chunk<> chunk{random, small, 1};
  for (int i = 0; i < 3; ++i) {
    const auto before = test::dump(cache);
    CHECK_THROWS_AS(chunk.step(cache, 0), StorageError);
    CHECK(test::dump(cache) == before);
  }
  slow.fail_after(test::never);
  chunk.step(cache, 0);
  test::Chunk<> control_chunk{control_random, small, 1};
  control_chunk.step(control, 0);
  CHECK(test::same_bits(chunk.out.numbers(), control_chunk.out.numbers()));
  CHECK(cache.slow_bytes() == 2 * 16 * 64 * sizeof(float));
  CHECK(test::dump(cache) == test::dump(control));
}
