// SPDX-License-Identifier: Apache-2.0
//
// A program without kernels for quantised rows (KVPOLICY_EXACT_ROWS_ONLY, in all its files: so this is one of its own).
#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/kivi.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;

TEST_CASE("a plan that quantises is refused, and one that does not is served") {
  const ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  static_assert(!gpu::can_quantize<64> && !gpu::can_quantize<128>);
  const HeadPlan<float16> quantised = kivi_plan<float16>(shape);
  const std::string refusal =
      test::thrown<ConfigError>([&] { static_cast<void>(gpu::served_rule(quantised, 0, 1)); });
  CHECK(refusal.find("compile it without KVPOLICY_EXACT_ROWS_ONLY") != std::string::npos);
  CHECK_FALSE(gpu::served_rule(streaming_llm_plan<float16>(shape), 0, 1).is_quantized());
}
