// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
const HeadGates gates{2, 2, {0.9, 0.1, 0.4, 0.6}};

}  // namespace

TEST_CASE("a duo plan gives each head what its gate asks for") {
  const auto plan = duo_plan<float16>(
      shape, gates, {.sparsity = 0.5, .sinks = 5, .recent = 70, .mask = Mask::prefill_chunk});
  using Full = FullCache<DenseStorage<float16>>;
  using Window = SinkRecentCache<DenseStorage<float16>>;
  CHECK(plan.has<Full>(0, 0));
  CHECK(plan.has<Window>(0, 1));
  CHECK(plan.has<Window>(1, 0));
  CHECK(plan.has<Full>(1, 1));
  const auto& window = plan.at(0, 1).get<Window>();
  CHECK(window == Window::Config{.sinks = 5, .recent = 70, .mask = Mask::prefill_chunk});
}

TEST_CASE("a quantised duo plan quantises the retrieval heads only") {
  const auto plan = duo_plan<float>(shape, gates, {.sparsity = 0.25},
                                    LowBitFormat::of_text({4, 4}, shape, 16).head<float>());
  using Codes = QuantizedResidualCache<float, Granularity::per_channel>;
  const auto codes = plan.at(0, 0).get<Codes>();
  CHECK(codes.sinks == 4);
  CHECK(codes.storage == Codes::Config{.storage = {.key_group = 64,
                                                   .value_group = 64,
                                                   .residual = 16,
                                                   .key_hadamard = true,
                                                   .value_hadamard = true}}
                             .storage);
  CHECK(plan.has<SinkRecentCache<DenseStorage<float>>>(0, 1));
}

TEST_CASE("settings that do not work are refused") {
  CHECK_THROWS_AS((void)duo_plan<float>(shape, gates, {.recent = 0}), ConfigError);
  CHECK_THROWS_AS((void)duo_plan<float>(shape, gates, {.sparsity = std::numeric_limits<double>::quiet_NaN()}),
                  ConfigError);
  CHECK_THROWS_WITH_AS((void)duo_plan<float>(shape, HeadGates{2, 3, 0.5}),
                       doctest::Contains("2 layers x 3 heads does not fit a model of 2 layers x 2"),
                       ConfigError);
  CHECK_THROWS_AS((void)duo_plan<float>({0, 4, 2, 64}, gates), ConfigError);
  CHECK_THROWS_AS(
      (void)duo_plan<float>(shape, gates, {}, QuantizedResidualCache<float>::Config{.storage = {.bits = 7}}),
      ConfigError);
}

TEST_CASE("a duo cache holds its window and gives the result of the whole text in any division into calls") {
  constexpr std::size_t tokens = 150;
  const auto plan = duo_plan<float>(shape, gates, {.sparsity = 0.5, .sinks = 3, .recent = 20});
  std::vector<float> q(tokens * 4 * 64);
  std::vector<float> kv(tokens * 2 * 64);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i * 37 % 101) / 50.0F - 1.0F;
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<float>(i * 53 % 97) / 48.0F - 1.0F;
  const auto feed = [&](std::size_t chunk) {
    DuoCache<float> cache{plan};
    std::vector<float> out(q.size());
    for (std::size_t at = 0; at < tokens; at += chunk) {
      const std::size_t count = std::min(chunk, tokens - at);
      for (std::size_t layer = 0; layer < 2; ++layer) {
        cache.step(layer, TensorView<const float>{q.data() + at * 4 * 64, count, 4, 64},
                   TensorView<const float>{kv.data() + at * 2 * 64, count, 2, 64},
                   TensorView<const float>{kv.data() + at * 2 * 64, count, 2, 64},
                   TensorView<float>{out.data() + at * 4 * 64, count, 4, 64});
      }
    }
    CHECK(cache.bytes() == plan.memory(tokens).total());
    return out;
  };
  const auto whole = feed(tokens);
  for (const std::size_t chunk : {std::size_t{1}, std::size_t{7}, std::size_t{64}}) {
    const auto cut = feed(chunk);
    float worst = 0.0F;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      worst = std::max(worst, std::abs(whole[i] - cut[i]));
    }
    CHECK(worst <= 1e-5F);
  }
}
