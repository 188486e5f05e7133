// SPDX-License-Identifier: Apache-2.0
//
// Steps of a model so small that they are worked out by hand: two query heads for each of two KV heads of 8 channels, a
// hidden state of 10. A KV head's weights are 2 bytes * 10 * 8 channels * 2 * (2 query heads + 1) = 960 bytes, an MLP's
// 2 * 3 * 10 * 20 = 1,200, a table's 2 * 10 * 30 = 600.
#include <cstddef>
#include <optional>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/full_cache.hpp>

#include "bench/shards/step_model.hpp"
#include "support/compare.hpp"

using namespace kvpolicy;
using namespace kvpolicy::bench;
using test::contains;
using test::thrown;

namespace {

ModelSize model_of(std::size_t layers) { return {"tiny", {layers, 4, 2, 8}, 10, 20, 30}; }
const Device slow{.bandwidth = 1e6, .memory = 5000};

// 6.6 + 2 * 0.6 microseconds of a ring and the bytes at 87.7 GB/s; a gather makes half as many steps.
double sum_of_two(double bytes) { return 7.8e-6 + bytes / 87.7e9; }
double gather_of_two(double bytes) { return 7.2e-6 + bytes / 87.7e9; }

}  // namespace

TEST_CASE("a step waits for the slowest rank of each layer, twice a layer for sums, and reads all weights") {
  const ModelSize model = model_of(2);
  const HeadCosts seconds(2, {1e-3, 2e-3});
  const HeadCosts bytes(2, {100, 200});
  const Division division = equal_heads(model, 2, [&](std::size_t) { return seconds; }, bytes);
  const PredictedStep step = predict(model, slow, {}, division, 3);
  CHECK(step.weights == doctest::Approx(300e-6 + 2 * (960e-6 + 600e-6)));
  CHECK(step.rows == doctest::Approx(2 * 3 * 2e-3));
  CHECK(step.messages == doctest::Approx(2 * 2 * sum_of_two(3 * 2 * 10)));
  CHECK(step.total() == doctest::Approx(step.weights + step.rows + step.messages));
  // A rank has half of two MLPs and of two tables, 1,800 bytes, and a head in each layer: 3,720. The second rank has
  // 400 bytes of rows for a text, and room for 1,280.
  CHECK(texts_that_fit(model, slow, division) == std::optional<std::size_t>{3});
  CHECK(texts_that_fit(model, {.bandwidth = 1e6, .memory = 3720}, division) == std::optional<std::size_t>{0});
  CHECK(texts_that_fit(model, {.bandwidth = 1e6, .memory = 3719}, division) == std::nullopt);
}

TEST_CASE("a part of a head brings all of its weights, and its layer gathers") {
  const ModelSize model = model_of(1);
  const HeadCosts seconds{{1e-3, 2e-3}};
  const HeadCosts bytes{{100, 200}};
  const Shards shards{{{{{0}, {1, {0, 256}}}, {{1, {256, 1024}}}}}, 2};
  const Division division = division_of(model, shards, seconds, bytes);
  REQUIRE(division.layers[0].size() == 2);
  CHECK(division.layers[0][0].weight_bytes == 1920);
  CHECK(division.layers[0][1].weight_bytes == 960);
  CHECK(division.layers[0][0].seconds == doctest::Approx(1e-3 + 0.25 * 2e-3));
  CHECK(division.layers[0][1].seconds == doctest::Approx(0.75 * 2e-3));
  CHECK(division.layers[0][0].bytes == 150);
  CHECK(division.cut_heads[0] == 1);
  const PredictedStep step = predict(model, slow, {}, division, 5);
  // Rank 0 has the same rows and more weights. Log-sum-exps of 2 query heads of 5 texts are 40 bytes.
  CHECK(step.rows == doctest::Approx(5 * 1.5e-3));
  CHECK(step.weights == doctest::Approx((300 + 1920 + 600) * 1e-6));
  CHECK(step.messages == doctest::Approx(2 * sum_of_two(5 * 2 * 10) + gather_of_two(40)));
}

TEST_CASE("more ranks than KV heads: copies of the rows, and fewer query heads for each") {
  const ModelSize model = model_of(1);
  std::size_t asked = 0;
  const auto seconds = [&](std::size_t queries) {
    asked = queries;
    return HeadCosts{{1e-3, 2e-3}};
  };
  const Division division = equal_heads(model, 4, seconds, HeadCosts{{100, 200}});
  CHECK(asked == 1);
  REQUIRE(division.ranks() == 4);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    CHECK(division.layers[0][rank].weight_bytes == 2 * 10 * 8 * 2 * 2);
    CHECK(division.layers[0][rank].seconds == (rank < 2 ? 1e-3 : 2e-3));
    CHECK(division.layers[0][rank].bytes == (rank < 2 ? 100 : 200));
  }
  const auto error = [&](std::size_t ranks) {
    return thrown<ConfigError>([&] { (void)equal_heads(model, ranks, seconds, HeadCosts{{1, 1}}); });
  };
  CHECK(contains(error(3), "2 KV heads on 3 ranks, one must divide the other"));
  CHECK(contains(error(8), "2 query heads of a KV head on 4 ranks are not equally many"));
}

TEST_CASE("heads are cut where that is worth their weights and messages, and not elsewhere") {
  const ModelSize model = model_of(1);
  const HeadPlan<float> plan{model.shape};
  const HeadCosts bytes{{100, 100}};
  const auto divided = [&](double dear) {
    return balanced(plan, model, slow, {}, 2, 1, HeadCosts{{dear, 1e-5}}, bytes);
  };
  // Half of a head of 0.1 s is worth 0.96 ms of weights.
  CHECK(divided(0.1).cut_heads[0] == 1);
  CHECK(predict(model, slow, {}, divided(0.1), 1).rows < 0.06);
  // Half of a head of 1 ms is not.
  CHECK(divided(1e-3).cut_heads[0] == 0);
  CHECK(divided(1e-3).layers[0][0].weight_bytes == 960);
  const Division alone = balanced(plan, model, slow, {}, 1, 1, HeadCosts{{0.1, 0.1}}, bytes);
  CHECK(predict(model, slow, {}, alone, 1).messages == 0);
}
