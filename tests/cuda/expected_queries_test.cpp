// SPDX-License-Identifier: Apache-2.0
//
// Rows that are scored by the attention that queries to come can be expected to pay (Expected Attention): the kernels
// against the definition in double, with the whole covariance matrix.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/cuda/kernels/expected_queries.cuh>

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
constexpr float most = std::numeric_limits<float>::max();
using Row = oracle::Numbers;

struct Case {
  int rows = 100;  // stored
  int evicted = 0;
  int kept = 0;
  int first_rows = 0;
  int queries = 8;
  int known = 1000;
  int future = 20;
  int group = 1;
  int blocks = 1;
  int page_rows = 64;
  double theta = 10000.0;
  double scale = 0.125;
  float deviation = 1.0F;  // of the queries
  HeadView view = {};
};

// The largest error of a score, in parts of the largest score.
template <Element E, int HeadDim>
double check(const Case& c) {
  CAPTURE(HeadDim);
  CAPTURE(c.rows);
  CAPTURE(c.queries);
  CAPTURE(c.group);
  test::Random random{static_cast<std::uint64_t>(c.rows * 16 + c.queries)};
  const int tokens = c.rows + c.evicted;
  const auto state = std::make_unique<LayerState>(LayerState{tokens, tokens});
  // Others are ranked by something else, expect something else, or ask nobody.
  const CompressionSettings own{.ranking = Ranking::expected,
                                .scorer = 1,
                                .queries = c.queries,
                                .kept_rows = c.kept,
                                .first_rows = c.first_rows,
                                .budget = 9,
                                .weighs_values = c.queries % 2 == 0,
                                .value_norm = ValueNorm::output_l1};
  std::vector<CompressionSettings> how(4, own);
  how[0].ranking = Ranking::attention;
  how[1].scorer = 0;
  how[2].queries = 0;
  constexpr int head = 3;
  const int kv_heads = static_cast<int>(how.size()), q_heads = kv_heads * c.group;
  std::vector<std::unique_ptr<test::DeviceHead<E>>> heads;
  std::vector<HeadView> views;
  for (int h = 0; h < kv_heads; ++h) {
    HeadView view = c.view;
    view.evicted = c.evicted;
    heads.push_back(std::make_unique<test::DeviceHead<E>>(view, HeadDim, c.page_rows, c.rows));
    std::vector<float> numbers(static_cast<std::size_t>(c.rows) * HeadDim);
    for (float& x : numbers) x = test::normal(random);
    heads.back()->store(numbers, numbers, *state);
    views.push_back(heads.back()->view());
    for (int r = 0; r < c.rows; ++r) {
      if (r >= views.back().packed_end(tokens)) test::forbid(heads.back()->exact(Side::values, r), HeadDim);
    }
    for (int r = c.rows; r % c.page_rows != 0; ++r) test::forbid(heads.back()->exact(Side::keys, r), HeadDim);
  }
  // The ring holds a few queries more than are asked, and NaN where none is known.
  const int slots = c.queries + 3;
  const int first_query = std::max({0, tokens - c.known, tokens - slots});
  std::vector<std::uint16_t> ring(static_cast<std::size_t>(slots * q_heads * HeadDim), 0xffff);
  std::vector<std::vector<Row>> queries(static_cast<std::size_t>(q_heads));
  for (int p = first_query; p < tokens; ++p) {
    for (int h = 0; h < q_heads; ++h) {
      Row row;
      for (int d = 0; d < HeadDim; ++d) {
        E number{c.deviation * test::normal(random) + 0.3F};
        ring[static_cast<std::size_t>((p % slots * q_heads + h) * HeadDim + d)] = number.bits;
        row.push_back(static_cast<double>(static_cast<float>(number)));
      }
      if (p >= tokens - c.queries) queries[static_cast<std::size_t>(h)].push_back(row);
    }
  }
  const RotaryConfig rotary{.theta = c.theta};
  const std::vector<float> frequencies = inverse_frequencies(rotary, HeadDim);
  const int columns = expected_columns(c.queries + 9);  // another head asks more
  const long long pitch = c.rows + 2;
  std::vector<float> moments(static_cast<std::size_t>(q_heads * HeadDim * columns), NAN);
  std::vector<double> logits(static_cast<std::size_t>(q_heads * pitch), NAN);
  std::vector<float> scores(static_cast<std::size_t>(kv_heads * pitch), untouched), unpooled = scores;
  std::vector<float> of_query_heads(static_cast<std::size_t>(q_heads * pitch), untouched);
  const ExpectedQueriesParams params{.heads = views.data(),
                                     .state = state.get(),
                                     .compressions = how.data(),
                                     .setting = 1,
                                     .group = c.group,
                                     .page_rows = c.page_rows,
                                     .q = {.data = reinterpret_cast<std::byte*>(ring.data()),
                                           .token_stride = q_heads * HeadDim,
                                           .head_stride = HeadDim},
                                     .query_slots = slots,
                                     .first_query = first_query,
                                     .future = c.future,
                                     .inverse_frequencies = frequencies.data(),
                                     .scale = c.scale,
                                     .columns = columns,
                                     .moments = moments.data(),
                                     .logits = logits.data(),
                                     .scores = scores.data(),
                                     .unpooled = unpooled.data(),
                                     .of_query_heads = of_query_heads.data(),
                                     .pitch = pitch};
  test::launch(expect_queries_kernel<E, HeadDim>, c.group, kv_heads, expected_threads, 0, params);
  test::launch(expect_logits_kernel<E, HeadDim>, c.blocks, kv_heads, expected_threads,
               expect_logits_shared_bytes<HeadDim>(), params);
  test::launch(expect_scores_kernel<128>, kv_heads, 1, 128, expect_scores_shared_bytes(), params);

  const int candidates = std::max(c.rows - c.kept, 0);
  int touched = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const auto at = static_cast<int>(i);
    if (at / pitch == head && at % pitch < candidates) continue;
    touched += scores[i] == untouched && unpooled[i] == untouched ? 0 : 1;
  }
  CHECK(touched == 0);
  std::vector<Row> keys;
  for (int r = 0; r < c.rows; ++r) {
    const auto key = heads[head]->row(Side::keys, r, *state);
    keys.emplace_back(key.begin(), key.end());
  }
  std::vector<double> expected(static_cast<std::size_t>(c.rows), 0.0);
  std::vector<std::vector<double>> of_members;
  for (int g = 0; g < c.group; ++g) {
    const auto& of_head = queries[static_cast<std::size_t>(head * c.group + g)];
    const auto shares =
        oracle::expected_shares(of_head, keys, tokens, static_cast<std::size_t>(c.future), c.theta, c.scale);
    for (std::size_t r = 0; r < shares.size(); ++r) expected[r] += shares[r] / c.group;
    of_members.push_back(shares);
  }
  const double largest = *std::max_element(expected.begin(), expected.end());
  double error = 0;
  int wrong_first = 0;
  for (int r = 0; r < candidates; ++r) {
    const auto at = static_cast<std::size_t>(head * pitch + r);
    const double truth = expected[static_cast<std::size_t>(r)];
    if (r < c.first_rows) {
      wrong_first += scores[at] == most ? 0 : 1;
    } else {
      const double off = std::abs(static_cast<double>(scores[at]) - truth);
      error = off <= error ? error : off;  // written so that NaN stays
    }
    const double off = std::abs(static_cast<double>(unpooled[at]) - truth * c.group) / c.group;
    error = off <= error ? error : off;
  }
  CHECK(wrong_first == 0);
  // Each query head's by itself, where they are asked for.
  for (int i = 0; i < q_heads * pitch; ++i) {
    const float share = of_query_heads[static_cast<std::size_t>(i)];
    const int g = static_cast<int>(i / pitch) - head * c.group, r = static_cast<int>(i % pitch);
    if (!own.weighs_outputs() || g < 0 || g >= c.group || r >= candidates) {
      REQUIRE(share == untouched);
      continue;
    }
    const double truth = of_members[static_cast<std::size_t>(g)][static_cast<std::size_t>(r)];
    const double off = std::abs(static_cast<double>(share) - truth) / c.group;
    error = off <= error ? error : off;
  }
  // A logit in float is off by about 2^-22 of its size, and so is a probability.
  CHECK(error <= (c.deviation > 2 ? 5e-5 : 5e-6) * largest);
  return error / largest;
}

template <Element E, int HeadDim>
void check_breadth() {
  for (const int rows : {1, 2, 31, 32, 33, 64, 65, 130}) {
    check<E, HeadDim>({.rows = rows, .kept = rows % 4, .first_rows = rows % 5, .blocks = 1 + rows % 3});
  }
  for (const int queries : {1, 2, 7, 8, 9, 64}) {
    check<E, HeadDim>({.rows = 80, .queries = queries, .group = 3, .blocks = 2});
  }
}

}  // namespace

TEST_CASE("expected attention: every head size") {
  check_breadth<float16, 64>();
  check_breadth<bfloat16, 80>();
  check_breadth<float16, 96>();
  check_breadth<bfloat16, 128>();
  check<float16, 256>({.rows = 70, .queries = 20, .group = 2, .blocks = 2});
}

TEST_CASE("expected attention: few queries are known, one position to come, large logits, rows that went") {
  check<float16, 64>({.rows = 100, .queries = 16, .known = 3, .group = 2});
  check<float16, 64>({.rows = 9, .queries = 16, .group = 2});  // a text of fewer tokens
  check<float16, 64>({.rows = 100, .evicted = 5000, .future = 1, .group = 2, .blocks = 4});
  check<bfloat16, 64>({.rows = 60, .evicted = 40, .future = 700, .page_rows = 128, .theta = 500.0});
  MESSAGE("error / largest score: " << check<float16, 128>(
              {.rows = 100, .queries = 30, .group = 2, .scale = 0.2, .deviation = 4.0F}));
}

TEST_CASE("expected attention: quantised keys count as they read") {
  for (const test::Codes& codes : test::all_codes) {
    CAPTURE(test::name_of(codes));
    for (const bool rotated_keys : {false, true}) {
      Case c{.rows = 200, .evicted = 30, .kept = 3, .group = 2, .blocks = 2};
      codes.describe(c.view);
      c.view.key_group = c.view.value_group = 32;
      c.view.key_hadamard = c.view.value_hadamard = rotated_keys;
      c.view.residual = 20;
      check<float16, 64>(c);
      c.rows = 128;
      c.view.residual = 0;
      check<bfloat16, 128>(c);
    }
  }
}
