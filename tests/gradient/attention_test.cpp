// SPDX-License-Identifier: Apache-2.0
//
// Compares attention in blocks with loops in double over the rows that each query sees, and its backward pass
// with central differences of those loops.
#include <reference_model/gradient/attention.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

#include "gradient/finite_difference.hpp"

namespace kvpolicy::reference::attention_test {
namespace {

struct Shape {
  std::size_t tokens, q_heads, kv_heads, head_dim;
};

/// One query's row of attention, computed from the definition.
Doubles attend(const Shape& s, const Doubles& q, const Doubles& k, const Doubles& v,
               const AttentionMask& mask, std::size_t token, std::size_t head) {
  const std::size_t kv_head = head / (s.q_heads / s.kv_heads);
  std::vector<std::size_t> seen;
  for (std::size_t row = 0; row <= token; ++row) {
    if (row < mask.sinks || token - row < mask.recent) seen.push_back(row);
  }
  Doubles scores;
  for (const std::size_t row : seen) {
    double product = 0.0;
    for (std::size_t i = 0; i < s.head_dim; ++i) {
      product +=
          q[(token * s.q_heads + head) * s.head_dim + i] * k[(row * s.kv_heads + kv_head) * s.head_dim + i];
    }
    scores.push_back(product / std::sqrt(static_cast<double>(s.head_dim)));
  }
  const double highest = *std::ranges::max_element(scores);
  double sum = 0.0;
  for (double& score : scores) sum += score = std::exp(score - highest);
  Doubles out(s.head_dim);
  for (std::size_t n = 0; n < seen.size(); ++n) {
    for (std::size_t i = 0; i < s.head_dim; ++i) {
      out[i] += scores[n] / sum * v[(seen[n] * s.kv_heads + kv_head) * s.head_dim + i];
    }
  }
  return out;
}

struct Case {
  Case(Shape shape, std::vector<AttentionMask> masks_)
      : s{shape},
        masks{std::move(masks_)},
        q{random_numbers(s.tokens * s.q_heads * s.head_dim, 21)},
        k{random_numbers(s.tokens * s.kv_heads * s.head_dim, 22)},
        v{random_numbers(k.size(), 23)},
        dout{random_numbers(q.size(), 24)},
        qf{to_float(q)},
        kf{to_float(k)},
        vf{to_float(v)},
        out(q.size()) {
    masked_attention(queries<const float>(qf.data()), keys<const float>(kf.data()),
                     keys<const float>(vf.data()), masks, queries(out.data()), &record);
  }

  template <class T>
  TensorView<T> queries(T* data) const {
    return {data, s.tokens, s.q_heads, s.head_dim};
  }
  template <class T>
  TensorView<T> keys(T* data) const {
    return {data, s.tokens, s.kv_heads, s.head_dim};
  }
  const AttentionMask& mask_of(std::size_t head) const { return masks[head / (s.q_heads / s.kv_heads)]; }

  double forward_error() const {
    double error = 0.0;
    for (std::size_t token = 0; token < s.tokens; ++token) {
      for (std::size_t head = 0; head < s.q_heads; ++head) {
        const Doubles expected = attend(s, q, k, v, mask_of(head), token, head);
        for (std::size_t i = 0; i < s.head_dim; ++i) {
          const double off =
              std::abs(expected[i] - static_cast<double>(out[(token * s.q_heads + head) * s.head_dim + i]));
          if (!(off <= error)) error = std::isnan(off) ? INFINITY : off;
        }
      }
    }
    return error;
  }

  double loss() const {
    double sum = 0.0;
    for (std::size_t token = 0; token < s.tokens; ++token) {
      for (std::size_t head = 0; head < s.q_heads; ++head) {
        const Doubles row = attend(s, q, k, v, mask_of(head), token, head);
        for (std::size_t i = 0; i < s.head_dim; ++i) {
          sum += row[i] * dout[(token * s.q_heads + head) * s.head_dim + i];
        }
      }
    }
    return sum;
  }

  void back(std::vector<float>& dq, std::vector<float>& dk, std::vector<float>& dv) const {
    const std::vector<float> change = to_float(dout);
    masked_attention_back(queries(qf.data()), keys(kf.data()), keys(vf.data()), masks,
                          queries<const float>(out.data()), record, queries(change.data()),
                          queries(dq.data()), keys(dk.data()), keys(dv.data()));
  }

  Shape s;
  std::vector<AttentionMask> masks;
  Doubles q, k, v, dout;
  std::vector<float> qf, kf, vf, out;
  AttentionRecord record;
};

const std::vector<AttentionMask> some_masks{
    {},  // all rows
    {.sinks = 0, .recent = 1},
    {.sinks = 1, .recent = 0},
    {.sinks = 4, .recent = 7},
    {.sinks = 0, .recent = 64},
    {.sinks = 16, .recent = 63},
    {.sinks = 65, .recent = 3},
    {.sinks = 500, .recent = 0},
    {.sinks = 3, .recent = 500},
};

TEST_CASE("a query sees what its mask lets it see, at every size around the blocks") {
  for (const std::size_t tokens : {1UL, 2UL, 63UL, 64UL, 65UL, 130UL, 197UL}) {
    for (const AttentionMask& mask : some_masks) {
      CAPTURE(tokens);
      CAPTURE(mask.sinks);
      CAPTURE(mask.recent);
      CHECK(Case{{tokens, 2, 1, 8}, {mask}}.forward_error() <= 5e-6);
    }
  }
}

TEST_CASE("each KV head has a mask, which applies to the query heads of its group") {
  CHECK(Case{{140, 6, 3, 16}, {{}, {.sinks = 4, .recent = 20}, {.sinks = 70, .recent = 0}}}.forward_error() <=
        5e-6);
}

TEST_CASE("long texts, whose heads are distributed over threads") {
  CHECK(Case{{300, 4, 2, 8}, {{.sinks = 5, .recent = 50}, {}}}.forward_error() <= 5e-6);
}

TEST_CASE("the backward pass equals central differences") {
  const auto check = [](Case c, std::size_t stride) {
    std::vector<float> dq(c.q.size()), dk(c.k.size()), dv(c.v.size());
    c.back(dq, dk, dv);
    const auto f = [&] { return c.loss(); };
    CHECK(gradient_error(f, c.q, dq, stride) <= 2e-5);
    CHECK(gradient_error(f, c.k, dk, stride) <= 2e-5);
    CHECK(gradient_error(f, c.v, dv, stride) <= 2e-5);
  };
  for (const AttentionMask& mask : some_masks) {
    CAPTURE(mask.sinks);
    CAPTURE(mask.recent);
    check(Case{{7, 2, 1, 4}, {mask}}, 1);
    check(Case{{131, 2, 1, 4}, {mask}}, 61);
  }
  check(Case{{70, 4, 2, 8}, {{}, {.sinks = 3, .recent = 9}}}, 37);
}

TEST_CASE("gradients are added, and heads without a gradient get none") {
  Case c{{80, 2, 2, 4}, {{}, {.sinks = 2, .recent = 5}}};
  // The second head gets no gradient, and the first only from one query.
  for (std::size_t i = 0; i < c.dout.size(); ++i) {
    if (i / 4 % 2 == 1 || i / 8 != 66) c.dout[i] = 0.0;
  }
  std::vector<float> dq(c.q.size()), dk(c.k.size()), dv(c.v.size());
  c.back(dq, dk, dv);
  const auto f = [&] { return c.loss(); };
  CHECK(gradient_error(f, c.k, dk, 3) <= 2e-5);
  for (std::size_t i = 0; i < dk.size(); ++i) {
    if (i / 4 % 2 == 1) CHECK(dk[i] == 0.0F);
  }
  const std::vector<float> once = dv;
  c.back(dq, dk, dv);
  for (std::size_t i = 0; i < dv.size(); ++i) CHECK(dv[i] == doctest::Approx(2.0F * once[i]));
}

TEST_CASE("sizes that do not fit are refused") {
  const std::vector<float> x(64);
  std::vector<float> out(64);
  const TensorView<const float> in{x.data(), 4, 2, 8};
  const TensorView<float> to{out.data(), 4, 2, 8};
  const std::vector<AttentionMask> two(2);
  CHECK_NOTHROW(masked_attention(in, in, in, two, to));
  CHECK_THROWS_AS(masked_attention(in, in, in, std::vector<AttentionMask>(1), to), ShapeError);
  CHECK_THROWS_AS(masked_attention(in, in, in.slice(0, 3), two, to), ShapeError);
  const std::vector<AttentionMask> blind(2, AttentionMask{.sinks = 0, .recent = 0});
  CHECK_THROWS_AS(masked_attention(in, in, in, blind, to), ConfigError);
}

}  // namespace
}  // namespace kvpolicy::reference::attention_test
