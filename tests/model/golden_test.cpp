// SPDX-License-Identifier: Apache-2.0
//
// Compares the model with the logits of PyTorch transformers, for every golden checkpoint and several
// divisions of the prompt into chunks; and checks that the comparison would detect a wrong model.
#include <cstddef>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <reference_model/llama.hpp>
#include <reference_model/parallel.hpp>

#include "model/dense_attention.hpp"
#include "model/golden.hpp"

namespace kvpolicy::reference::golden_test {
namespace {

float error_of(const Llama& model, const Golden& golden, std::size_t chunk) {
  DenseCache cache(model.config());
  return largest_error(all_logits(model, golden.tokens, chunk, cache.attend()), golden.logits);
}

/// The error of the checkpoint after `change`.
float error_with(const std::string& name, const std::function<void(LlamaConfig&, LlamaWeights&)>& change) {
  const Llama model = Llama::load(golden_folder(name));
  LlamaConfig config = model.config();
  LlamaWeights weights = model.weights();
  change(config, weights);
  return error_of(Llama(std::move(config), std::move(weights)), load_golden(name), 0);
}

TEST_CASE("logits equal those of transformers for any division of the prompt") {
  for (const std::string name : golden_names) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name), {.weights = WeightFormat::float32});
    const Golden golden = load_golden(name);
    REQUIRE(golden.tokens.size() == 150);
    for (const std::size_t chunk : {0, 1, 7, 64}) {
      CAPTURE(chunk);
      CHECK(error_of(model, golden, chunk) <= logit_tolerance);
    }
  }
}

TEST_CASE("weights as they are stored give the same logits, up to the split of activations") {
  for (const std::string name : golden_names) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const WeightFormat format = model.weights().layers[0].q.weight.format();
    CHECK((format == WeightFormat::bfloat16) == (name == "tied_d64" || name == "sharded_bf16"));
    CHECK((format == WeightFormat::float16) == (name == "f16_d128"));
    // Many rows of activations may be split into two bfloat16 terms, which keep 16 bits of each.
    const float tolerance = format == WeightFormat::bfloat16 ? 4 * logit_tolerance : logit_tolerance;
    for (const std::size_t chunk : {0, 1, 64}) {
      CAPTURE(chunk);
      CHECK(error_of(model, load_golden(name), chunk) <= tolerance);
    }
  }
}

TEST_CASE("an error in any part that a golden tests changes its logits") {
  constexpr float seen = 1e-2F;  // 100 times the tolerance
  CHECK(error_with("mha_d64", [](auto& c, auto&) { c.rotary.theta = 20000; }) > seen);
  CHECK(error_with("gqa2_d80", [](auto& c, auto&) { c.rotary.theta = 10000; }) > seen);
  CHECK(error_with("mha_d64", [](auto& c, auto&) { c.norm_eps = 0.1F; }) > seen);
  CHECK(error_with("gqa7_d64", [](auto&, auto& w) {
          WeightMatrix& q = w.layers[0].q.weight;
          q = q.changed([](std::span<float> numbers) { std::swap(numbers[0], numbers[7]); });
        }) > logit_tolerance);
  CHECK(error_with("all_biases", [](auto&, auto& w) {
          w.layers[1].o.bias.assign(w.layers[1].o.bias.size(), 0.0F);
        }) > seen);
  CHECK(error_with("all_biases", [](auto&, auto& w) {
          w.layers[1].down.bias.assign(w.layers[1].down.bias.size(), 0.0F);
        }) > seen);
  CHECK(error_with("qwen2_bias_gqa7", [](auto&, auto& w) {
          w.layers[0].v.bias.assign(w.layers[0].v.bias.size(), 0.0F);
        }) > seen);
  CHECK(error_with("qwen3_norms", [](auto&, auto& w) { w.layers[1].q_norm[3] += 1.0F; }) > seen);
  CHECK(error_with("qwen3_norms", [](auto&, auto& w) { w.layers[0].k_norm[3] += 1.0F; }) > seen);
  CHECK(error_with("qwen3_norms", [](auto& c, auto& w) {
          c.qk_norm = false;
          for (LlamaLayer& layer : w.layers) layer.q_norm = layer.k_norm = {};
        }) > seen);
  CHECK(error_with("llama3_scaling", [](auto& c, auto&) { c.rotary.factor = 4; }) > seen);
  CHECK(error_with("llama3_scaling", [](auto& c, auto&) { c.rotary.high_freq_factor = 3; }) > seen);
  CHECK(error_with("linear_scaling", [](auto& c, auto&) { c.rotary.scaling = RotaryConfig::Scaling::none; }) >
        seen);
  CHECK(error_with("mistral_window", [](auto& c, auto&) { c.windows.assign(2, 49); }) > seen);
  CHECK(error_with("mistral_window", [](auto& c, auto&) { c.windows.assign(2, 0); }) > seen);
  CHECK(error_with("qwen2_window_upper_layers", [](auto& c, auto&) { c.windows.assign(2, 24); }) > seen);
}

TEST_CASE("logits of the last token are the last row of all logits; none are empty") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"));
  const Golden golden = load_golden("gqa2_d80");
  const std::size_t vocabulary = model.config().vocabulary;
  DenseCache one(model.config());
  const std::vector<float> last = model.forward(golden.tokens, 0, one.attend(), LogitsOf::last);
  const std::span expected = std::span(golden.logits).last(vocabulary);
  CHECK(largest_error(last, expected) <= logit_tolerance);
  DenseCache other(model.config());
  CHECK(model.forward(golden.tokens, 0, other.attend(), LogitsOf::none).empty());
}

TEST_CASE("many rows at once, on several threads, give the logits of few") {
  for (const std::string name : {"gqa2_d80", "all_biases", "qwen2_window_upper_layers"}) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const Golden golden = load_golden(name);
    std::vector<int> tokens = golden.tokens;  // later tokens cannot change earlier logits
    tokens.insert(tokens.end(), golden.tokens.begin(), golden.tokens.end());
    tokens.insert(tokens.end(), golden.tokens.begin(), golden.tokens.begin() + 17);
    DenseCache whole(model.config());
    const auto at_once = all_logits(model, tokens, 0, whole.attend());
    const auto golden_part = std::span(at_once).first(golden.logits.size());
    CHECK(largest_error(golden_part, golden.logits) <= logit_tolerance);
    DenseCache pieces(model.config());
    CHECK(largest_error(all_logits(model, tokens, 64, pieces.attend()), at_once) <= logit_tolerance);
  }
}

TEST_CASE("work on blocks of rows covers each row once and passes exceptions on") {
  for (const std::size_t rows : {0, 1, 63, 255, 256, 257, 1000}) {
    std::vector<int> met(rows);
    for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
      for (std::size_t row = first; row < first + count; ++row) ++met[row];
    });
    CHECK(met == std::vector<int>(rows, 1));
    CHECK_THROWS_AS(for_each_row_block(rows, [](auto, auto) { throw std::bad_alloc(); }), std::bad_alloc);
  }
}

TEST_CASE("positions may be given one by one") {
  const Llama model = Llama::load(golden_folder("llama3_scaling"));
  const Golden golden = load_golden("llama3_scaling");
  std::vector<std::size_t> positions(golden.tokens.size());
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = i;
  DenseCache cache(model.config());
  const auto logits = model.forward(golden.tokens, positions, cache.attend(), LogitsOf::all);
  CHECK(largest_error(logits, golden.logits) <= logit_tolerance);
  // Rotary attention only depends on distances, so moving the whole text changes nothing but rounding.
  for (std::size_t& position : positions) position += 1000;
  DenseCache moved(model.config());
  const auto same = model.forward(golden.tokens, positions, moved.attend(), LogitsOf::all);
  CHECK(largest_error(same, golden.logits) <= 10 * logit_tolerance);
}

}  // namespace
}  // namespace kvpolicy::reference::golden_test
