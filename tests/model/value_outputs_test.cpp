// SPDX-License-Identifier: Apache-2.0
//
// The output projections that a Llama gives to caches, and rows that are weighed by them.
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"
#include "model/random_weights.hpp"
#include "support/compare.hpp"

namespace kvpolicy::reference::value_outputs_test {
namespace {

TEST_CASE("a Llama's output projections are its own weights, in each format that can be viewed") {
  for (const WeightFormat format : weight_formats) {
    CAPTURE(name_of(format));
    const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = format});
    const LlamaConfig& config = model.config();
    const ValueOutputs* outputs = model.value_outputs();
    if (format == WeightFormat::int8) {
      CHECK(outputs == nullptr);
      continue;
    }
    REQUIRE(outputs != nullptr);
    CHECK(outputs == model.value_outputs());  // made once
    const std::size_t group = config.q_heads / config.kv_heads;
    const std::vector<float> values = normal_floats(3 * config.head_dim, 5);
    for (std::size_t layer = 0; layer < config.layers; ++layer) {
      const std::vector<float> weights = model.weights().layers[layer].o.weight.to_floats();
      for (std::size_t head = 0; head < config.kv_heads; ++head) {
        REQUIRE(outputs->head(layer, head) != nullptr);
        std::vector<double> norms(3 * group);
        outputs->head(layer, head)->norms(values, norms);
        for (std::size_t i = 0; i < 3 * group; ++i) {
          const std::size_t first = (head * group + i % group) * config.head_dim;
          double norm = 0.0;
          for (std::size_t output = 0; output < config.hidden; ++output) {
            double sum = 0.0;
            for (std::size_t c = 0; c < config.head_dim; ++c) {
              sum += static_cast<double>(weights[output * config.q_heads * config.head_dim + first + c]) *
                     static_cast<double>(values[i / group * config.head_dim + c]);
            }
            norm += std::abs(sum);
          }
          CHECK(norms[i] == doctest::Approx(norm).epsilon(1e-5));
        }
      }
    }
  }
}

TEST_CASE("copies of a Llama share the projections, which outlive the first of them") {
  std::vector<double> norms(2);
  const ValueOutputs* outputs = nullptr;
  const auto copied = [&] {
    const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
    outputs = model.value_outputs();
    return model;
  }();
  CHECK(copied.value_outputs() == outputs);
  const std::size_t group = copied.config().q_heads / copied.config().kv_heads;
  norms.resize(group);
  outputs->head(0, 0)->norms(std::vector<float>(copied.config().head_dim, 1.0F), norms);
  CHECK(norms[0] > 0.0);
}

TEST_CASE("a weight that is not finite is refused when it is asked for") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  LlamaWeights weights = model.weights();
  weights.layers[0].o.weight = weights.layers[0].o.weight.changed(
      [](std::span<float> numbers) { numbers[3] = std::numeric_limits<float>::quiet_NaN(); });
  const Llama broken{model.config(), std::move(weights)};
  const std::string message = test::thrown<ShapeError>([&] { static_cast<void>(broken.value_outputs()); });
  CHECK(test::contains(message, "the weight of layer 0 from channel 3 of query head 0 to output 0 is "));
}

TEST_CASE("a prompt is compressed by what its values add to the output") {
  using Snap = HeadBudgetCache<DenseStorage<float>>;
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  const std::vector<int> all = load_golden("gqa2_d80").tokens;
  const std::vector<int> text(all.begin(), all.begin() + 60);
  Snap::Config config{.budget = 12, .weigh_values = true};
  const auto survivors = [&] {
    KvCache cache{HeadPlan<float>{model.config().shape(), config}, {.value_outputs = model.value_outputs()}};
    static_cast<void>(prefill(model, cache, text, 64));
    cache.compress();
    static_cast<void>(step(model, cache, std::array{5}));
    std::vector<std::int64_t> positions;
    for (const Segment& rows : cache.segments(0, 0)) {
      for (std::size_t i = 0; i < rows.rows; ++i) positions.push_back(rows.position_of(i));
    }
    return positions;
  };
  const auto by_length = survivors();
  config.value_norm = ValueNorm::output_l1;
  const auto by_output = survivors();
  CHECK(by_length.size() == 12 + 8 + 1);
  CHECK(by_output.size() == 12 + 8 + 1);
  CHECK(by_output != by_length);
}

}  // namespace
}  // namespace kvpolicy::reference::value_outputs_test
