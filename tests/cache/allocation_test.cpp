// SPDX-License-Identifier: Apache-2.0
//
// Memory allocation fails once at every single allocation of every call, in the resource and in the program's
// own allocations. The call must throw std::bad_alloc, and the cache must be unchanged and continue as if
// nothing had happened.
#include <doctest/doctest.h>

#include <initializer_list>
#include <memory>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/failing_new.hpp"
#include "support/memory.hpp"

using namespace kvpolicy;

namespace {

using Residual = ResidualStorage<bfloat16, Granularity::per_token>;
using Quantized = QuantizedResidualCache<bfloat16, Granularity::per_channel>;
using Window = SinkRecentCache<Residual>;
using Budget = HeadBudgetCache<DenseStorage<bfloat16>>;
using Retrieval = ChunkRetrievalCache<DenseStorage<bfloat16>, MinMaxKey>;
using Plan = HeadPlan<bfloat16>;
using Cache = KvCache<bfloat16>;

Plan mixed_plan(std::size_t compress_every) {
  Plan plan{ModelShape{2, 5, 5, 64}};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    plan.set(layer, 1, Quantized::Config{.storage = {.bits = 4, .key_group = 16, .residual = 10}});
    plan.set(layer, 2, Window::Config{.sinks = 3, .recent = 20, .storage = {.bits = 8, .residual = 4}});
    plan.set(
        layer, 3,
        Budget::Config{.budget = 10, .compress_every = compress_every, .scorer = {.observation_window = 4}});
    plan.set(layer, 4, Retrieval::Config{.chunk = 4, .budget = 8});
  }
  return plan;
}

enum class Failing { resource, any_new };

struct State {
  test::CountingResource memory;
  test::Random random{7};
  std::unique_ptr<Cache> cache;

  explicit State(CacheOptions options, std::size_t compress_every = 0) {
    options.memory = &memory;
    options.page_rows = 16;
    cache = std::make_unique<Cache>(mixed_plan(compress_every), options);
    test::feed(*cache, random, {33, 1, 9}, {.read = Read::selected});
  }
};

// Outputs of the next steps on every layer; layers may have different lengths.
std::vector<float> next_steps(Cache& cache) {
  std::vector<float> all;
  test::Random random{3};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    test::Chunk<> chunk{random, cache.plan().shape(), 5};
    chunk.step(cache, layer, {.read = Read::selected});
    all.insert(all.end(), chunk.out.numbers().begin(), chunk.out.numbers().end());
    all.insert(all.end(), chunk.log_sum_exp.begin(), chunk.log_sum_exp.end());
  }
  return all;
}

// `prepare(state)` makes what `call` needs, `call(state, prepared)` is what fails, and `settle(state)` runs
// before the steps with which the cache continues.
template <class Prepare, class Call, class Settle = void (*)(State&)>
void survive(
    const char* what, const CacheOptions& options, Prepare prepare, Call call, std::size_t compress_every = 0,
    Settle settle = [](State&) {}) {
  CAPTURE(what);
  State control{options, compress_every};
  auto control_prepared = prepare(control);
  const auto before = test::dump(*control.cache);
  const std::size_t observed_before = control.cache->observed_rows();
  call(control, control_prepared);
  const auto after = test::dump(*control.cache);
  settle(control);
  const auto next = next_steps(*control.cache);
  for (const Failing failing : {Failing::resource, Failing::any_new}) {
    CAPTURE(failing == Failing::resource);
    std::size_t failures = 0;
    for (std::size_t n = 0;; n += n < 20 ? 1 : n / 6) {
      CAPTURE(n);
      REQUIRE(n < 20000);
      State state{options, compress_every};
      auto prepared = prepare(state);
      bool failed = false;
      bool untouched = false;
      try {
        if (failing == Failing::resource) {
          state.memory.fail_after(n);
          call(state, prepared);
          untouched = state.memory.failures() == 0;
        } else {
          const test::FailNew guard{n};
          call(state, prepared);
          untouched = test::failed_news == 0;
        }
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      state.memory.fail_after(test::never);
      if (failed) {
        ++failures;
        CHECK(test::dump(*state.cache) == before);
        CHECK(state.cache->observed_rows() == observed_before);
        CHECK(state.memory.live_bytes() == state.cache->bytes());
        call(state, prepared);  // without a failure the same call succeeds
      }
      CHECK(state.memory.live_bytes() == state.cache->bytes());
      if (failed || untouched) {
        CHECK(test::dump(*state.cache) == after);
        settle(state);
        CHECK(test::same_bits(next_steps(*state.cache), next));
      } else {
        // Work after a step that fails (a compression, a refresh) is done by the next step.
        CHECK(state.cache->tokens(0) == after.counts[3]);
      }
      CHECK(state.memory.faults() == 0);
      state.cache.reset();
      CHECK(state.memory.live_blocks() == 0);
      if (untouched) break;
    }
    if (failing == Failing::any_new) CHECK(failures > 0);
  }
}

auto chunk_of(std::size_t tokens) {
  return [tokens](State& state) { return test::Chunk<>{state.random, state.cache->plan().shape(), tokens}; };
}

}  // namespace

TEST_CASE("allocation failure: step") {
  CacheOptions options;
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 6}) {
    options.max_rollback = max_rollback;
    options.max_append = 3;
    survive("one token", options, chunk_of(1), [](State& s, auto& chunk) { chunk.step(*s.cache, 0); });
    survive("many tokens", options, chunk_of(37), [](State& s, auto& chunk) { chunk.step(*s.cache, 1); });
    survive("a selected read that chooses", options, chunk_of(2), [](State& s, auto& chunk) {
      chunk.step(*s.cache, 0, {.read = Read::selected, .refresh_selection = true});
    });
    survive("with sinks", options, chunk_of(2), [](State& s, auto& chunk) {
      static const std::vector<float> sinks{1, 2, 3, 4, 5};
      chunk.step(*s.cache, 0, {.attention_sink_bias = sinks});
    });
  }
}

// Scratch memory that earlier calls left behind hides what a first call must obtain.
TEST_CASE("allocation failure: the first step of a fork") {
  CacheOptions options;
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 6}) {
    options.max_rollback = max_rollback;
    survive(
        "nine tokens", options,
        [](State& state) {
          state.cache = std::make_unique<Cache>(state.cache->fork());
          return test::Chunk<>{state.random, state.cache->plan().shape(), 9};
        },
        [](State& s, auto& chunk) { chunk.step(*s.cache, 0); });
  }
}

TEST_CASE("allocation failure: compression and refresh after a step") {
  CacheOptions options;
  survive("a refresh for later reads", options, chunk_of(9),
          [](State& s, auto& chunk) { chunk.step(*s.cache, 0, {.refresh_selection = true}); });
  survive(
      "a compression that is due", options, chunk_of(30),
      [](State& s, auto& chunk) { chunk.step(*s.cache, 0); }, 40);
}

TEST_CASE("allocation failure: append, attend") {
  CacheOptions options;
  options.max_append = 20;
  options.max_rollback = 2;
  survive(
      "append", options,
      [](State& state) {
        test::Chunk<> first{state.random, state.cache->plan().shape(), 20};
        first.append(*state.cache, 0);
        return test::Chunk<>{state.random, state.cache->plan().shape(), 20};
      },
      [](State& s, auto& chunk) { chunk.append(*s.cache, 0); });
  survive(
      "attend", options,
      [](State& state) {
        test::Chunk<> chunk{state.random, state.cache->plan().shape(), 12};
        chunk.append(*state.cache, 0);
        return chunk;
      },
      [](State& s, auto& chunk) {
        chunk.attend(*s.cache, 0, {.read = Read::selected, .refresh_selection = true});
      });
}

TEST_CASE("allocation failure: trees") {
  CacheOptions options;
  options.max_append = 20;
  options.max_rollback = 20;
  static const TokenTree tree{
      std::vector<std::size_t>{TokenTree::text, 0, TokenTree::text, 0, 1, 1, 2, 4, 3}};
  static const TokenTree first = tree.first(4);
  // `survive` continues with plain steps, which are refused while a tree is pending, so each call drops it.
  const auto drop = [](State& s) { s.cache->truncate(43); };
  const auto held = [](State& state) {
    test::Chunk<> level{state.random, state.cache->plan().shape(), 4};
    for (std::size_t layer = 0; layer < 2; ++layer) level.step(*state.cache, layer, {.tree = &first});
    return test::Chunk<>{state.random, state.cache->plan().shape(), 5};
  };
  survive(
      "a tree at once", options, chunk_of(9),
      [](State& s, auto& chunk) { chunk.step(*s.cache, 0, {.tree = &tree}); }, 0, drop);
  survive(
      "its second level", options, held,
      [](State& s, auto& chunk) { chunk.step(*s.cache, 1, {.tree = &tree}); }, 0, drop);
  survive(
      "append of the second level", options, held,
      [](State& s, auto& chunk) { chunk.append(*s.cache, 0, {.tree = &tree}); }, 0, drop);
  survive(
      "attend to nodes", options,
      [&](State& state) {
        auto chunk = held(state);
        chunk.append(*state.cache, 0, {.tree = &tree});
        return chunk;
      },
      [](State& s, auto& chunk) { chunk.attend(*s.cache, 0, {.read = Read::selected, .tree = &tree}); }, 0,
      drop);
  survive(
      "a fork with a tree", options, held,
      [](State& s, auto&) {
        const Cache fork = s.cache->fork();
        CHECK(fork.tokens(0) == 47);
      },
      0, drop);
  // Calls that accept a path must not fail at all.
  State state{options};
  held(state);
  {
    state.memory.fail_after(0);
    const std::vector<std::size_t> path{0, 3};
    const test::FailNew guard{0};
    state.cache->accept(path);
    CHECK(test::failed_news == 0);
  }
  CHECK(state.cache->tokens() == 45);
}

TEST_CASE("allocation failure: commit, compress") {
  CacheOptions options;
  options.max_rollback = 40;
  const auto nothing = [](State&) { return 0; };
  survive("commit", options, nothing, [](State& s, int) { s.cache->commit(); });
  const auto commit = [](State& s) {
    s.cache->commit();
    return 0;
  };
  survive("compress", options, commit, [](State& s, int) { s.cache->compress(); });
  survive("compress one layer", options, commit, [](State& s, int) { s.cache->compress(1); });
  // The rows are tentative at first; a failed call may commit them, but nothing more.
  for (std::size_t n = 0; n < 60; ++n) {
    State state{options};
    State control{options};
    control.cache->commit();
    const auto before = test::dump(*state.cache);
    state.memory.fail_after(n);
    try {
      state.cache->compress();
      break;
    } catch (const std::bad_alloc&) {
      const auto now = test::dump(*state.cache);
      CHECK((now == before || now == test::dump(*control.cache)));
      CHECK(state.memory.live_bytes() == state.cache->bytes());
    }
  }
}

TEST_CASE("allocation failure: heads that add up attention, and the keys that are read for that") {
  using Summing = HeadBudgetCache<DenseStorage<bfloat16>, H2oScorer>;
  const Plan plan{ModelShape{1, 2, 1, 64}, Summing::Config{.budget = 8}};
  std::size_t failures = 0;
  for (std::size_t n = 0;; ++n) {
    REQUIRE(n < 1000);
    Cache cache{plan};
    test::Random random{1};
    test::feed(cache, random, {20});
    const std::size_t observed = cache.observed_rows();
    test::Chunk<> chunk{random, plan.shape(), 3};
    try {
      const test::FailNew guard{n};
      chunk.step(cache, 0);
      if (test::failed_news == 0) break;
    } catch (const std::bad_alloc&) {
      ++failures;
      CHECK(cache.observed_rows() == observed);
      CHECK(cache.tokens() == 20);
    }
  }
  CHECK(failures > 0);
}

TEST_CASE("allocation failure: clear") {
  CacheOptions options;
  options.max_rollback = 2;
  survive("clear", options, [](State&) { return 0; }, [](State& s, int) { s.cache->clear(); });
}

TEST_CASE("allocation failure: a fork under another plan") {
  CacheOptions options;
  options.max_rollback = 2;
  // Head 0 takes its rows row by row, the other heads unchanged; in the other layer all heads stay as they
  // are.
  Plan other = mixed_plan(0);
  other.set(0, 0, Window::Config{.sinks = 3, .recent = 20, .storage = {.bits = 8, .residual = 4}});
  survive(
      "fork_as", options, [](State&) { return 0; },
      [&](State& s, int) {
        const Cache fork = s.cache->fork_as(other);
        CHECK(fork.tokens() == s.cache->tokens());
      });
}

TEST_CASE("allocation failure: fork, construction") {
  CacheOptions options;
  survive(
      "fork", options, [](State&) { return 0; },
      [](State& s, int) {
        const Cache fork = s.cache->fork();
        CHECK(fork.bytes() == s.cache->bytes());
      });
  std::size_t failures = 0;
  for (std::size_t n = 0;; ++n) {
    test::CountingResource memory;
    memory.fail_after(n);
    options.memory = &memory;
    try {
      const Cache cache{mixed_plan(0), options};
      CHECK(memory.live_bytes() == cache.bytes());
      break;
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    CHECK(memory.live_blocks() == 0);
  }
  CHECK(failures == 4);  // for each of two layers a tail and a ring of queries
  options.memory = std::pmr::get_default_resource();
  const Plan plan = mixed_plan(0);
  for (std::size_t n = 0, done = 0; done == 0; ++n) {
    REQUIRE(n < 10000);
    const std::size_t live = test::live_news;
    try {
      const test::FailNew guard{n};
      const Cache cache{plan, options};
      done = 1;
    } catch (const std::bad_alloc&) {
    }
    CHECK(test::live_news == live);
  }
}

namespace {

// An engine that reads and allocates nothing, so that only the cache's own allocations are counted.
struct IdleEngine {
  void attend(const LayerAttention&) {}
  void observe(const LayerObservation&) {}
  void score(const Plane&, std::span<const float>, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(i * 7919 % 97);
  }
};

// Number of allocations in 20 decode steps of one layer that begin no page.
template <class Policy>
std::size_t news_of_decoding(const typename Policy::Config& config, const AttendOptions& options = {}) {
  const HeadPlan<Policy> plan{ModelShape{1, 4, 2, 64}, config};
  KvCache<typename Policy::element_type, IdleEngine> cache{plan};
  test::Random random{1};
  test::Chunk<> prompt{random, plan.shape(), 210}, chunk{random, plan.shape(), 1};
  prompt.step(cache, 0);
  for (int i = 0; i < 3; ++i) chunk.step(cache, 0, options);
  const std::size_t before = test::all_news;
  for (int i = 0; i < 20; ++i) chunk.step(cache, 0, options);
  return test::all_news - before;
}

// Makes 1,000 decode steps after a prompt, which may be compressed, over pages of 16 rows. A step may
// allocate only if a table grew, which `overhead_bytes` of the cache or of the pool shows.
template <class Policy>
void check_growth(const typename Policy::Config& config, PagePool* pool, bool compress = false) {
  const HeadPlan<Policy> plan{ModelShape{1, 4, 2, 64}, config};
  const CacheOptions options{.page_rows = 16, .pool = pool};
  KvCache<typename Policy::element_type, IdleEngine> cache{plan, options};
  test::Random random{1};
  test::Chunk<> prompt{random, plan.shape(), 210}, chunk{random, plan.shape(), 1};
  prompt.step(cache, 0);
  if (compress) cache.compress();
  for (int i = 0; i < 3; ++i) chunk.step(cache, 0, {.read = Read::selected});
  const auto overhead = [&] {
    return cache.overhead_bytes() + (pool == nullptr ? 0 : pool->overhead_bytes());
  };
  std::size_t grew = 0, began_without = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::size_t news = test::all_news, bytes = cache.bytes(), before = overhead();
    chunk.step(cache, 0, {.read = Read::selected});
    const bool allocated = test::all_news > news;
    if (allocated) CHECK(overhead() > before);
    grew += allocated ? 1 : 0;
    began_without += !allocated && cache.bytes() > bytes ? 1 : 0;
  }
  CHECK(began_without > 40);  // of about 62 steps that begin a page
  CHECK(grew <= 12);          // each table at least doubles, so it grows at most seven times
}

}  // namespace

TEST_CASE("a decode step allocates nothing") {
  using Dense = DenseStorage<bfloat16>;
  using Codes = QuantizedResidualCache<bfloat16, Granularity::per_token>;
  using Kivi = QuantizedResidualCache<bfloat16, Granularity::per_channel>;
  CHECK(news_of_decoding<FullCache<Dense>>({}) == 0);
  CHECK(news_of_decoding<Codes>({.storage = {.residual = 1}}) == 0);
  CHECK(news_of_decoding<Kivi>({.storage = {.key_group = 16, .residual = 1}}) == 0);
  CHECK(news_of_decoding<Window>({.sinks = 3, .recent = 24, .storage = {.residual = 8}}) == 0);
  CHECK(news_of_decoding<Budget>({.budget = 10}) == 0);
  CHECK(news_of_decoding<HeadBudgetCache<Dense, H2oScorer>>({.budget = 10}) == 0);
  CHECK(news_of_decoding<Retrieval>({.chunk = 4, .budget = 40}, {.read = Read::selected}) == 0);
}

TEST_CASE("a decode step that chooses chunks allocates nothing") {
  const AttendOptions choosing{.read = Read::selected, .refresh_selection = true};
  CHECK(news_of_decoding<Retrieval>({.chunk = 4, .budget = 40}, choosing) == 0);
  CHECK(news_of_decoding<ChunkRetrievalCache<DenseStorage<bfloat16>, MeanKey>>({.chunk = 4, .budget = 40},
                                                                               choosing) == 0);
  CHECK(news_of_decoding<ChunkRetrievalCache<Residual>>(
            {.chunk = 4, .budget = 40, .storage = {.residual = 1}}, choosing) == 0);
}

TEST_CASE("a decode step that begins a page allocates only when a table has no room") {
  using Dense = DenseStorage<bfloat16>;
  using Codes = QuantizedResidualCache<bfloat16, Granularity::per_token>;
  using Kivi = QuantizedResidualCache<bfloat16, Granularity::per_channel>;
  PagePool pool;  // allocates slabs; a cache's own pool allocates each page by itself
  for (PagePool* shared : {&pool, static_cast<PagePool*>(nullptr)}) {
    CAPTURE(shared == nullptr);
    check_growth<FullCache<Dense>>({}, shared);
    check_growth<Codes>({.storage = {.residual = 40}}, shared);
    check_growth<Kivi>({.storage = {.key_group = 16, .residual = 40}}, shared);
    check_growth<SinkRecentCache<Dense>>({.sinks = 17, .recent = 20}, shared);
    check_growth<Window>({.sinks = 3, .recent = 24, .storage = {.residual = 8}}, shared);
    check_growth<Budget>({.budget = 10}, shared);
    check_growth<Budget>({.budget = 30}, shared, /*compress=*/true);
    check_growth<HeadBudgetCache<Residual>>({.budget = 30, .storage = {.residual = 20}}, shared, true);
    check_growth<Retrieval>({.chunk = 4, .budget = 40}, shared);
  }
}
