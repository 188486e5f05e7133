// SPDX-License-Identifier: Apache-2.0
//
// Scores that are multiplied by the norms of what values become in the output projection, against loops in double over
// numbers that are read one by one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include <kvpolicy/cuda/kernels/weigh_outputs.cuh>

#include "cuda/support/codes.hpp"
#include "cuda/support/device_head.hpp"
#include "cuda/support/forbid.hpp"
#include "cuda/support/launch.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using test::Side;

namespace {

constexpr float untouched = -12345.0F;
constexpr float most = std::numeric_limits<float>::max();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  HeadView view = {};
  int rows = 70;
  int outputs = 11;
  int group = 2;
  int blocks = 2;
  int page_rows = 64;
  std::uint64_t seed = 1;
};

template <Element E>
double number(std::uint16_t bits) {
  E value;
  value.bits = bits;
  return static_cast<double>(static_cast<float>(value));
}

// How many of the scores are wrong. Six heads: by the mean of attention, by the largest, by sums and by the largest of
// them, one that has other norms, and one that has no candidate.
template <Element E, int HeadDim>
void check(const Case& c) {
  CAPTURE(HeadDim);
  CAPTURE(c.rows);
  CAPTURE(c.outputs);
  CAPTURE(c.group);
  CAPTURE(c.blocks);
  test::Random random{c.seed};
  constexpr int kv_heads = 6, evicted = 7;
  const auto state = std::make_unique<LayerState>(LayerState{c.rows + evicted, c.rows + evicted});
  std::vector<CompressionSettings> how(kv_heads, {.ranking = Ranking::attention,
                                                  .kept_rows = 3,
                                                  .budget = 9,
                                                  .weighs_values = true,
                                                  .value_norm = ValueNorm::output_l1});
  how[1].votes = how[3].votes = Votes::largest;
  how[2].ranking = how[3].ranking = Ranking::accumulated;
  how[2].kept_rows = 0;
  how[4].value_norm = ValueNorm::value_l2;
  how[5].kept_rows = c.rows;

  const int q_heads = kv_heads * c.group;
  // Rows of weights lie apart, and what is between them is nobody's business.
  constexpr int head_stride = HeadDim + 8;
  const int token_stride = q_heads * head_stride + 16;
  std::vector<std::uint16_t> weights(static_cast<std::size_t>(c.outputs * token_stride), E{nan}.bits);
  for (int o = 0; o < c.outputs; ++o) {
    for (int h = 0; h < q_heads; ++h) {
      for (int d = 0; d < HeadDim; ++d) {
        // Heads whose weights differ in size, so that a wrong head's would be seen.
        const float size = 0.05F * static_cast<float>(1 + h % 5);
        weights[static_cast<std::size_t>(o * token_stride + h * head_stride + d)] =
            E{size * test::normal(random)}.bits;
      }
    }
  }
  std::vector<std::unique_ptr<test::DeviceHead<E>>> heads;
  std::vector<HeadView> views;
  const long long pitch = c.rows + 5;
  std::vector<float> scores(static_cast<std::size_t>(kv_heads * pitch), untouched);
  std::vector<float> of_query_heads(static_cast<std::size_t>(q_heads * pitch), untouched);
  std::vector<double> sums(static_cast<std::size_t>(c.rows));
  const std::vector<float> odd{0.0F, most, nan, 1.0F};
  for (double& sum : sums) sum = std::abs(static_cast<double>(test::normal(random)));
  for (int h = 0; h < kv_heads; ++h) {
    for (int r = 0; r < c.rows; ++r) {
      const float score = r % 7 == 3 ? test::one_of(random, odd) : std::abs(test::normal(random));
      scores[static_cast<std::size_t>(h * pitch + r)] = score;
      for (int g = 0; g < c.group; ++g) {
        of_query_heads[static_cast<std::size_t>((h * c.group + g) * pitch + r)] =
            std::isnan(score) ? nan : std::abs(test::normal(random));
      }
    }
    HeadView view = c.view;
    view.evicted = evicted;
    heads.push_back(std::make_unique<test::DeviceHead<E>>(view, HeadDim, c.page_rows, c.rows));
    std::vector<float> numbers(static_cast<std::size_t>(c.rows) * HeadDim);
    for (float& x : numbers) x = test::normal(random);
    heads.back()->store(numbers, numbers, *state);
    views.push_back(heads.back()->view());
    views.back().sums =
        how[static_cast<std::size_t>(h)].ranking == Ranking::accumulated ? sums.data() : nullptr;
    for (int r = 0; r < c.rows; ++r) {  // keys are nobody's business
      if (r >= views.back().packed_end(state->committed)) {
        test::forbid(heads.back()->exact(Side::keys, r), HeadDim);
      }
    }
  }
  std::vector<float> weighed(scores.size(), untouched);
  test::launch(weigh_outputs_kernel<E, HeadDim>, c.blocks, kv_heads, weigh_outputs_threads,
               weigh_outputs_shared_bytes<HeadDim>(),
               {.rows = {.heads = views.data(),
                         .state = state.get(),
                         .compressions = how.data(),
                         .page_rows = c.page_rows,
                         .scores = scores.data(),
                         .weighed = weighed.data(),
                         .pitch = pitch},
                .group = c.group,
                .of_query_heads = of_query_heads.data(),
                .weights = {.data = reinterpret_cast<std::byte*>(weights.data()),
                            .token_stride = token_stride,
                            .head_stride = head_stride},
                .outputs = c.outputs});

  // A product is a sum of HeadDim floats, and 16 of these are added up in float. What tensor cores leave out of a sum
  // is of the size of what a float's rounding does. The second part of a quantised value is rounded to E.
  const bool is_packed = c.view.is_packed();
  const double of_sums = (HeadDim + 24) * 0x1p-23;
  const double of_split = !is_packed ? 0.0 : std::is_same_v<E, float16> ? 0x1p-21 : 0x1p-17;
  const double of_small =
      is_packed && std::is_same_v<E, float16> ? 0x1p-24 : 0.0;  // a half has no smaller steps
  int wrong = 0;
  for (int h = 0; h < kv_heads; ++h) {
    const CompressionSettings& own = how[static_cast<std::size_t>(h)];
    const bool accumulated = own.ranking == Ranking::accumulated;
    const int candidates = own.weighs_outputs() ? std::max(0, c.rows - own.kept_rows) : 0;
    for (int r = 0; r < pitch; ++r) {
      const auto at = static_cast<std::size_t>(h * pitch + r);
      if (r >= candidates) {
        if (weighed[at] != untouched) ++wrong;
        continue;
      }
      const float score = accumulated ? static_cast<float>(sums[static_cast<std::size_t>(r)]) : scores[at];
      if (!(score < most)) {
        if (!(std::isnan(score) ? std::isnan(weighed[at]) : weighed[at] == score)) ++wrong;
        continue;
      }
      const auto value = heads[static_cast<std::size_t>(h)]->row(Side::values, r, *state);
      double expected = 0.0, slack = 0.0;
      for (int g = 0; g < c.group; ++g) {
        const int q_head = h * c.group + g;
        double norm = 0.0, off = 0.0;
        for (int o = 0; o < c.outputs; ++o) {
          double product = 0.0;
          for (int d = 0; d < HeadDim; ++d) {
            const double weight =
                number<E>(weights[static_cast<std::size_t>(o * token_stride + q_head * head_stride + d)]);
            const auto x = static_cast<double>(value[static_cast<std::size_t>(d)]);
            product += weight * x;
            off += std::abs(weight) * ((of_sums + of_split) * std::abs(x) + of_small);
          }
          norm += std::abs(product);
        }
        const double factor =
            accumulated ? static_cast<double>(score)
                        : static_cast<double>(of_query_heads[static_cast<std::size_t>(q_head * pitch + r)]);
        if (own.votes == Votes::largest) {
          expected = std::max(expected, norm * factor);
          slack = std::max(slack, off * factor);
        } else {
          expected += norm * factor / c.group;
          slack += off * factor / c.group;
        }
      }
      const double difference = std::abs(static_cast<double>(weighed[at]) - expected);
      if (!(difference <= slack + 0x1p-22 * expected)) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("scores are multiplied by the norms of what values become in the output projection") {
  for (const int rows : {0, 1, 2, 31, 33, 63, 65}) check<float16, 64>({.rows = rows, .group = 1 + rows % 3});
  for (const int outputs : {1, 8, 63, 64, 65, 129}) check<bfloat16, 64>({.rows = 40, .outputs = outputs});
  // More rows than a block has, and a row more.
  check<float16, 64>({.rows = 256 + 4, .outputs = 9, .group = 1, .blocks = 1});
  check<float16, 80>({.rows = 67, .outputs = 70, .group = 3});
  check<bfloat16, 96>({.rows = 67, .page_rows = 128});
  check<bfloat16, 128>({.rows = 130, .group = 4, .blocks = 3});
  check<float16, 256>({.rows = 150, .outputs = 66, .blocks = 1});
}

TEST_CASE("the norms of what quantised values become in the output projection") {
  std::uint64_t seed = 9;
  for (const test::Codes& codes : test::all_codes) {
    CAPTURE(test::name_of(codes));
    Case c{.group = 1, .blocks = 1};
    codes.describe(c.view);
    c.view.key_group = c.view.value_group = 32;
    c.view.key_hadamard = c.view.value_hadamard = seed % 2 == 0;
    c.view.residual = 20;
    c.rows = 150;  // 128 of them have codes
    c.seed = ++seed;
    check<float16, 64>(c);
    c.view.residual = 0;
    c.rows = 64;
    check<bfloat16, 128>(c);
  }
}
