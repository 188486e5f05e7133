// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvpolicy/kivi.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 64};

}  // namespace

TEST_CASE("keys per channel, values per token, the published flush") {
  const auto plan = kivi_plan<float16>(shape);
  using Policy = QuantizedResidualCache<float16, Granularity::per_channel>;
  const ResidualConfig codes = plan.at(0, 1).get<Policy>().storage;
  CHECK(codes ==
        ResidualConfig{.bits = 2, .key_group = 32, .value_group = 32, .residual = 128, .flush = Flush::kivi});
}

TEST_CASE("a KIVI cache of 2 bits takes the bytes of its codes, scales and residual") {
  const auto plan = kivi_plan<float16>(shape);
  const CacheOptions options{.page_rows = 64};
  // Of 1,024 rows all keys are quantised, and all values but the latest 128. A row of 64 codes has 16
  // bytes, and a scale and a zero for each 32 codes.
  const std::size_t codes = 1024 * (16 + 64 / 32 * 4);
  const std::size_t values = (1024 - 128) * (16 + 64 / 32 * 4) + 128 * 64 * 2;
  CHECK(plan.memory(1024, options).heads == 2 * (codes + values));
}

TEST_CASE("settings that do not work are refused") {
  CHECK_THROWS_AS((void)kivi_plan<float>(shape, {.bits = 7}), ConfigError);
  CHECK_THROWS_AS((void)kivi_plan<float>(shape, {.residual = 100}), ConfigError);
  CHECK_THROWS_AS((void)kivi_plan<float>(shape, {.residual = 0}), ConfigError);
  CHECK_THROWS_AS((void)kivi_plan<float>({1, 2, 2, 80}, {.group = 32}), ConfigError);
  CHECK(kivi_plan<float>(shape, {.residual = 100, .flush = Flush::steady}).shape() == shape);
}
