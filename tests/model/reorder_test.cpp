// SPDX-License-Identifier: Apache-2.0
//
// Permuting the heads of a model must not change its logits.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <reference_model/reorder.hpp>
#include <reference_model/run.hpp>

#include "model/dense_attention.hpp"
#include "model/golden.hpp"

namespace kvpolicy::reference::reorder_test {
namespace {

using HeadOrders = std::vector<HeadOrder>;

HeadOrders reversed_orders(const LlamaConfig& config) {
  std::vector<std::size_t> order(config.kv_heads);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return HeadOrders(config.layers, order);
}

TEST_CASE("a reordered model gives the same logits") {
  // Goldens with more than one KV head: with biases, groups of 7, both kinds of layers.
  for (const std::string name :
       {"mha_d64", "gqa2_d80", "gqa7_d64", "all_biases", "qwen2_window_upper_layers", "sharded_bf16"}) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const Golden golden = load_golden(name);
    HeadOrders orders = reversed_orders(model.config());
    std::ranges::sort(orders.back());  // one layer keeps its order
    for (const HeadOrders& some : {orders, reversed_orders(model.config())}) {
      const Llama moved = reordered(model, some);
      CHECK(moved.weights().layers[0].k.weight != model.weights().layers[0].k.weight);
      CHECK(moved.weights().layers[0].o.bias == model.weights().layers[0].o.bias);
      DenseCache cache(model.config());
      const auto logits = all_logits(moved, golden.tokens, 64, cache.attend());
      CHECK(largest_error(logits, golden.logits) <= logit_tolerance);
    }
  }
}

TEST_CASE("a reordered model under a reordered plan gives the logits of both before") {
  const std::string name = "gqa2_d80";
  const Llama model = Llama::load(golden_folder(name));
  const Golden golden = load_golden(name);
  using Window = SinkRecentCache<DenseStorage<float>>;
  HeadPlan<FullCache<DenseStorage<float>>, Window> plan{model.config().shape()};
  plan.set(0, 0, Window::Config{.sinks = 4, .recent = 16});
  plan.set(1, 1, Window::Config{.sinks = 0, .recent = 24});
  const HeadOrders orders = reversed_orders(model.config());
  const auto logits_of = [&](const Llama& some, const auto& its_plan) {
    KvCache cache{its_plan};
    return step(some, cache, golden.tokens, LogitsOf::all);
  };
  const auto expected = logits_of(model, plan);
  CHECK(largest_error(expected, golden.logits) > 1e-2F);  // the windows do limit some heads
  const Llama moved = reordered(model, orders);
  CHECK(largest_error(logits_of(moved, kvpolicy::reordered(plan, orders)), expected) <= logit_tolerance);
  CHECK(largest_error(logits_of(moved, plan), expected) > 1e-2F);
}

TEST_CASE("the order decides the indices of heads, and changes nothing else") {
  // A made-up model of four KV heads with eight query heads, whose weights are their own row numbers.
  LlamaConfig config;
  config.vocabulary = config.hidden = config.intermediate = 4;
  config.layers = 1;
  config.q_heads = 8;
  config.kv_heads = 4;
  config.head_dim = 2;
  config.tied_embeddings = config.qkv_bias = config.o_bias = true;
  config.windows = {0};
  const auto rows = [](std::size_t inputs, std::size_t outputs, bool bias) {
    std::vector<float> numbers(inputs * outputs);
    std::iota(numbers.begin(), numbers.end(), 0.0F);
    Linear layer{inputs, outputs, std::move(numbers), {}};
    if (bias) layer.bias.resize(outputs);
    std::iota(layer.bias.begin(), layer.bias.end(), 0.0F);
    return layer;
  };
  LlamaWeights weights{rows(4, 4, false), {}, std::vector<float>(4, 1.0F), {}};
  weights.layers.push_back({.attention_norm = std::vector<float>(4, 1.0F),
                            .q = rows(4, 16, true),
                            .k = rows(4, 8, true),
                            .v = rows(4, 8, true),
                            .o = rows(16, 4, true),
                            .q_norm = {},
                            .k_norm = {},
                            .mlp_norm = std::vector<float>(4, 1.0F),
                            .gate = rows(4, 4, false),
                            .up = rows(4, 4, false),
                            .down = rows(4, 4, false)});
  const Llama moved = reordered(Llama{config, weights}, {{2, 0, 3, 1}});
  const LlamaLayer& layer = moved.weights().layers[0];
  CHECK(layer.k.bias == std::vector<float>{4, 5, 0, 1, 6, 7, 2, 3});
  CHECK(layer.v.bias == layer.k.bias);
  CHECK(layer.q.bias == std::vector<float>{8, 9, 10, 11, 0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7});
  CHECK(layer.k.weight.row<float>(0)[0] == 16.0F);  // row 4 of 4 inputs
  CHECK(layer.o.weight.row<float>(0)[0] == 8.0F);   // column 8 of row 0
  CHECK(layer.o.weight.row<float>(1)[0] == 24.0F);  // column 8 of row 1
  CHECK(layer.o.bias == std::vector<float>{0, 1, 2, 3});
  CHECK(layer.gate.weight == weights.layers[0].gate.weight);
}

TEST_CASE("orders that are not permutations are refused") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  CHECK_THROWS_AS((void)reordered(model, {{0, 1}}), ConfigError);
  CHECK_THROWS_AS((void)reordered(model, {{0, 1}, {0}}), ConfigError);
  CHECK_THROWS_AS((void)reordered(model, {{0, 1}, {0, 0}}), ConfigError);
  CHECK_THROWS_AS((void)reordered(model, {{0, 1}, {0, 2}}), ConfigError);
  CHECK_THROWS_AS((void)reordered(model, {{0, 1}, {0, 1, 2}}), ConfigError);
}

}  // namespace
}  // namespace kvpolicy::reference::reorder_test
