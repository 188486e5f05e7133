// SPDX-License-Identifier: Apache-2.0
//
// A digest that tells models apart: each weight, bias and setting counts, wherever it stands.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <reference_model/model_digest.hpp>

#include "random_weights.hpp"
#include "speculation.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::reference;

std::uint64_t changed(const std::function<void(LlamaConfig&, LlamaWeights&)>& change) {
  const Llama model = tiny_llama({}, 1);
  LlamaConfig config = model.config();
  LlamaWeights weights = model.weights();
  change(config, weights);
  return digest_of(Llama{config, weights});
}

Linear with_one_more(const Linear& linear, std::size_t at) {
  std::vector<float> bias = linear.bias;
  return Linear{linear.weight.changed([at](std::span<float> numbers) { numbers[at] += 0.125F; }),
                std::move(bias)};
}

TEST_CASE("one number of one matrix, norm or bias, and each setting, is another model") {
  const std::uint64_t own = changed([](auto&, auto&) {});
  CHECK(own == digest_of(tiny_llama({}, 1)));
  std::set<std::uint64_t> digests{own, digest_of(tiny_llama({}, 2))};
  std::size_t count = 2;
  const auto add = [&](const std::function<void(LlamaConfig&, LlamaWeights&)>& change) {
    digests.insert(changed(change));
    ++count;
    CHECK(digests.size() == count);
  };
  add([](auto& config, auto&) { config.rotary.theta = 20000; });
  add([](auto& config, auto&) { config.norm_eps *= 2; });
  add([](auto& config, auto&) { config.max_positions = 4095; });
  add([](auto& config, auto&) { config.windows[1] = 64; });
  add([](auto& config, auto&) { config.windows[0] = 64; });
  add([](auto&, auto& weights) { weights.norm[3] += 1; });
  add([](auto&, auto& weights) { weights.layers[1].mlp_norm[0] += 1; });
  add([](auto&, auto& weights) { weights.layers[0].attention_norm[0] += 1; });
  int linears = 0;
  for_each_linear(tiny_llama({}, 1).weights(), [&](const Linear&) { ++linears; });
  for (int i = 0; i < linears; ++i) {
    for (const bool last : {false, true}) {
      int at = 0;
      bool is_there = false;
      const auto change = [&](LlamaConfig&, LlamaWeights& weights) {
        at = 0;
        for_each_linear(weights, [&](Linear& linear) {
          if (at++ != i || linear.weight.size() == 0) return;
          is_there = true;
          linear = with_one_more(linear, last ? linear.weight.size() - 1 : 0);
        });
      };
      const std::uint64_t digest = changed(change);
      if (!is_there) continue;  // the head of tied embeddings
      CAPTURE(i);
      digests.insert(digest);
      CHECK(digests.size() == ++count);
    }
  }
  CHECK(count > 30);
  // What two matrices have is not what they would have in turn.
  add([](auto&, auto& weights) { std::swap(weights.layers[0].k, weights.layers[0].v); });
}

TEST_CASE("weights that are kept in another format are another model") {
  std::set<std::uint64_t> digests;
  for (const WeightFormat format : weight_formats) {
    digests.insert(changed([&](auto&, auto& weights) {
      for_each_linear(weights, [&](Linear& linear) {
        if (linear.weight.size() > 0) linear = Linear{linear.weight.as(format)};
      });
    }));
  }
  CHECK(digests.size() == std::size(weight_formats));
}

}  // namespace
