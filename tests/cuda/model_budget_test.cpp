// SPDX-License-Identifier: Apache-2.0
//
// Heads that share the model's budget on the device, whatever their layer: beside the host's cache where both rank rows
// by the same numbers, and against the scores that `observe` gives the rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include <kvpolicy/cuda/host_copy.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/host_pair.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;
using Pair = test::HostPair;

namespace {

using E = float16;
using Plan = HeadPlan<E>;
using Cache = gpu::KvCache<E>;
using Norm = HeadBudgetCache<DenseStorage<E>, KeyNormScorer>;
using Snap = HeadBudgetCache<DenseStorage<E>, SnapKvScorer>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;

Norm::Config norm(std::size_t budget, double safeguard, bool in_model = true) {
  return {.budget = budget,
          .adaptive_in_layer = true,
          .adaptive_in_model = in_model,
          .safeguard = safeguard,
          .scorer = {.recent = 4}};
}

// Three layers of heads that share the model's budget, beside heads that share their layer's and heads alone.
Plan mixed_plan(double safeguard, std::size_t compress_from = 0) {
  Plan plan{ModelShape{3, 6, 6, 64}};
  const std::size_t budgets[] = {20, 0, 7, 60, 33, 1};
  for (std::size_t l = 0; l < 3; ++l) {
    for (std::size_t h = 0; h < 3; ++h) {
      Norm::Config own = norm(budgets[(2 * l + h) % 6], safeguard);
      own.compress_from = compress_from;
      if (l < 2 || h == 0) plan.set(l, h, own);
    }
    if (l < 2) {
      for (std::size_t h = 3; h < 5; ++h) plan.set(l, h, norm(budgets[h], 0.1, false));
      plan.set(l, 5, Norm::Config{.budget = 11, .scorer = {.recent = 2}});
    }
  }
  return plan;
}

// Keys whose lengths tie: few different ones, of the same numbers in other orders.
void feed_ties(Pair& pair, std::size_t tokens) {
  for (std::size_t l = 0; l < pair.shape.layers; ++l) {
    const test::DeviceChunk<> chunk{pair.random, pair.shape, tokens};
    std::vector<E> keys(tokens * pair.shape.kv_heads * 64);
    for (std::size_t row = 0; row < tokens * pair.shape.kv_heads; ++row) {
      const std::size_t kind = test::below(pair.random, 4), turned = test::below(pair.random, 64);
      for (std::size_t i = 0; i < 64; ++i) {
        keys[row * 64 + i] = E{0.01F * static_cast<float>((i + turned) % 64) * static_cast<float>(kind)};
      }
    }
    chunk.k.upload(keys);
    pair.step_layer(l, chunk);
  }
  pair.check();
}

}  // namespace

TEST_CASE("heads that share the model's budget keep the host's rows exactly") {
  for (const double safe : {0.0, 0.2, 1.0}) {
    CAPTURE(safe);
    const test::SmallDevice device;
    test::CountingDeviceMemory memory;
    {
      Pair pair{mixed_plan(safe), {.max_append = 9, .memory = &memory}};
      pair.step(40);
      pair.compress();
      for (const std::size_t tokens : {1, 2, 5, 65, 1, 130}) {
        pair.step(tokens, tokens == 5);
        if (tokens > 1) pair.compress();
      }
      Pair other{pair};
      other.step(30);
      const std::size_t before = other.there.bytes();
      other.compress();
      CHECK(other.there.bytes() < before);
      other.compress();  // nothing more to drop
      pair.step(3, true);
      // What the others have is not counted twice, and nothing of what is dropped stays behind.
      CHECK(memory.live_bytes() <= pair.there.bytes() + pair.there.overhead_bytes() + other.there.bytes() +
                                       other.there.overhead_bytes() + pair.there.engine()->workspace_bytes());
      // 20 + 0 + 7, 7 + 60 + 33 and 33 are the budgets of those that share over the model, of 7 heads.
      std::size_t rows = other.there.rows(2, 0).positions.size();
      for (const std::size_t l : {0U, 1U}) {
        for (std::size_t h = 0; h < 3; ++h) rows += other.there.rows(l, h).positions.size();
      }
      CHECK(rows == 160 + 7 * 4);
    }
    CHECK(memory.live_bytes() == 0);
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("heads that share the model's budget: equal ranks go by layer, head and row as on the host") {
  const test::SmallDevice device;
  Pair pair{mixed_plan(0.3)};
  feed_ties(pair, 100);
  pair.compress();
  feed_ties(pair, 70);
  pair.compress();
}

TEST_CASE("heads that share the model's budget: random calls, forks, compressions") {
  const test::SmallDevice device;
  for (const std::uint64_t seed : {1U, 2U}) {
    CAPTURE(seed);
    test::CountingDeviceMemory memory;
    test::Random random{seed};
    {
      const Plan plan = mixed_plan(seed == 1 ? 0.25 : 0.0, seed == 1 ? 50 : 0);
      test::check_random_calls(plan, {.max_append = 9, .memory = &memory}, random, 40);
    }
    CHECK(memory.live_bytes() == 0);
  }
}

TEST_CASE("heads that share the model's budget by attention keep what is looked at most in any layer") {
  const test::SmallDevice device;
  constexpr std::size_t tokens = 150, kept = 4;
  for (const std::size_t group : {std::size_t{1}, std::size_t{3}}) {
    CAPTURE(group);
    const ModelShape shape{2, 2 * group, 2, 64};
    Plan plan{shape};
    const std::size_t budgets[] = {20, 0, 7, 60};
    for (std::size_t i = 0; i < 4; ++i) {
      plan.set(i / 2, i % 2,
               Snap::Config{.budget = budgets[i],
                            .adaptive_in_model = true,
                            .safeguard = 0.1,
                            .scorer = {.observation_window = kept, .kernel = 1}});
    }
    Cache cache{plan, {.kept_queries = tokens}};
    test::feed_device(cache, 5, {tokens});
    std::vector<std::vector<float>> sums[2];
    for (const std::size_t l : {0U, 1U}) REQUIRE(cache.observe(l, kept, sums[l]) == kept);
    cache.compress();
    std::size_t rows = 0;
    double lowest_in = std::numeric_limits<double>::infinity(), highest_out = -lowest_in, largest = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      CAPTURE(i);
      const auto positions = cache.rows(i / 2, i % 2).positions;
      const std::set<std::int64_t> in(positions.begin(), positions.end());
      rows += positions.size();
      std::vector<double> best;
      for (std::size_t row = 0; row + kept < tokens; ++row) {
        double score = 0;
        for (std::size_t g = 0; g < group; ++g)
          score += static_cast<double>(sums[i / 2][i % 2][g * tokens + row]);
        largest = std::max(largest, score);
        if (in.contains(static_cast<std::int64_t>(row))) {
          best.push_back(score);
        } else {
          highest_out = std::max(highest_out, score);
        }
      }
      for (std::size_t row = tokens - kept; row < tokens; ++row)
        CHECK(in.contains(static_cast<std::int64_t>(row)));
      std::sort(best.begin(), best.end());
      const std::size_t safe = budgets[i] / 10;
      CHECK(best.size() >= safe);
      if (best.size() > safe) lowest_in = std::min(lowest_in, best.front());
    }
    CHECK(rows == 87 + 4 * kept);
    CHECK(lowest_in >= highest_out - 1e-5 * largest);
  }
}

TEST_CASE("a competition over the model that finds no memory drops nothing") {
  const test::SmallDevice device;
  test::CountingDeviceMemory memory;
  const ModelShape shape{2, 4, 2, 64};
  Cache cache{Plan{shape, Snap::Config{.budget = 10, .adaptive_in_model = true}}, {.memory = &memory}};
  test::feed_device(cache, 1, {90});
  CHECK(test::compress_without_memory(cache, memory) > 6);
  std::size_t rows = 0;
  for (std::size_t i = 0; i < 4; ++i) rows += cache.rows(i / 2, i % 2).positions.size();
  CHECK(rows == 4 * 18);
  CHECK(memory.live_bytes() == cache.bytes() + cache.overhead_bytes() + cache.engine()->workspace_bytes());
}

TEST_CASE("heads that share the model's budget: a cache on its way between host and device") {
  const test::SmallDevice device;
  Pair pair{mixed_plan(0.2)};
  pair.step(70);
  pair.compress();
  pair.step(20);
  KvCache<E> down = gpu::to_host(pair.there);
  Cache up = gpu::to_device(pair.here);
  pair.compress();
  down.compress();
  up.compress();
  for (std::size_t l = 0; l < 3; ++l) {
    for (std::size_t h = 0; h < 6; ++h) {
      std::vector<std::int64_t> positions;
      for (const Segment& rows : down.segments(l, h)) {
        for (std::size_t i = 0; i < rows.rows; ++i) positions.push_back(rows.position_of(i));
      }
      CHECK(positions == pair.on_host(l, h));
      CHECK(up.rows(l, h).positions == pair.on_host(l, h));
    }
  }
}

TEST_CASE("heads that share the model's budget: a layer alone, a layer without queries, quantised heads") {
  const test::SmallDevice device;
  Plan plan{ModelShape{2, 2, 2, 64}};
  plan.set(0, 0, Snap::Config{.budget = 2, .adaptive_in_model = true});
  plan.set(1, 0, Snap::Config{.budget = 100, .adaptive_in_model = true});
  plan.set(1, 1, Norm::Config{.budget = 3});
  Cache cache{plan, {.max_append = 9}};
  test::feed_device(cache, 1, {30});
  const std::string refusal = thrown<ConfigError>([&] { cache.compress(std::size_t{0}); });
  CHECK(contains(refusal, "gpu::KvCache::compress: heads of layer 0 share their budgets"));
  // Heads of another layer bring their rows, though they have none to drop.
  Cache fork = cache.fork();
  test::Random random{4};
  const test::DeviceChunk<> full{random, plan.shape(), 1};
  full.step(fork, 0);
  full.append(fork, 1);
  const auto before = test::dump_device(fork);
  CHECK(contains(thrown<ShapeError>([&] { fork.compress(); }), "not all queries are known"));
  CHECK(test::dump_device(fork) == before);
  cache.compress();
  CHECK(cache.rows(0, 0).positions.size() + cache.rows(1, 0).positions.size() == 10 + 30);
  CHECK(cache.rows(1, 1).positions.size() == 3);

  // Exact rows that waited become quantised in all layers, though no head drops a row.
  using Codes = HeadBudgetCache<PerTokenStorage<E>, KeyNormScorer>;
  Codes::Config codes{.budget = 300, .adaptive_in_model = true};
  codes.storage.bits = 4;
  codes.storage.residual = 8;
  Plan quantized{ModelShape{2, 2, 2, 64}, codes};
  codes.budget = 100;
  quantized.set(1, 1, codes);
  Cache packed{quantized};
  test::feed_device(packed, 1, {100});
  packed.compress();
  for (std::size_t i = 0; i < 4; ++i) {
    const auto rows = packed.rows(i / 2, i % 2);
    CHECK(rows.positions.size() == 100);
    CHECK(std::count(rows.quantized.begin(), rows.quantized.end(), true) == 64);
  }
  test::feed_device(packed, 2, {150});
  packed.compress();  // the last head alone is above its own budget
  std::size_t rows = 0;
  for (std::size_t i = 0; i < 4; ++i) rows += packed.rows(i / 2, i % 2).positions.size();
  CHECK(rows == 3 * 250 + 100);
}
