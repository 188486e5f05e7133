// SPDX-License-Identifier: Apache-2.0
//
// Heads that drop rows before any question is known (KeyDiff, Expected Attention) on the device and on the host, which
// keep the same rows: alone, sharing budgets, compressing by themselves, weighed, quantised, in forks and copies.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
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
using Diff = HeadBudgetCache<DenseStorage<E>, KeyDiffScorer>;
using Expected = HeadBudgetCache<DenseStorage<E>, ExpectedAttentionScorer>;
using Snap = HeadBudgetCache<DenseStorage<E>, SnapKvScorer>;

Expected::Config expecting(std::size_t budget, std::size_t window, std::size_t future,
                           double theta = 10000.0) {
  Expected::Config config{.budget = budget};
  config.scorer.observation_window = window;
  config.scorer.future = future;
  config.scorer.rotary.theta = theta;
  return config;
}

// A scorer of one's own that says of queries to come that they are nowhere, or nothing.
struct Fortune {
  struct Config {
    bool tells = false;
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("tells", tells); }
    void describe(HeadRule& rule) const {
      rule.ranking = Ranking::expected;
      if (tells) rule.expected = ExpectedQueries{.future = 0};
    }
  };
  static constexpr std::string_view name = "fortune";
  static void validate(const Config&) {}
  static std::size_t kept_rows(const Config&) { return 0; }
  static std::size_t observed_queries(const Config&) { return 4; }
  static void score(const Config&, std::span<const float>, std::size_t, std::size_t, std::span<float>) {}
};

// Every kind beside each other, in two layers.
Plan mixed_plan(std::size_t every, std::size_t group) {
  Plan plan{ModelShape{2, 7 * group, 7, 64}};
  for (std::size_t l = 0; l < 2; ++l) {
    plan.set(l, l, Diff::Config{.budget = 20, .compress_every = every});
    plan.set(l, 1 - l, Diff::Config{.budget = 9, .compress_every = every, .scorer = {.recent = 5}});
    auto expected = expecting(31, 20, 50);
    expected.compress_every = every;
    plan.set(l, 2, expected);
    expected = expecting(12, 8, 1, 700.0);
    expected.compress_every = every;
    expected.scorer.recent = 4;
    expected.scorer.sinks = 0;
    plan.set(l, 3, expected);
    expected = expecting(17, 33, 10);
    expected.compress_every = every;
    expected.weigh_values = true;
    plan.set(l, 4, expected);
    plan.set(l, 5, Snap::Config{.budget = 13, .compress_every = every, .scorer = {.observation_window = 4}});
  }
  return plan;
}

}  // namespace

TEST_CASE("scorers without a question keep on a device what they keep on the host") {
  const test::SmallDevice device;
  for (const std::size_t every : {std::size_t{0}, std::size_t{7}}) {
    for (const std::size_t group : {std::size_t{1}, std::size_t{3}}) {
      CAPTURE(every);
      CAPTURE(group);
      test::CountingDeviceMemory memory;
      {
        Pair pair{mixed_plan(every, group), {.max_append = 9, .memory = &memory}};
        for (const std::size_t tokens : {70, 1, 1, 20, 3, 65}) {
          pair.step(tokens, tokens == 3);
          if (tokens > 10) pair.compress();
        }
        Pair other{pair};
        other.step(30);
        other.compress();
        pair.step(2);
        pair.compress();
        KvCache<E> down = gpu::to_host(pair.there);
        Cache up =
            gpu::to_device(pair.here, {.max_append = 9, .memory = &memory}, nullptr, pair.there.engine());
        CHECK(down.tokens() == up.tokens());
        pair.compress();
        down.compress();
        up.compress();
        for (std::size_t h = 0; h < 7; ++h) CHECK(up.rows(1, h).positions == pair.on_host(1, h));
      }
      CHECK(memory.live_bytes() == 0);
      CHECK(memory.faults() == 0);
    }
  }
}

TEST_CASE("scorers without a question: budgets that are shared in the layer and in the model") {
  const test::SmallDevice device;
  for (const bool in_model : {false, true}) {
    CAPTURE(in_model);
    Plan plan{ModelShape{2, 6, 3, 64}};
    for (std::size_t l = 0; l < 2; ++l) {
      for (std::size_t h = 0; h < 3; ++h) {
        plan.set(
            l, h,
            Diff::Config{.budget = 10 * (l + h), .adaptive_in_layer = true, .adaptive_in_model = in_model});
      }
    }
    Pair keys{plan};
    for (std::size_t l = 0; l < 2; ++l) {
      for (std::size_t h = 0; h < 3; ++h) {
        auto own = expecting(5 + 10 * (l + h), 16, 30);
        own.adaptive_in_layer = true;
        own.adaptive_in_model = in_model;
        own.weigh_values = true;
        plan.set(l, h, own);
      }
    }
    Pair queries{plan};
    for (Pair* pair : {&keys, &queries}) {
      pair->step(90);
      pair->compress();
      pair->step(41);
      pair->compress();
    }
  }
}

TEST_CASE("scorers without a question: survivors that are quantised, in rotated rows as well") {
  const test::SmallDevice device;
  for (const bool rotated : {false, true}) {
    CAPTURE(rotated);
    const ResidualConfig storage{
        .bits = 8, .residual = 0, .key_hadamard = rotated, .value_hadamard = rotated};
    const ModelShape shape{1, 4, 2, 64};
    Plan plan{shape,
              HeadBudgetCache<PerTokenStorage<E>, KeyDiffScorer>::Config{.budget = 128, .storage = storage}};
    HeadBudgetCache<PerTokenStorage<E>, ExpectedAttentionScorer>::Config expected{.budget = 128,
                                                                                  .storage = storage};
    expected.weigh_values = true;
    expected.scorer.observation_window = 24;
    plan.set(0, 1, expected);
    Pair pair{plan};
    pair.step(200);
    for (int i = 0; i < 2; ++i) {
      pair.compress();
      pair.step(64);  // 128 + 64 rows are three blocks
    }
  }
}

TEST_CASE("scorers without a question: how the latest call made its logits counts") {
  const test::SmallDevice device;
  const Plan plan{ModelShape{1, 2, 1, 64}, expecting(20, 16, 12)};
  for (const float scale : {0.05F, 0.5F}) {
    Pair pair{plan};
    pair.step(80, false, {.scale = scale});
    pair.compress();
  }
}

TEST_CASE("scorers without a question: what a device does not serve is refused by name") {
  const test::SmallDevice device;
  const ModelShape shape{1, 1, 1, 64};
  const auto refusal = [&](const Expected::Config& config) {
    return thrown<ConfigError>([&] { const Cache cache{Plan{shape, config}}; });
  };
  CHECK(refusal(expecting(20, 1024, 5)).empty());
  CHECK(contains(refusal(expecting(20, 1025, 5)), "observation_window is 1025 queries, must be 1 to 1024"));
  using Own = HeadBudgetCache<DenseStorage<E>, Fortune>;
  const auto own_refusal = [&](bool tells) {
    return thrown<ConfigError>(
        [&] { const Cache cache{Plan{shape, Own::Config{.scorer = {.tells = tells}}}}; });
  };
  CHECK(contains(own_refusal(false),
                 "fortune ranks rows by queries to come, but its `describe` does not say which"));
  CHECK(contains(own_refusal(true), "fortune expects queries at 0 positions"));
  Cache cache{Plan{shape, expecting(5, 4, 5)}};
  test::feed_device(cache, 1, {8});
  const test::DeviceChunk<> chunk{shape, 1};
  chunk.append(cache, 0);
  CHECK(contains(thrown<ShapeError>([&] { cache.compress(); }), "not all queries are known"));
}
