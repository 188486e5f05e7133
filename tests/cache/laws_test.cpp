// SPDX-License-Identifier: Apache-2.0
//
// Relations between two caches: a rollback leaves no trace, a fork is independent, the division of a prompt
// into chunks does not matter, and a plan predicts the bytes.
#include <doctest/doctest.h>

#include <cmath>
#include <initializer_list>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/memory.hpp"

using namespace kvpolicy;

namespace {

using E = float16;
using PerToken = ResidualStorage<E, Granularity::per_token>;
using Full = FullCache<DenseStorage<E>>;
using Kivi = QuantizedResidualCache<E, Granularity::per_channel>;
using Window = SinkRecentCache<DenseStorage<E>>;
using QuantizedWindow = SinkRecentCache<PerToken>;
using Budget = HeadBudgetCache<PerToken>;
using Retrieval = ChunkRetrievalCache<DenseStorage<E>>;
using Plan = HeadPlan<E>;
using Cache = KvCache<E>;

constexpr ModelShape shape{2, 14, 7, 64};

Plan mixed_plan() {
  Plan plan{shape};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    plan.set(
        l, 1,
        Kivi::Config{
            .storage = {
                .bits = 2, .key_group = 8, .residual = 16, .flush = l == 0 ? Flush::steady : Flush::kivi}});
    plan.set(l, 2, Window::Config{.sinks = 4, .recent = 21});
    plan.set(l, 3,
             Window::Config{
                 .sinks = 20, .recent = 5, .mask = Mask::prefill_chunk, .rotary_in_cache = RotaryConfig{}});
    plan.set(l, 4, QuantizedWindow::Config{.sinks = 1, .recent = 30, .storage = {.bits = 4, .residual = 3}});
    plan.set(l, 5,
             Budget::Config{
                 .budget = 17, .scorer = {.observation_window = 5}, .storage = {.bits = 8, .residual = 6}});
    plan.set(l, 6, Retrieval::Config{.chunk = 6, .budget = 18});
  }
  return plan;
}

struct Run {
  CacheOptions options;
  Cache cache;
  explicit Run(std::size_t max_rollback, std::size_t page_rows = 16)
      : options{.max_rollback = max_rollback, .max_append = 8, .page_rows = page_rows},
        cache{mixed_plan(), options} {}

  void feed(std::uint64_t seed, const std::vector<std::size_t>& chunks, const AttendOptions& how = {}) {
    test::Random random{seed};
    test::feed(cache, random, chunks, how);
  }
};

// Outputs and log-sum-exps of one more step on every layer.
std::vector<float> next_step(Cache& cache, std::uint64_t seed, std::size_t tokens, Read read) {
  std::vector<float> all;
  test::Random random{seed};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    test::Chunk<> chunk{random, shape, tokens};
    chunk.step(cache, l, {.read = read});
    all.insert(all.end(), chunk.out.numbers().begin(), chunk.out.numbers().end());
    all.insert(all.end(), chunk.log_sum_exp.begin(), chunk.log_sum_exp.end());
  }
  return all;
}

}  // namespace

TEST_CASE("rollback: bit for bit a cache of the same commit point that never saw the rows") {
  for (const Read read : {Read::all, Read::selected}) {
    for (const std::size_t dropped : std::initializer_list<std::size_t>{1, 4, 9, 16}) {
      CAPTURE(dropped);
      // 70 of 70 + dropped rows are kept; the commit point has moved to 54 + dropped.
      Run run{16};
      Run control{16 - dropped};
      for (Run* r : {&run, &control}) {
        r->feed(1, {40, 1, 7});
        r->cache.commit();
        r->feed(2, {1}, {.refresh_selection = true});  // a selection for the selected reads that follow
        r->cache.compress();
        r->feed(3, {3, 18});
      }
      // The dropped steps also read, select and observe queries.
      run.feed(4, {dropped - dropped / 2}, {.read = Read::selected, .refresh_selection = true});
      if (dropped > 1) run.feed(5, {dropped / 2}, {.scale = 0.125F, .refresh_selection = true});
      run.cache.truncate(70);
      REQUIRE(run.cache.commit_point() == control.cache.commit_point());
      CHECK(test::dump(run.cache, false) == test::dump(control.cache, false));
      Cache a = run.cache.fork();
      Cache b = control.cache.fork();
      CHECK(test::same_bits(next_step(a, 6, 3, read), next_step(b, 6, 3, read)));
      // The compression uses the queries of the rows that were kept.
      run.cache.compress();
      control.cache.compress();
      CHECK(test::dump(run.cache, false) == test::dump(control.cache, false));
    }
  }
}

TEST_CASE("rollback: again and again, over the same rows") {
  Run run{8};
  Run control{8};
  run.feed(1, {30});
  control.feed(1, {30});
  run.cache.commit();
  control.cache.commit();
  for (std::uint64_t round = 0; round < 20; ++round) {
    run.feed(100 + round, {static_cast<std::size_t>(1 + round % 8)}, {.read = Read::selected});
    run.cache.truncate(30);
    CHECK(run.cache.bytes() == control.cache.bytes());
  }
  CHECK(test::dump(run.cache) == test::dump(control.cache));
  CHECK(test::same_bits(next_step(run.cache, 6, 9, Read::all), next_step(control.cache, 6, 9, Read::all)));
}

TEST_CASE("append and attend are the two halves of a step") {
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 5, 30}) {
    Run whole{max_rollback};
    Run halves{max_rollback};
    test::Random random{1};
    for (const std::size_t tokens :
         std::initializer_list<std::size_t>{8, 1, 8, 7, 1, 8, 8, 3, 8, 8, 1, 1, 8}) {
      for (std::size_t l = 0; l < shape.layers; ++l) {
        // Rows are of the cache's own type, because the tail stores them rounded to it.
        test::Chunk<E> chunk{random, shape, tokens};
        chunk.step(whole.cache, l);
        const auto out = chunk.out.numbers();
        const auto lse = chunk.log_sum_exp;
        chunk.append(halves.cache, l);
        chunk.attend(halves.cache, l);
        CHECK(test::same_bits(chunk.out.numbers(), out));
        CHECK(test::same_bits(chunk.log_sum_exp, lse));
      }
    }
    whole.cache.commit();
    halves.cache.commit();
    CHECK(test::dump(whole.cache) == test::dump(halves.cache));
  }
}

TEST_CASE("forks continue independently, and do not change the original") {
  for (const std::size_t tokens : std::initializer_list<std::size_t>{0, 5, 16, 45, 64, 80}) {
    for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 7}) {
      Run run{max_rollback};
      Run control{max_rollback};
      if (tokens > 0) {
        run.feed(1, {tokens}, {.refresh_selection = true});
        control.feed(1, {tokens}, {.refresh_selection = true});
      }
      const auto before = test::dump(run.cache);
      Cache fork = run.cache.fork();
      CHECK(fork.bytes() == run.cache.bytes());
      CHECK(test::dump(fork) == before);
      test::Random random{9};
      test::feed(fork, random, {1, 13, 40});
      fork.compress();
      CHECK(test::dump(run.cache) == before);
      Cache second = fork.fork();
      { const Cache gone = std::move(fork); }
      const auto of_second = test::dump(second);
      CHECK(test::same_bits(next_step(run.cache, 4, 20, Read::selected),
                            next_step(control.cache, 4, 20, Read::selected)));
      CHECK(test::dump(run.cache) == test::dump(control.cache));
      CHECK(test::dump(second) == of_second);
    }
  }
}

TEST_CASE("one prefill serves many forks: forks share full pages") {
  test::CountingResource memory;
  CacheOptions options{.page_rows = 16, .memory = &memory};
  Cache cache{Plan{shape}, options};  // every head keeps all rows
  test::Random random{1};
  test::feed(cache, random, {100});
  const std::size_t row = shape.kv_head_count() * 2 * 64 * sizeof(E);
  const std::size_t tail = row;  // the tail has one row
  CHECK(memory.live_bytes() == 112 * row + tail);
  std::vector<Cache> forks;
  for (std::size_t i = 1; i <= 4; ++i) {
    forks.push_back(cache.fork());
    CHECK(memory.live_bytes() == 112 * row + tail + i * (16 * row + tail));  // each fork has an open page
  }
  CHECK(cache.shared_bytes() == 96 * row);
  forks.clear();
  CHECK(cache.shared_bytes() == 0);
  CHECK(memory.live_bytes() == cache.bytes());
}

TEST_CASE("the division into chunks does not matter to dense heads") {
  Plan plan{ModelShape{1, 6, 3, 64}};
  plan.set(0, 1, Window::Config{.sinks = 4, .recent = 21});
  plan.set(0, 2, Window::Config{.sinks = 2, .recent = 33, .rotary_in_cache = RotaryConfig{}});
  const std::size_t tokens = 150;
  test::Random random{1};
  test::Chunk<E> whole{random, plan.shape(), tokens};
  Cache at_once{plan};
  whole.step(at_once, 0);
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 3, 200}) {
    for (const std::vector<std::size_t>& sizes :
         {std::vector<std::size_t>{1}, {7}, {64}, {65, 63, 2}, {149}}) {
      Cache cut{plan, {.max_rollback = max_rollback, .page_rows = 16}};
      test::Tensor<float> out{tokens, 6, 64};
      for (std::size_t done = 0, i = 0; done < tokens; ++i) {
        const std::size_t count = std::min(sizes[i % sizes.size()], tokens - done);
        cut.step(0, std::as_const(whole.q).view().slice(done, count),
                 std::as_const(whole.k).view().slice(done, count),
                 std::as_const(whole.v).view().slice(done, count), out.view().slice(done, count));
        done += count;
      }
      CHECK(test::largest_difference(out.numbers(), whole.out.numbers()) <= 1e-5);
    }
  }
}

TEST_CASE("a plan predicts the bytes") {
  for (const std::size_t page_rows : std::initializer_list<std::size_t>{16, 64}) {
    for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 1, 20}) {
      Run run{max_rollback, page_rows};
      const Plan plan = mixed_plan();
      CHECK(run.cache.bytes() == plan.memory(0, run.options).total());
      test::Random random{1};
      for (int i = 0; i < 60; ++i) {
        const auto tokens = 1 + test::below(random, i % 7 == 0 ? 70 : 3);
        run.feed(static_cast<std::uint64_t>(i), {tokens});
        CHECK(run.cache.bytes() == plan.memory(run.cache.tokens(), run.options).total());
      }
      run.cache.compress();
      CHECK(run.cache.commit_point() == run.cache.tokens());
      CacheOptions committed = run.options;
      committed.max_rollback = 0;  // the policies now hold all rows
      CHECK(run.cache.bytes() - run.cache.plan().memory(0, run.options).total() ==
            plan.memory(run.cache.tokens(), committed, true).heads);
    }
  }
}

TEST_CASE("a step's own memory is bounded by the window, not by the chunk") {
  test::CountingResource memory;
  const ModelShape small{1, 1, 1, 64};
  for (const HeadSettings<E>& settings :
       {HeadSettings<E>{Window::Config{.sinks = 2, .recent = 40}},
        HeadSettings<E>{QuantizedWindow::Config{.sinks = 2, .recent = 40, .storage = {.residual = 8}}}}) {
    Cache cache{Plan{small, settings}, {.page_rows = 16, .memory = &memory}};
    test::Random random{1};
    test::feed(cache, random, {60});
    const std::size_t before = cache.bytes();
    memory.reset_peak();
    test::feed(cache, random, {500, 500});
    CHECK(memory.peak_bytes() <= 3 * before);
    CHECK(memory.live_bytes() == cache.bytes());
  }
}
