// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/headkv.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
// By KV head: 1, 3, 2, 2.
const HeadScores scores{2, 4, {0.5, 1.5, 3.0, 3.0, 2.0, 2.0, 0.0, 4.0}};

}  // namespace

TEST_CASE("each KV head gets the budget of its group's score") {
  const auto plan = headkv_plan<float16>(shape, scores,
                                         {.capacity = 40,
                                          .observation_window = 8,
                                          .beta = 1.0,
                                          .pooling = Pooling::average,
                                          .kernel = 5,
                                          .compress_every = 16});
  using Policy = HeadBudgetCache<DenseStorage<float16>>;
  const std::size_t expected[]{16, 48, 32, 32};  // 32 rows x 4 heads, as 1 : 3 : 2 : 2
  for (std::size_t i = 0; i < 4; ++i) {
    const auto& config = plan.at(i / 2, i % 2).get<Policy>();
    CHECK(config ==
          Policy::Config{.budget = expected[i],
                         .compress_from = 40,
                         .compress_every = 16,
                         .scorer = {.observation_window = 8, .pooling = Pooling::average, .kernel = 5}});
  }
}

TEST_CASE("quantised survivors, and settings that do not work") {
  const auto plan = quantized_headkv_plan<float>(shape, scores, {}, {.bits = 8});
  using Policy = HeadBudgetCache<ResidualStorage<float>>;
  CHECK(plan.at(1, 1).get<Policy>().storage.bits == 8);
  CHECK_THROWS_WITH_AS((void)headkv_plan<float>(shape, HeadScores{2, 2, 1.0}),
                       doctest::Contains("2 layers x 2 query heads do not fit"), ConfigError);
  CHECK_THROWS_AS((void)headkv_plan<float>(shape, scores, {.observation_window = 0}), ConfigError);
  CHECK_THROWS_AS((void)headkv_plan<float>(shape, scores, {.kernel = 4}), ConfigError);
  CHECK_THROWS_AS((void)headkv_plan<float>(shape, scores, {.beta = 0.5}), ConfigError);
}

namespace {

void feed(KvCache<float>& cache, std::size_t tokens) {
  std::vector<float> q(tokens * 4 * 64, 0.5F);
  std::vector<float> kv(tokens * 2 * 64, 0.25F);
  std::vector<float> out(q.size());
  for (std::size_t layer = 0; layer < 2; ++layer) {
    cache.step(layer, TensorView<const float>{q.data(), tokens, 4, 64},
               TensorView<const float>{kv.data(), tokens, 2, 64},
               TensorView<const float>{kv.data(), tokens, 2, 64},
               TensorView<float>{out.data(), tokens, 4, 64});
  }
}

std::vector<std::size_t> rows_of(const KvCache<float>& cache) {
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < 4; ++i) {
    rows.push_back(cache.head(i / 2, i % 2).rows());
  }
  return rows;
}

}  // namespace

TEST_CASE("after a compression each head has its budget and the window") {
  constexpr std::size_t tokens = 100;
  KvCache<float> cache{headkv_plan<float>(shape, scores, {.capacity = 40, .observation_window = 8})};
  feed(cache, tokens);
  cache.compress();
  const auto rows = rows_of(cache);
  CHECK(std::accumulate(rows.begin(), rows.end(), std::size_t{0}) == 40 * 4);
  CHECK(cache.bytes() == cache.plan().memory(tokens, {}, true).total());
}

TEST_CASE("a prompt shorter than the capacity stays whole in every head, as published") {
  // The published code compresses unless base_capacity > prompt - window, where base_capacity is
  // capacity - window: it uses the average of all heads, not a head's own budget.
  using Rows = std::vector<std::size_t>;
  constexpr std::size_t capacity = 128, window = 8;
  const Rows budgets{60, 180, 120, 120};  // 120 per head, as 1 : 3 : 2 : 2
  for (const std::size_t tokens : {std::size_t{1}, std::size_t{8}, std::size_t{100}, std::size_t{127},
                                   std::size_t{128}, std::size_t{129}, std::size_t{300}}) {
    CAPTURE(tokens);
    Rows published, alone;
    const bool whole = capacity - window + window > tokens;
    for (const std::size_t budget : budgets) {
      alone.push_back(std::min(tokens, budget + window));
      published.push_back(whole ? tokens : alone.back());
    }
    const auto after = [&](bool keep) {
      KvCache<float> cache{
          headkv_plan<float>(shape, scores, {.capacity = capacity, .beta = 1.0, .keep_short_prompts = keep})};
      feed(cache, tokens);
      cache.compress();
      CHECK(cache.bytes() == cache.plan().memory(tokens, {}, true).total());
      return rows_of(cache);
    };
    CHECK(after(true) == published);
    CHECK(after(false) == alone);
  }
}

TEST_CASE("a prompt that stayed whole is compressed when the text is long enough") {
  const HeadKvConfig config{.capacity = 128, .beta = 1.0, .compress_every = 4};
  using Rows = std::vector<std::size_t>;
  KvCache<float> cache{headkv_plan<float>(shape, scores, config)};
  feed(cache, 120);
  cache.compress();
  feed(cache, 1);  // 53 rows more than the first head's capacity
  CHECK(rows_of(cache) == Rows(4, 121));
  KvCache<float> fork = cache.fork();
  for (int i = 0; i < 7; ++i) feed(cache, 1);
  CHECK(rows_of(cache) == Rows{68, 128, 128, 128});
  for (int i = 0; i < 4; ++i) feed(cache, 1);
  CHECK(rows_of(cache) == Rows{68, 132, 128, 128});
  feed(fork, 8);
  CHECK(rows_of(fork) == Rows{68, 129, 129, 129});
  fork.compress();
  CHECK(rows_of(fork) == Rows{68, 129, 128, 128});
}
