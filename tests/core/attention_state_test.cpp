// SPDX-License-Identifier: Apache-2.0
//
// The laws of merging: partial results merge in any order and grouping to the whole result, and an
// empty one changes nothing.
#include <doctest/doctest.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include <kvpolicy/core/attention_state.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using kvpolicy::SoftmaxState;
using test::largest_difference;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

struct Part {
  SoftmaxState state;
  std::vector<float> values = std::vector<float>(4, 0.0F);

  void add(float logit, const std::vector<float>& row) { accumulate(state, values, logit, row); }
  void add(const Part& part) { merge(state, values, part.state, part.values); }
  [[nodiscard]] std::vector<float> output() const {
    std::vector<float> out = values;
    normalize(state, out);
    return out;
  }
};

Part random_part(test::Random& random, std::size_t rows, float spread) {
  Part part;
  for (std::size_t i = 0; i < rows; ++i) {
    part.add(spread * test::normal(random), {test::normal(random), 1, test::normal(random), -2});
  }
  return part;
}

}  // namespace

TEST_CASE("merging an empty part changes nothing, on either side") {
  test::Random random{1};
  for (const std::size_t rows : std::initializer_list<std::size_t>{0, 1, 9}) {
    const Part part = random_part(random, rows, 3);
    Part left = part;
    left.add(Part{});
    Part right;
    right.add(part);
    for (const Part& same : {left, right}) {
      CHECK(same.state.max == part.state.max);
      CHECK(same.state.sum == part.state.sum);
      CHECK(test::same_bits(same.values, part.values));
    }
  }
  CHECK(Part{}.output() == std::vector<float>(4, 0.0F));
  CHECK(Part{}.state.log_sum_exp() == -inf);
}

TEST_CASE("merging is associative, commutative and equal to one pass, to rounding") {
  test::Random random{2};
  for (const float spread : {0.5F, 10.0F, 200.0F}) {
    for (int round = 0; round < 50; ++round) {
      const Part a = random_part(random, test::below(random, 5), spread);
      const Part b = random_part(random, test::below(random, 5), spread);
      const Part c = random_part(random, test::below(random, 5), spread);
      Part left = a;
      left.add(b);
      left.add(c);
      Part bc = b;
      bc.add(c);
      Part right = a;
      right.add(bc);
      Part turned = c;
      turned.add(b);
      turned.add(a);
      CHECK(largest_difference(left.output(), right.output()) <= 2e-6);
      CHECK(largest_difference(left.output(), turned.output()) <= 2e-6);
      const float lse = left.state.log_sum_exp();
      CHECK(largest_difference(std::vector{lse}, std::vector{turned.state.log_sum_exp()}) <=
            1e-6 * (1 + std::abs(lse)));
    }
  }
}

TEST_CASE("rows with distant logits neither overflow nor vanish") {
  Part part;
  part.add(-3e38F, {1, 1, 1, 1});
  CHECK(part.output() == std::vector<float>(4, 1.0F));
  part.add(3e38F, {2, 2, 2, 2});
  CHECK(part.output() == std::vector<float>(4, 2.0F));
  part.add(-inf, {9, 9, 9, 9});
  CHECK(part.output() == std::vector<float>(4, 2.0F));
}

TEST_CASE("NaN stays NaN") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  Part part;
  part.add(nan, {1, 1, 1, 1});
  CHECK(std::isnan(part.output()[0]));
  CHECK(std::isnan(part.state.log_sum_exp()));
  Part whole;
  whole.add(1.0F, {1, 1, 1, 1});
  whole.add(part);
  CHECK(std::isnan(whole.output()[0]));
}

TEST_CASE("a sink is a part with a weight and no value") {
  Part sink;
  sink.state = {std::log(3.0F), 1.0F};
  Part rows;
  rows.add(0.0F, {4, 8, 12, 16});
  rows.add(sink);
  CHECK(largest_difference(rows.output(), std::vector<float>{1, 2, 3, 4}) <= 1e-6);
  Part none;
  none.state = {-inf, 1.0F};  // a sink without weight
  none.add(2.0F, {4, 8, 12, 16});
  CHECK(largest_difference(none.output(), std::vector<float>{4, 8, 12, 16}) <= 1e-6);
}

TEST_CASE("outputs merge by their log-sum-exps") {
  test::Random random{3};
  for (int round = 0; round < 50; ++round) {
    const Part a = random_part(random, test::below(random, 4), 5);
    const Part b = random_part(random, test::below(random, 4), 5);
    Part both = a;
    both.add(b);
    auto out = a.output();
    const float lse = kvpolicy::merge_outputs(out, a.state.log_sum_exp(), b.output(), b.state.log_sum_exp());
    CHECK(largest_difference(out, both.output()) <= 2e-6);
    CHECK(largest_difference(std::vector{lse}, std::vector{both.state.log_sum_exp()}) <= 1e-5);
  }
}
