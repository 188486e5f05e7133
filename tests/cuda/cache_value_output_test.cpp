// SPDX-License-Identifier: Apache-2.0
//
// Heads that weigh rows by what their values add to the layer's output (CriticalKV), choose a share of their rows
// before that, and lift low scores (DefensiveKV): on a device and on the host, which keep the same rows.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/host_copy.hpp>
#include <kvpolicy/cuda/saved_cache.hpp>

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
using Snap = HeadBudgetCache<DenseStorage<E>, SnapKvScorer>;
using Expected = HeadBudgetCache<DenseStorage<E>, ExpectedAttentionScorer>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using Tova = HeadBudgetCache<DenseStorage<E>, TovaScorer>;

// A model's output projections, on the device and on the host.
struct Outputs {
  Outputs(test::Random& random, const ModelShape& shape, std::size_t outputs) : there{shape}, here{shape} {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      auto& own = numbers.emplace_back(outputs * shape.q_heads * shape.head_dim);
      for (std::size_t i = 0; i < own.size(); ++i) {
        // Heads and layers whose weights differ much in size, so that wrong ones would be seen.
        const std::size_t head = i / shape.head_dim % shape.q_heads;
        own[i] = E{test::normal(random) * 0.1F * static_cast<float>(1 + 3 * head + 5 * l)};
      }
      weights.emplace_back(own.size());
      weights.back().upload(own);
      here.set(l, TensorView<const E>{numbers[l].data(), outputs, shape.q_heads, shape.head_dim});
      there.set(l, TensorView<const E>{weights[l].data(), outputs, shape.q_heads, shape.head_dim});
    }
  }

  std::vector<std::vector<E>> numbers;  // of each layer
  std::vector<test::DeviceArray<E>> weights;
  gpu::ValueOutputs there;
  kvpolicy::ValueOutputs here;
};

template <class Policy>
typename Policy::Config weighed(std::size_t budget, double unweighed_share = 0.0,
                                ValueNorm norm = ValueNorm::output_l1) {
  typename Policy::Config config;
  config.budget = budget;
  config.weigh_values = true;
  config.value_norm = norm;
  config.unweighed_share = unweighed_share;
  return config;
}
Snap::Config worst_case(Snap::Config config) {
  config.scorer.votes = Votes::largest;
  config.scorer.prior_share = 1.0;
  return config;
}

// Every kind beside each other, in two layers.
constexpr std::size_t kinds = 8;
Plan mixed_plan(std::size_t every, std::size_t group) {
  Plan plan{ModelShape{2, kinds * group, kinds, 64}};
  const auto set = [&](std::size_t l, std::size_t head, auto config) {
    config.compress_every = every;
    plan.set(l, head, config);
  };
  for (std::size_t l = 0; l < 2; ++l) {
    set(l, l, weighed<Snap>(20));
    set(l, 1 - l, weighed<Snap>(17, 0.5));
    set(l, 2, worst_case(weighed<Snap>(21, 0.4)));
    auto average = weighed<Snap>(15, 0.25);
    average.scorer.pooling = Pooling::average;
    average.scorer.prior_share = 0.5;
    set(l, 3, average);
    auto expected = weighed<Expected>(24, 0.5);
    expected.scorer.observation_window = 9;
    expected.scorer.future = 12;
    set(l, 4, expected);
    auto added_up = weighed<H2o>(19, 0.3);
    added_up.scorer.recent = 4;
    set(l, 5, added_up);
    set(l, 6, worst_case(weighed<Snap>(13, 0.5, ValueNorm::value_l2)));
    Snap::Config lifted{.budget = 11};
    lifted.scorer.prior_share = 1.0;
    set(l, 7, lifted);
  }
  return plan;
}

}  // namespace

TEST_CASE("value outputs: heads keep on a device what they keep on the host") {
  const test::SmallDevice device;
  for (const std::size_t every : {std::size_t{0}, std::size_t{9}}) {
    const std::size_t group = every == 0 ? 2 : 1;
    CAPTURE(every);
    test::Random random{7};
    const Plan plan = mixed_plan(every, group);
    const Outputs outputs{random, plan.shape(), 13};
    test::CountingDeviceMemory memory;
    {
      const gpu::CacheOptions options{.max_append = 9, .memory = &memory, .value_outputs = &outputs.there};
      Pair pair{plan, options, &outputs.here};
      for (const std::size_t tokens : {45, 1, 12, 3}) {
        pair.step(tokens, tokens == 3);
        if (tokens > 10) pair.compress();
      }
      Pair other{pair};
      other.step(20);
      other.compress();
      pair.step(2);
      pair.compress();
      // By files, and by copies, which need the weights of the other side.
      pair.step(12);
      std::stringstream file;
      gpu::save(pair.there, file);
      Cache loaded{plan, options, nullptr, pair.there.engine()};
      gpu::load(loaded, file);
      KvCache<E> down = gpu::to_host(pair.there, nullptr, nullptr, &outputs.here);
      pair.compress();
      down.compress();
      loaded.compress();
      for (std::size_t h = 0; h < kinds; ++h) {
        CHECK(loaded.rows(1, h).positions == pair.on_host(1, h));
        std::vector<std::int64_t> held;
        for (const Segment& segment : down.segments(1, h)) {
          for (std::size_t i = 0; i < segment.rows; ++i) held.push_back(segment.position_of(i));
        }
        CHECK(held == pair.on_host(1, h));
      }
      CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(gpu::to_host(pair.there)); }),
                     "the cache knows no output projection"));
    }
    CHECK(memory.live_bytes() == 0);
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("value outputs: budgets that are shared in the layer and in the model") {
  const test::SmallDevice device;
  for (const bool in_model : {false, true}) {
    for (const double share : {0.0, 0.5}) {
      CAPTURE(in_model);
      CAPTURE(share);
      test::Random random{8};
      Plan plan{ModelShape{2, 6, 3, 64}};
      for (std::size_t l = 0; l < 2; ++l) {
        for (std::size_t h = 0; h < 3; ++h) {
          auto own = worst_case(weighed<Snap>(5 + 9 * (l + h), share));
          own.adaptive_in_layer = true;
          own.adaptive_in_model = in_model;
          plan.set(l, h, own);
        }
      }
      const Outputs outputs{random, plan.shape(), 13};
      Pair pair{plan, {.value_outputs = &outputs.there}, &outputs.here};
      pair.step(60);
      pair.compress();
      pair.step(25);
      pair.compress();
    }
  }
}

TEST_CASE("value outputs: survivors that are quantised, in rotated rows as well") {
  const test::SmallDevice device;
  for (const bool rotated : {false, true}) {
    CAPTURE(rotated);
    test::Random random{9};
    using Own = HeadBudgetCache<PerTokenStorage<E>, TovaScorer>;
    auto config = weighed<Own>(128, 0.5);
    config.storage = {.bits = 8, .residual = 0, .key_hadamard = rotated, .value_hadamard = rotated};
    const Plan plan{ModelShape{1, 4, 2, 64}, config};
    const Outputs outputs{random, plan.shape(), 9};
    Pair pair{plan, {.value_outputs = &outputs.there}, &outputs.here};
    pair.step(200);
    for (int i = 0; i < 2; ++i) {
      pair.compress();
      pair.step(64);  // 128 + 64 rows are three blocks
    }
  }
}

TEST_CASE("value outputs: a text is put under a plan that weighs by them") {
  const test::SmallDevice device;
  test::Random random{10};
  const ModelShape shape{1, 4, 2, 64};
  const Outputs outputs{random, shape, 7};
  const Plan plan{shape, weighed<Tova>(12, 0.5)};
  Cache whole{Plan{shape}, {.kept_queries = 1, .value_outputs = &outputs.there}};
  Pair pair{plan, {.value_outputs = &outputs.there}, &outputs.here};
  const test::DeviceChunk<> chunk{random, shape, 50};
  chunk.step(whole, 0);
  pair.step_layer(0, chunk);
  Cache forked = whole.fork_as(plan);
  Cache twice = forked.fork();
  pair.compress();
  forked.compress();
  twice.compress();
  for (std::size_t h = 0; h < 2; ++h) {
    CHECK(forked.rows(0, h).positions == pair.on_host(0, h));
    CHECK(twice.rows(0, h).positions == pair.on_host(0, h));
  }
  const Cache without{Plan{shape}};
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(without.fork_as(plan)); }),
                 "the cache knows no output projection of the layer"));
}

TEST_CASE("value outputs: what does not fit is refused by name") {
  const test::SmallDevice device;
  test::Random random{11};
  const ModelShape shape{2, 2, 1, 64};
  const Outputs outputs{random, shape, 3};
  const Plan plan{shape, weighed<Snap>(4)};
  CHECK(contains(thrown<ConfigError>([&] { const Cache cache{plan}; }),
                 "value_norm is 'output_l1' in layer 0, but the cache knows no output projection"));
  gpu::ValueOutputs of_one_layer{shape};
  CHECK(of_one_layer.layer(0) == nullptr);
  of_one_layer.set(0, TensorView<const E>{outputs.weights[0].data(), 3, 2, 64});
  CHECK(of_one_layer.layer(0)->tokens == 3);
  const auto refusal = [&](const Plan& of, const gpu::ValueOutputs& given) {
    return thrown<ConfigError>([&] { const Cache cache{of, {.value_outputs = &given}}; });
  };
  CHECK(contains(refusal(plan, of_one_layer), "value_norm is 'output_l1' in layer 1"));
  Plan half_of_it = plan;
  half_of_it.set(1, 0, Snap::Config{.budget = 4});
  CHECK(refusal(half_of_it, of_one_layer).empty());
  const Outputs wider{random, {2, 4, 1, 64}, 3};
  CHECK(contains(thrown<ShapeError>([&] { const Cache cache{plan, {.value_outputs = &wider.there}}; }),
                 "are for 4 query and 1 KV heads"));

  gpu::ValueOutputs given{shape};
  const auto* data = reinterpret_cast<const bfloat16*>(outputs.weights[0].data());
  const auto shape_error = [&](const TensorView<const bfloat16>& view) {
    const std::string message = thrown<ShapeError>([&] { given.set(0, view); });
    CHECK(given.layer(0) == nullptr);
    return message;
  };
  CHECK(contains(shape_error({data, 3, 1, 64}), "are [3, 1, 64], must be [outputs, 2, 64]"));
  CHECK(contains(shape_error({nullptr, 3, 2, 64}), "weights of layer 0 are null"));
  CHECK(contains(shape_error({data + 1, 2, 2, 64}), "aligned to 16 bytes"));
  CHECK(contains(shape_error({data, 2, 2, 64, 132, 64}), "a stride of 132 from output to output"));
  CHECK(contains(shape_error({data, 2, 2, 64, 160, 68}), "of 68 from head to head"));
  CHECK(contains(shape_error({data, std::size_t{1} << 30, 2, 64}), "1073741824 outputs"));
  CHECK(contains(thrown<ConfigError>([&] { given.set(2, TensorView<const E>{}); }), "there is no layer 2"));
  for (std::size_t l = 0; l < 2; ++l) given.set(l, TensorView<const bfloat16>{data, 3, 2, 64});
  CHECK(contains(refusal(plan, given), "the output projection of layer 0 is bfloat16, must be float16"));

  // What only a scorer of one's own can state.
  struct Lifting : ExpectedAttentionScorer::Config {
    void describe(HeadRule& rule) const {
      ExpectedAttentionScorer::Config::describe(rule);
      rule.prior_share = 0.5;
    }
  };
  HeadRule rule = Expected::rule({}, 64);
  Lifting{}.describe(rule);
  CHECK(contains(thrown<ConfigError>([&] { gpu::check_served(rule, 64); }), "has a prior_share of 0.5"));
  rule = Expected::rule({}, 64);
  rule.weighs_values = false;
  rule.unweighed_share = 0.25;
  CHECK(
      contains(thrown<ConfigError>([&] { gpu::check_served(rule, 64); }), "has an unweighed_share of 0.25"));
  HeadRule by_keys = HeadBudgetCache<DenseStorage<E>, KeyNormScorer>::rule({}, 64);
  by_keys.weighs_values = true;
  CHECK(thrown<ConfigError>([&] { gpu::check_served(by_keys, 64); }).empty());
  by_keys.value_norm = ValueNorm::output_l1;
  CHECK(contains(thrown<ConfigError>([&] { gpu::check_served(by_keys, 64); }),
                 "value_norm is 'output_l1' under key_norm, which goes by keys"));
}
