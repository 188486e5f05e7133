// SPDX-License-Identifier: Apache-2.0
//
// Scores that are lifted to a share of their mean, against loops in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/lift_scores.cuh>

#include "cuda/support/launch.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;

namespace {

constexpr float untouched = -12345.0F;

// Three heads: one that weighs outputs, so that its query heads count by themselves, one that does not, and one whose
// scores stay as they are.
void check(int candidates, int group, double share) {
  CAPTURE(candidates);
  CAPTURE(group);
  CAPTURE(share);
  test::Random random{static_cast<std::uint64_t>(candidates + group)};
  constexpr int kept = 2, evicted = 5, kv_heads = 3;
  const int tokens = candidates + kept + evicted;
  const auto state = std::make_unique<LayerState>(LayerState{tokens, tokens});
  const std::vector<HeadView> views(kv_heads, HeadView{.evicted = evicted});
  std::vector<CompressionSettings> how(kv_heads, {.ranking = Ranking::attention,
                                                  .kept_rows = kept,
                                                  .budget = 1,
                                                  .prior_share = share,
                                                  .weighs_values = true});
  how[0].value_norm = ValueNorm::output_l1;
  how[2].prior_share = 0.0;
  const long long pitch = candidates + 3;
  const auto fill = [&](int lines) {
    std::vector<float> numbers(static_cast<std::size_t>(lines * pitch), untouched);
    for (int line = 0; line < lines; ++line) {
      for (int row = 0; row < candidates; ++row) {
        // Few rows have most of the attention, as in a text.
        const float number = std::abs(test::normal(random));
        numbers[static_cast<std::size_t>(line * pitch + row)] =
            number > 1.5F ? number * static_cast<float>(1 + line) : number * 0.01F;
      }
    }
    return numbers;
  };
  std::vector<float> scores = fill(kv_heads), of_query_heads = fill(kv_heads * group);
  const std::vector<float> before = scores, of_query_heads_before = of_query_heads;
  test::launch(lift_scores_kernel<256>, 1 + group, kv_heads, 256, lift_scores_shared_bytes(),
               {.heads = views.data(),
                .state = state.get(),
                .compressions = how.data(),
                .group = group,
                .scores = scores.data(),
                .of_query_heads = of_query_heads.data(),
                .pitch = pitch});
  int wrong = 0;
  const auto compare = [&](const std::vector<float>& was, const std::vector<float>& is, int line,
                           bool lifted) {
    double sum = 0.0;
    for (int row = 0; row < candidates; ++row) {
      sum += static_cast<double>(was[static_cast<std::size_t>(line * pitch + row)]);
    }
    for (int row = 0; row < pitch; ++row) {
      const auto at = static_cast<std::size_t>(line * pitch + row);
      double expected = static_cast<double>(was[at]);
      if (lifted && row < candidates) expected = std::max(expected, share * sum / candidates);
      // The mean is a double, added up in another order, and is rounded once.
      const double off = std::abs(static_cast<double>(is[at]) - expected);
      if (!(off <= 0x1p-23 * std::abs(expected))) ++wrong;
    }
  };
  for (int h = 0; h < kv_heads; ++h) {
    compare(before, scores, h, h < 2);
    for (int g = 0; g < group; ++g) {
      compare(of_query_heads_before, of_query_heads, h * group + g, h == 0);
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE(
    "scores are lifted to a share of their mean, each query head's by themselves where they are weighed so") {
  for (const int candidates : {0, 1, 2, 31, 255, 256, 257, 1000}) {
    for (const double share : {0.25, 1.0}) check(candidates, 1 + candidates % 3, share);
  }
}

TEST_CASE("a score that is no number stays, and lifts no other") {
  const auto state = std::make_unique<LayerState>(LayerState{3, 3});
  const std::vector<HeadView> views(1);
  const std::vector<CompressionSettings> how{
      {.ranking = Ranking::attention, .budget = 1, .prior_share = 1.0}};
  std::vector<float> scores{1.0F, std::numeric_limits<float>::quiet_NaN(), 0.0F};
  test::launch(lift_scores_kernel<256>, 2, 1, 256, lift_scores_shared_bytes(),
               {.heads = views.data(),
                .state = state.get(),
                .compressions = how.data(),
                .scores = scores.data(),
                .pitch = 3});
  CHECK(scores[0] == 1.0F);
  CHECK(std::isnan(scores[1]));
  CHECK(scores[2] == 0.0F);
}
