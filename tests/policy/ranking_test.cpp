// SPDX-License-Identifier: Apache-2.0
//
// The ranking of rows and chunks: top_rows, SnapKV's scorer, chunk summaries.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <kvpolicy/policy/chunk_summary.hpp>
#include <kvpolicy/policy/snapkv_scorer.hpp>
#include <kvpolicy/policy/top_rows.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using Rows = std::vector<std::size_t>;

namespace {
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float inf = std::numeric_limits<float>::infinity();

Rows top(std::vector<float> scores, std::size_t count) { return top_rows(scores, count); }
}  // namespace

TEST_CASE("top_rows: ties go to the lower index, NaN comes last") {
  CHECK(top({1, 3, 2}, 2) == Rows{1, 2});
  CHECK(top({1, 1, 1, 1}, 2) == Rows{0, 1});
  CHECK(top({0, 5, 5, 5, 9}, 3) == Rows{1, 2, 4});
  CHECK(top({1, 2}, 5) == Rows{0, 1});
  CHECK(top({1, 2}, 0) == Rows{});
  CHECK(top({}, 3) == Rows{});
  CHECK(top({not_a_number, -inf, not_a_number, -3}, 2) == Rows{1, 3});
  CHECK(top({not_a_number, not_a_number, not_a_number}, 2) == Rows{0, 1});
  CHECK(top({not_a_number, 1, inf, not_a_number}, 3) == Rows{0, 1, 2});
  CHECK(top({-0.0F, 0.0F, -0.0F}, 1) == Rows{0});
}

TEST_CASE("top_rows equals sorting") {
  test::Random random{1};
  for (int round = 0; round < 300; ++round) {
    std::vector<float> scores(test::below(random, 40));
    for (float& s : scores) s = static_cast<float>(test::below(random, 6));  // many ties
    const std::size_t count = test::below(random, 45);
    Rows order;
    for (std::size_t i = 0; i < scores.size(); ++i) order.push_back(i);
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
    order.resize(std::min(count, order.size()));
    std::ranges::sort(order);
    CHECK(top_rows(scores, count) == order);
  }
}

TEST_CASE("top_ranks: a second score decides between equal ones, then the lower index") {
  test::Random random{2};
  for (int round = 0; round < 300; ++round) {
    std::vector<float> scores(test::below(random, 40)), second(scores.size());
    std::vector<std::uint64_t> ranks;
    Rows order;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      scores[i] = static_cast<float>(test::below(random, 4)) - 1.5F;
      second[i] = test::below(random, 3) == 0 ? 0.5F : test::normal(random) * 1e-4F;
      ranks.push_back(rank_of(scores[i], second[i]));
      order.push_back(i);
    }
    const std::size_t count = test::below(random, 45);
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : second[a] > second[b];
    });
    order.resize(std::min(count, order.size()));
    std::ranges::sort(order);
    CHECK(top_ranks<std::uint64_t>(ranks, count) == order);
  }
  CHECK(rank_of(not_a_number, inf) < rank_of(-inf, not_a_number));
  CHECK(rank_of(0.0F, 1.0F) == rank_of(-0.0F, 1.0F));
}

TEST_CASE("SnapKV's scores by hand") {
  // Two query heads, five rows of which three are candidates; two queries.
  const std::vector<float> sums{0.2F, 0.6F, 0.4F, 5, 9, /**/ 1.0F, 0.0F, 0.2F, 7, 8};
  std::vector<float> out(3);
  SnapKvScorer::score({.kernel = 1}, sums, 2, 2, out);
  CHECK(test::largest_difference(out, std::vector<float>{0.3F, 0.15F, 0.15F}) < 1e-6);
  SnapKvScorer::score({.kernel = 3}, sums, 2, 2, out);
  CHECK(test::largest_difference(out, std::vector<float>{0.4F, 0.4F, 0.2F}) < 1e-6);
  SnapKvScorer::score({.pooling = Pooling::average, .kernel = 3}, sums, 2, 2, out);
  CHECK(test::largest_difference(out, std::vector<float>{1.8F / 12, 2.4F / 12, 1.2F / 12}) < 1e-6);
  SnapKvScorer::score({.kernel = 101}, sums, 2, 2, out);
  CHECK(test::largest_difference(out, std::vector<float>{0.4F, 0.4F, 0.4F}) < 1e-6);
  SnapKvScorer::score({}, sums, 2, 2, {});
}

namespace {

template <Element E>
void check_bounds() {
  test::Random random{2};
  MinMaxKey bounds{64};
  std::vector<std::vector<float>> keys;
  for (int i = 0; i < 9; ++i) {
    std::vector<float> key(64);
    for (float& x : key) x = std::ldexp(test::normal(random), static_cast<int>(test::below(random, 30)) - 20);
    key[3] = 1e-30F;  // less than half's smallest number, on either side of zero
    key[4] = -1e-30F;
    for (float& x : key) x = static_cast<float>(E{x});  // as a cache keeps it
    bounds.add(key);
    keys.push_back(key);
  }
  std::vector<float> low(64), high(64);
  bounds.finish(0, low);
  bounds.finish(1, high);
  int wrong = 0;
  for (std::size_t c = 0; c < 64; ++c) {
    float min = inf, max = -inf;
    for (const auto& key : keys) min = std::min(min, key[c]), max = std::max(max, key[c]);
    wrong += low[c] == min && high[c] == max ? 0 : 1;
    // Stored summaries are exact in the element type.
    wrong += static_cast<float>(E{low[c]}) == low[c] && static_cast<float>(E{high[c]}) == high[c] ? 0 : 1;
  }
  CHECK(wrong == 0);
  // The score bounds every logit.
  std::vector<float> query(64), positive(64, 0.0F), negative(64, 0.0F);
  for (float& x : query) x = test::normal(random);
  MinMaxKey::split(0, query, negative);
  MinMaxKey::split(1, query, positive);
  double score = 0;
  for (std::size_t c = 0; c < 64; ++c) {
    CHECK(positive[c] + negative[c] == query[c]);
    score += static_cast<double>(negative[c]) * static_cast<double>(low[c]) +
             static_cast<double>(positive[c]) * static_cast<double>(high[c]);
  }
  for (const auto& key : keys) {
    double logit = 0;
    for (std::size_t c = 0; c < 64; ++c) logit += static_cast<double>(query[c]) * static_cast<double>(key[c]);
    CHECK(logit <= score);
  }
  bounds.clear();
  bounds.add(keys[1]);
  bounds.finish(0, low);
  bounds.finish(1, high);
  CHECK(test::same_bits(low, keys[1]));
  CHECK(test::same_bits(high, keys[1]));
}

}  // namespace

TEST_CASE("smallest and largest keys bound every logit, in every element type") {
  check_bounds<float>();
  check_bounds<float16>();
  check_bounds<bfloat16>();
}

TEST_CASE("mean keys") {
  MeanKey mean{2};
  std::vector<float> out(2);
  mean.add(std::vector<float>{1, 2});
  mean.add(std::vector<float>{3, -4});
  mean.finish(0, out);
  CHECK(out == std::vector<float>{2, -1});
  mean.clear();
  mean.add(std::vector<float>{5, 6});
  mean.finish(0, out);
  CHECK(out == std::vector<float>{5, 6});
  MeanKey::split(0, std::vector<float>{1, 1}, out);
  CHECK(out == std::vector<float>{6, 7});
}
