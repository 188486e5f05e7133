// SPDX-License-Identifier: Apache-2.0
//
// A saved cache goes back under its own settings alone, also where two settings differ in which of their later fields
// they have.
#include <doctest/doctest.h>

#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

#include "cache/dump.hpp"
#include "support/compare.hpp"
#include "support/small_cache.hpp"
#include "support/source_dir.hpp"

using namespace kvpolicy;

TEST_CASE("settings that differ in one later field are told apart") {
  using Snap = HeadBudgetCache<DenseStorage<float>>;
  using Codes = QuantizedResidualCache<float>;
  const ModelShape shape{1, 2, 2, 64};
  std::vector<HeadPlan<float>> plans;
  const auto add = [&](const auto& config) { plans.emplace_back(shape, config); };
  add(Snap::Config{});
  add(Snap::Config{.compress_from = 1});
  add(Snap::Config{.adaptive_in_model = true});
  add(Snap::Config{.weigh_values = true});
  add(Snap::Config{.weigh_values = true, .unweighed_share = 0.5});
  add(Snap::Config{.weigh_values = true, .value_norm = ValueNorm::output_l1});
  add(Snap::Config{.scorer = {.votes = Votes::largest}});
  add(Snap::Config{.scorer = {.prior_share = 0.5}});
  add(Codes::Config{});
  add(Codes::Config{.storage = {.key_bits = 2}});
  add(Codes::Config{.storage = {.value_bits = 2}});
  add(Codes::Config{.storage = {.key_hadamard = true}});
  add(Codes::Config{.storage = {.value_hadamard = true}});
  add(Codes::Config{.storage = {.key_codebook = Codebook::normal}});
  add(Codes::Config{.storage = {.value_codebook = Codebook::normal}});
  add(Codes::Config{.storage = {.value_codebook = Codebook::nvfp4}});
  add(Codes::Config{.storage = {.value_codebook = Codebook::nvfp4, .value_scale = 0.5}});
  const std::vector<float> weights(3 * 2 * 64, 1.0F);
  ValueOutputs outputs{shape};
  outputs.set(0, TensorView<const float>{weights.data(), 3, 2, 64});
  const CacheOptions options{.value_outputs = &outputs};
  for (std::size_t from = 0; from < plans.size(); ++from) {
    KvCache cache{plans[from], options};
    test::Random random{from};
    test::feed(cache, random, {5});
    const std::string bytes = test::saved(cache);
    for (std::size_t to = 0; to < plans.size(); ++to) {
      CAPTURE(from);
      CAPTURE(to);
      KvCache other{plans[to], options};
      const bool refused = !test::thrown<FormatError>([&] { test::load_bytes(other, bytes, {}); }).empty();
      CHECK(refused == (from != to));
    }
  }
}

// A seed that is refused from its first settings on would let a fuzzer find nothing beyond them.
TEST_CASE("the seeds of the fuzzer that are whole files load") {
  const auto load = [](const char* name, const test::SmallPlan& plan) {
    std::ifstream in{testing::source_dir() + "/tests/fuzz/corpus/saved_cache/" + name, std::ios::binary};
    REQUIRE(in.good());
    const std::string bytes{std::istreambuf_iterator<char>{in}, {}};
    test::SmallCache cache{plan, test::small_options()};
    CHECK(test::thrown<FormatError>([&] { test::load_bytes(cache, test::with_checksums(bytes)); }).empty());
    CHECK(cache.tokens() > 0);
  };
  load("whole", test::small_plan());
  load("low_bits", test::low_bit_plan());
  load("codebooks", test::codebook_plan());
}
