// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/headkv.hpp>
#include <kvpolicy/plan/any_plan.hpp>

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
// By KV head: 1, 3, 2, 2.
const HeadScores scores{2, 4, {0.5, 1.5, 3.0, 3.0, 2.0, 2.0, 0.0, 4.0}};

}  // namespace

TEST_CASE_TEMPLATE("each KV head gets the budget of its group's score", Plan, HeadKvPlan<half>,
                   AnyPlan<half>) {
  const auto plan = headkv_plan<Plan>(shape, scores,
                                      {.capacity = 40,
                                       .window = 8,
                                       .beta = 1.0,
                                       .pooling = Pooling::average,
                                       .kernel = 5,
                                       .compress_every = 16});
  using Config = typename HeadBudgetCache<DenseStorage<half>>::Config;
  const std::size_t expected[]{16, 48, 32, 32};  // 32 rows x 4 heads, by 1 : 3 : 2 : 2
  for (std::size_t i = 0; i < 4; ++i) {
    const auto& config = std::get<Config>(plan.at(i / 2, i % 2));
    CHECK(config == Config{.budget = expected[i],
                           .compress_every = 16,
                           .scorer = {.window = 8, .pooling = Pooling::average, .kernel = 5}});
  }
}

TEST_CASE("quantised survivors, and settings that do not work") {
  const auto plan = quantized_headkv_plan<AnyPlan<float>>(shape, scores, {}, {.bits = 8});
  using Config = HeadBudgetCache<ResidualStorage<float>>::Config;
  CHECK(std::get<Config>(plan.at(1, 1)).storage.bits == 8);
  CHECK_THROWS_WITH_AS((void)headkv_plan<float>(shape, HeadScores{2, 2, 1.0}),
                       doctest::Contains("2 layers x 2 query heads do not fit"), ConfigError);
  CHECK_THROWS_AS((void)headkv_plan<float>(shape, scores, {.window = 0}), ConfigError);
  CHECK_THROWS_AS((void)headkv_plan<float>(shape, scores, {.kernel = 4}), ConfigError);
  CHECK_THROWS_AS((void)headkv_plan<float>(shape, scores, {.beta = 0.5}), ConfigError);
}

TEST_CASE("after a compression each head has its budget and the window") {
  constexpr std::size_t tokens = 100;
  HeadKvCache<float> cache{headkv_plan<float>(shape, scores, {.capacity = 40, .window = 8})};
  std::vector<float> q(tokens * 4 * 64, 0.5F);
  std::vector<float> kv(tokens * 2 * 64, 0.25F);
  std::vector<float> out(q.size());
  for (std::size_t layer = 0; layer < 2; ++layer) {
    cache.step(layer, TensorView<const float>{q.data(), tokens, 4, 64},
               TensorView<const float>{kv.data(), tokens, 2, 64},
               TensorView<const float>{kv.data(), tokens, 2, 64},
               TensorView<float>{out.data(), tokens, 4, 64});
  }
  cache.compress();
  std::size_t rows = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    std::visit([&](const auto& policy) { rows += policy.rows(); }, cache.policy(i / 2, i % 2));
  }
  CHECK(rows == 40 * 4);
  CHECK(cache.bytes() == cache.plan().memory(tokens, {}, true).total());
}
