// SPDX-License-Identifier: Apache-2.0
//
// Rows that are scored by how their keys differ from what all keys have in common (KeyDiff): the kernels against
// cosines in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/key_directions.cuh>

#include "cuda/support/codes.hpp"
#include "cuda/support/device_head.hpp"
#include "cuda/support/forbid.hpp"
#include "cuda/support/launch.hpp"
#include "support/question_free_oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using test::Side;

namespace {

constexpr float untouched = -12345.0F;

enum class Keys { any, some_zeros, all_zeros, opposite };

float number_of(Keys keys, test::Random& random, int row, int channel) {
  if (keys == Keys::all_zeros || (keys == Keys::some_zeros && row % 4 == 1)) return 0.0F;
  if (keys == Keys::opposite) return (row % 2 == 0 ? 1.0F : -1.0F) * static_cast<float>(channel % 3);
  return test::normal(random) + 0.5F;
}

template <Element E, int HeadDim>
void check(const HeadView& described, int rows, int kept, int blocks, int page_rows, Keys kind = Keys::any) {
  CAPTURE(HeadDim);
  CAPTURE(rows);
  CAPTURE(blocks);
  test::Random random{static_cast<std::uint64_t>(rows * 8 + blocks)};
  const auto state = std::make_unique<LayerState>(LayerState{rows + 5, rows + 5});
  // The second head is ranked by something else.
  std::vector<CompressionSettings> how{{.ranking = Ranking::key_directions, .kept_rows = kept, .budget = 9},
                                       {.ranking = Ranking::keys, .kept_rows = kept, .budget = 9},
                                       {.ranking = Ranking::key_directions, .kept_rows = 0, .budget = 9}};
  std::vector<std::unique_ptr<test::DeviceHead<E>>> heads;
  std::vector<HeadView> views;
  for (std::size_t h = 0; h < how.size(); ++h) {
    HeadView view = described;
    view.evicted = 5;
    heads.push_back(std::make_unique<test::DeviceHead<E>>(view, HeadDim, page_rows, rows));
    std::vector<float> numbers;
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < HeadDim; ++c) numbers.push_back(number_of(kind, random, r, c));
    }
    heads.back()->store(numbers, numbers, *state);
    views.push_back(heads.back()->view());
    for (int r = 0; r < rows; ++r) {  // values are nobody's business
      if (r >= views.back().packed_end(state->committed)) {
        test::forbid(heads.back()->exact(Side::values, r), HeadDim);
      }
    }
    for (int r = rows; r % page_rows != 0; ++r) test::forbid(heads.back()->exact(Side::keys, r), HeadDim);
  }
  const long long pitch = rows + 3;
  std::vector<double> sums(how.size() * static_cast<std::size_t>(blocks) * HeadDim,
                           std::numeric_limits<double>::quiet_NaN());
  std::vector<float> scores(how.size() * static_cast<std::size_t>(pitch), untouched);
  const KeyDirectionsParams params{.heads = views.data(),
                                   .state = state.get(),
                                   .compressions = how.data(),
                                   .page_rows = page_rows,
                                   .sums = sums.data(),
                                   .scores = scores.data(),
                                   .pitch = pitch};
  const auto count = static_cast<int>(how.size());
  test::launch(sum_directions_kernel<E, HeadDim>, blocks, count, directions_threads,
               sum_directions_shared_bytes<HeadDim>(), params);
  test::launch(score_directions_kernel<E, HeadDim>, blocks, count, directions_threads,
               score_directions_shared_bytes<HeadDim>(), params);
  double error = 0;
  int touched = 0;
  for (int h = 0; h < count; ++h) {
    const int candidates = h == 0 ? std::max(rows - kept, 0) : h == 1 ? 0 : rows;
    std::vector<std::vector<double>> keys;
    for (int r = 0; r < rows; ++r) {
      const auto key = heads[static_cast<std::size_t>(h)]->row(Side::keys, r, *state);
      keys.emplace_back(key.begin(), key.end());
    }
    const std::vector<double> expected = oracle::key_differences(keys);
    for (int r = 0; r < pitch; ++r) {
      const float score = scores[static_cast<std::size_t>(h * pitch + r)];
      if (r >= candidates) {
        touched += score == untouched ? 0 : 1;
        continue;
      }
      const double off = std::abs(static_cast<double>(score) - expected[static_cast<std::size_t>(r)]);
      error = off <= error ? error : off;  // written so that NaN stays
    }
  }
  CHECK(touched == 0);
  CHECK(error <= 1e-7);
}

template <Element E, int HeadDim>
void check_exact() {
  for (const int rows : {0, 1, 2, 31, 32, 33, 63, 64, 65, 300}) {
    check<E, HeadDim>({}, rows, 3, 1 + rows % 4, 64);
  }
  check<E, HeadDim>({}, 200, 0, 9, 128);
}

}  // namespace

TEST_CASE("rows are scored by how their keys differ from the mean direction") {
  check_exact<float16, 64>();
  check_exact<float16, 80>();
  check_exact<bfloat16, 96>();
  check_exact<bfloat16, 128>();
  check_exact<float16, 256>();
}

TEST_CASE("keys without a length, keys that add up to nothing") {
  for (const Keys kind : {Keys::some_zeros, Keys::all_zeros, Keys::opposite}) {
    check<float16, 64>({}, 100, 4, 3, 64, kind);
    check<bfloat16, 128>({}, 64, 0, 2, 64, kind);
  }
}

TEST_CASE("quantised keys are scored as they read") {
  for (const test::Codes& codes : test::all_codes) {
    CAPTURE(test::name_of(codes));
    for (const bool rotated : {false, true}) {
      HeadView view;
      codes.describe(view);
      view.key_group = view.value_group = 32;
      view.key_hadamard = view.value_hadamard = rotated;
      view.residual = 20;
      check<float16, 64>(view, 300, 3, 2, 64);
      view.residual = 0;
      check<bfloat16, 128>(view, 128, 0, 3, 128);
    }
  }
}
