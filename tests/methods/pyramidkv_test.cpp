// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/pyramidkv.hpp>

using namespace kvpolicy;

namespace {
constexpr ModelShape shape{.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
}

TEST_CASE("lower layers get more") {
  const auto plan = pyramidkv_plan<float16>(shape, {.capacity = 48,
                                                    .observation_window = 8,
                                                    .beta = 4.0,
                                                    .pooling = Pooling::average,
                                                    .kernel = 5,
                                                    .compress_every = 16});
  using Policy = HeadBudgetCache<DenseStorage<float16>>;
  const std::size_t expected[]{70, 40, 10};  // 2 * 40 - 10 down to 40 / 4
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(plan.at(i / 2, i % 2).get<Policy>() ==
          Policy::Config{.budget = expected[i / 2],
                         .compress_from = 48,
                         .compress_every = 16,
                         .scorer = {.observation_window = 8, .pooling = Pooling::average, .kernel = 5}});
  }
  CHECK_THROWS_AS((void)pyramidkv_plan<float16>(shape, {.observation_window = 0}), ConfigError);
  CHECK_THROWS_AS((void)pyramidkv_plan<float16>(shape, {.beta = 0.0}), ConfigError);
  CHECK_THROWS_AS((void)pyramidkv_plan<float16>(shape, {.kernel = 4}), ConfigError);
}

TEST_CASE("a prompt shorter than the capacity stays whole in every layer, as published") {
  for (const bool keep : {true, false}) {
    const auto plan = pyramidkv_plan<float>(shape, {.capacity = 48, .beta = 4.0, .keep_short_prompts = keep});
    for (std::size_t i = 0; i < 6; ++i) {
      using Policy = HeadBudgetCache<DenseStorage<float>>;
      CHECK(plan.at(i / 2, i % 2).get<Policy>().compress_from == (keep ? 48 : 0));
    }
  }
}

TEST_CASE("a compressed cache holds what its plan predicted") {
  constexpr std::size_t tokens = 100;
  KvCache<float> cache{pyramidkv_plan<float>(shape, {.capacity = 48, .beta = 4.0})};
  const std::vector<float> q(tokens * 4 * 64, 0.5F);
  const std::vector<float> kv(tokens * 2 * 64, 0.25F);
  std::vector<float> out(q.size());
  for (std::size_t layer = 0; layer < 3; ++layer) {
    cache.step(layer, TensorView<const float>{q.data(), tokens, 4, 64},
               TensorView<const float>{kv.data(), tokens, 2, 64},
               TensorView<const float>{kv.data(), tokens, 2, 64},
               TensorView<float>{out.data(), tokens, 4, 64});
  }
  cache.compress();
  const std::size_t expected[]{78, 48, 18};
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(cache.head(i / 2, i % 2).rows() == expected[i / 2]);
  }
  CHECK(cache.bytes() == cache.plan().memory(tokens, {}, true).total());
}
