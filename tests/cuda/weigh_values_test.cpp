// SPDX-License-Identifier: Apache-2.0
//
// Scores that are multiplied by the lengths of values, against sums in double over numbers that are read one by one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/weigh_values.cuh>

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
constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// The same number, or NaN both.
bool is_same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Five heads: by attention, by sums, without weights, one that has no candidate, and one that has other norms.
template <Element E, int HeadDim>
void check(const HeadView& described, int rows, int blocks, int page_rows, std::uint64_t seed) {
  CAPTURE(HeadDim);
  CAPTURE(rows);
  CAPTURE(blocks);
  test::Random random{seed};
  const auto state = std::make_unique<LayerState>(LayerState{rows + 7, rows + 7});
  std::vector<CompressionSettings> how(5);
  how[0] = {.ranking = Ranking::attention, .kept_rows = 3, .budget = 9, .weighs_values = true};
  how[1] = {.ranking = Ranking::accumulated, .kept_rows = 0, .budget = 9, .weighs_values = true};
  how[2] = {.ranking = Ranking::attention, .kept_rows = 3, .budget = 9};
  how[3] = {.ranking = Ranking::attention, .kept_rows = rows + 1, .budget = 9, .weighs_values = true};
  how[4] = how[0];
  how[4].value_norm = ValueNorm::output_l1;
  std::vector<std::unique_ptr<test::DeviceHead<E>>> heads;
  std::vector<HeadView> views;
  const long long pitch = rows + 5;
  std::vector<float> scores(static_cast<std::size_t>(5 * pitch), untouched);
  std::vector<double> sums;
  const std::vector<float> odd{0.0F, most, inf, nan, 0.5F * most};
  for (int i = 0; i < rows; ++i) {
    scores[static_cast<std::size_t>(i)] = i % 3 == 2 ? test::one_of(random, odd) : test::normal(random);
    sums.push_back(i % 5 == 4 ? static_cast<double>(nan)
                              : std::abs(static_cast<double>(test::normal(random))));
  }
  const std::vector<float> before = scores;
  std::vector<float> weighed(scores.size(), untouched);
  for (int h = 0; h < 5; ++h) {
    HeadView view = described;
    view.evicted = 7;
    heads.push_back(std::make_unique<test::DeviceHead<E>>(view, HeadDim, page_rows, rows));
    std::vector<float> numbers(static_cast<std::size_t>(rows) * HeadDim);
    for (float& x : numbers) x = test::normal(random);
    heads.back()->store(numbers, numbers, *state);
    views.push_back(heads.back()->view());
    views.back().sums = h == 1 ? sums.data() : nullptr;
    for (int r = 0; r < rows; ++r) {  // keys are nobody's business
      if (r >= views.back().packed_end(state->committed)) {
        test::forbid(heads.back()->exact(Side::keys, r), HeadDim);
      }
    }
  }
  test::launch(weigh_values_kernel<E, HeadDim>, blocks, 5, weigh_values_threads, 0,
               {.heads = views.data(),
                .state = state.get(),
                .compressions = how.data(),
                .page_rows = page_rows,
                .scores = scores.data(),
                .weighed = weighed.data(),
                .pitch = pitch});
  CHECK(std::equal(scores.begin(), scores.end(), before.begin(), is_same));
  int wrong = 0;
  for (int h = 0; h < 5; ++h) {
    for (int r = 0; r < pitch; ++r) {
      const auto at = static_cast<std::size_t>(h * pitch + r);
      float expected = untouched;
      const int candidates = h == 0 ? rows - 3 : h == 1 ? rows : 0;
      if (r < candidates) {
        const float score = h == 1 ? static_cast<float>(sums[static_cast<std::size_t>(r)]) : before[at];
        double squares = 0;
        for (const float x : heads[static_cast<std::size_t>(h)]->row(Side::values, r, *state)) {
          squares += static_cast<double>(x) * static_cast<double>(x);
        }
        expected = score;
        if (!(score >= most)) {
          const double product = static_cast<double>(score) * std::sqrt(squares);
          expected = product > static_cast<double>(most) ? most : static_cast<float>(product);
        }
      }
      // A rotated row's sum may come out in another order.
      const bool near =
          described.value_hadamard && std::abs(weighed[at] - expected) <= 1e-5F * std::abs(expected);
      if (!is_same(weighed[at], expected) && !near) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

template <Element E, int HeadDim>
void check_exact() {
  for (const int rows : {0, 1, 2, 63, 64, 65, 300}) check<E, HeadDim>({}, rows, 1 + rows % 3, 64, 3);
  check<E, HeadDim>({}, 200, 5, 128, 4);
}

}  // namespace

TEST_CASE("scores are multiplied by the lengths of values") {
  check_exact<float16, 64>();
  check_exact<float16, 80>();
  check_exact<bfloat16, 96>();
  check_exact<bfloat16, 128>();
  check_exact<float16, 256>();
}

TEST_CASE("scores are multiplied by the lengths of quantised values") {
  std::uint64_t seed = 9;
  for (const test::Codes& codes : test::all_codes) {
    CAPTURE(test::name_of(codes));
    for (const bool rotated : {false, true}) {
      HeadView view;
      codes.describe(view);
      view.key_group = view.value_group = 32;
      view.key_hadamard = view.value_hadamard = rotated;
      view.residual = 20;
      check<float16, 64>(view, 300, 2, 64, ++seed);
      view.residual = 0;
      check<bfloat16, 128>(view, 128, 1, 128, ++seed);
    }
  }
}
