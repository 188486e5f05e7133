// SPDX-License-Identifier: Apache-2.0
//
// A small attention layer in plain loops must compute the same before and after its heads are moved.
#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/plan/reorder.hpp>

using namespace kvpolicy;

namespace {

constexpr HeadKind R = HeadKind::retrieval;
constexpr HeadKind S = HeadKind::streaming;

using Numbers = std::vector<double>;

// y = W x + b, W [rows, columns] row-major.
Numbers apply(const Numbers& w, const Numbers& b, const Numbers& x) {
  Numbers y(b);
  for (std::size_t r = 0; r < y.size(); ++r) {
    for (std::size_t c = 0; c < x.size(); ++c) y[r] += w[r * x.size() + c] * x[c];
  }
  return y;
}

struct Layer {
  std::size_t width, q_heads, kv_heads, head_dim;
  Numbers q, k, v, o, bq, bk, bv, bo;

  // Two tokens without a mask or positions are enough to reveal heads that are in the wrong order.
  [[nodiscard]] Numbers forward(const Numbers& x0, const Numbers& x1) const {
    const Numbers query = apply(q, bq, x0);
    const Numbers keys[2]{apply(k, bk, x0), apply(k, bk, x1)};
    const Numbers values[2]{apply(v, bv, x0), apply(v, bv, x1)};
    Numbers joined(q_heads * head_dim);
    for (std::size_t h = 0; h < q_heads; ++h) {
      const std::size_t kv = h / (q_heads / kv_heads);
      double weight[2]{};
      for (int t = 0; t < 2; ++t) {
        for (std::size_t d = 0; d < head_dim; ++d) {
          weight[t] += query[h * head_dim + d] * keys[t][kv * head_dim + d];
        }
        weight[t] = std::exp(weight[t]);
      }
      for (std::size_t d = 0; d < head_dim; ++d) {
        joined[h * head_dim + d] =
            (weight[0] * values[0][kv * head_dim + d] + weight[1] * values[1][kv * head_dim + d]) /
            (weight[0] + weight[1]);
      }
    }
    return apply(o, bo, joined);
  }
};

Numbers random_numbers(std::size_t count, std::mt19937& random) {
  std::normal_distribution<double> normal{0.0, 0.3};
  Numbers numbers(count);
  for (double& number : numbers) number = normal(random);
  return numbers;
}

}  // namespace

TEST_CASE("retrieval heads come first, and each kind keeps its order") {
  const HeadKinds kinds{3, 4, {S, R, S, R, R, R, R, R, S, S, S, S}};
  const auto orders = deployment_orders(kinds);
  REQUIRE(orders.size() == 3);
  CHECK(orders[0] == HeadOrder{1, 3, 0, 2});
  CHECK(orders[1] == HeadOrder{0, 1, 2, 3});
  CHECK(orders[2] == HeadOrder{0, 1, 2, 3});
  CHECK(query_order(orders[0], 2) == HeadOrder{2, 3, 6, 7, 0, 1, 4, 5});
  CHECK(inverse_order(orders[0]) == HeadOrder{2, 0, 3, 1});
}

TEST_CASE("rows and columns move in groups") {
  std::vector<int> rows{1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6};  // 3 heads x 2 rows x 2 columns
  reorder_rows(std::span{rows}, {2, 0, 1}, 2, 2);
  CHECK(rows == std::vector<int>{5, 5, 6, 6, 1, 1, 2, 2, 3, 3, 4, 4});
  std::vector<int> columns{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};  // 2 rows x 3 heads x 2 columns
  reorder_columns(std::span{columns}, {2, 0, 1}, 2, 2);
  CHECK(columns == std::vector<int>{5, 6, 1, 2, 3, 4, 11, 12, 7, 8, 9, 10});
}

TEST_CASE("a layer computes the same after its heads moved, with O's bias unchanged") {
  std::mt19937 random{11};
  for (const std::size_t group : {1U, 2U, 3U}) {
    Layer layer{.width = 10,
                .q_heads = 4 * group,
                .kv_heads = 4,
                .head_dim = 3,
                .q = {},
                .k = {},
                .v = {},
                .o = {},
                .bq = {},
                .bk = {},
                .bv = {},
                .bo = {}};
    const std::size_t wide = layer.q_heads * layer.head_dim;
    const std::size_t narrow = layer.kv_heads * layer.head_dim;
    layer.q = random_numbers(wide * layer.width, random);
    layer.k = random_numbers(narrow * layer.width, random);
    layer.v = random_numbers(narrow * layer.width, random);
    layer.o = random_numbers(layer.width * wide, random);
    layer.bq = random_numbers(wide, random);
    layer.bk = random_numbers(narrow, random);
    layer.bv = random_numbers(narrow, random);
    layer.bo = random_numbers(layer.width, random);
    const Numbers x0 = random_numbers(layer.width, random);
    const Numbers x1 = random_numbers(layer.width, random);

    Layer moved = layer;
    const HeadOrder order = deployment_orders(HeadKinds{1, 4, {S, R, S, R}})[0];
    const HeadOrder queries = query_order(order, group);
    reorder_rows(std::span{moved.q}, queries, moved.head_dim, moved.width);
    reorder_rows(std::span{moved.bq}, queries, moved.head_dim, 1);
    reorder_rows(std::span{moved.k}, order, moved.head_dim, moved.width);
    reorder_rows(std::span{moved.bk}, order, moved.head_dim, 1);
    reorder_rows(std::span{moved.v}, order, moved.head_dim, moved.width);
    reorder_rows(std::span{moved.bv}, order, moved.head_dim, 1);
    reorder_columns(std::span{moved.o}, queries, moved.head_dim, moved.width);
    CHECK(moved.q != layer.q);
    CHECK(moved.o != layer.o);

    const Numbers before = layer.forward(x0, x1);
    const Numbers after = moved.forward(x0, x1);
    for (std::size_t i = 0; i < before.size(); ++i) {
      CHECK(std::abs(after[i] - before[i]) <= 1e-12);
    }
    // The inverse order restores the weights.
    reorder_columns(std::span{moved.o}, inverse_order(queries), moved.head_dim, moved.width);
    reorder_rows(std::span{moved.k}, inverse_order(order), moved.head_dim, moved.width);
    CHECK(moved.o == layer.o);
    CHECK(moved.k == layer.k);
  }
}

TEST_CASE("a plan moves with its heads") {
  const ModelShape shape{2, 4, 4, 64};
  const HeadGates gates{2, 4, {0.1, 0.9, 0.2, 0.8, 0.7, 0.1, 0.6, 0.2}};
  const auto plan = duo_plan<float>(shape, gates, {.sparsity = 0.5});
  const auto moved = reordered(plan, deployment_orders(head_kinds(gates, 0.5)));
  using Full = FullCache<DenseStorage<float>>;
  for (std::size_t layer = 0; layer < 2; ++layer) {
    CHECK(moved.has<Full>(layer, 0));
    CHECK(moved.has<Full>(layer, 1));
    CHECK_FALSE(moved.has<Full>(layer, 2));
    CHECK_FALSE(moved.has<Full>(layer, 3));
  }
}

TEST_CASE("what is no permutation, or does not fit, is refused") {
  std::vector<int> weight(12);
  const std::span view{weight};
  CHECK_THROWS_WITH_AS(reorder_rows(view, {0, 0, 1}, 2, 2), doctest::Contains("head 0 twice"), ConfigError);
  CHECK_THROWS_WITH_AS(reorder_rows(view, {0, 3, 1}, 2, 2), doctest::Contains("head 3"), ConfigError);
  CHECK_THROWS_AS(reorder_rows(view, {0, 1}, 2, 2), ShapeError);
  CHECK_THROWS_AS(reorder_columns(view, {0, 1, 2}, 2, 3), ShapeError);
  CHECK_THROWS_AS((void)inverse_order({1, 1}), ConfigError);
  const HeadPlan<FullCache<DenseStorage<float>>> plan{ModelShape{2, 4, 4, 64}};
  CHECK_THROWS_AS((void)reordered(plan, {{0, 1, 2, 3}}), ConfigError);
  CHECK_THROWS_AS((void)reordered(plan, {{0, 1, 2, 3}, {0, 1, 2}}), ConfigError);
  CHECK_THROWS_AS((void)reordered(plan, {{0, 1, 2, 3}, {0, 1, 2, 2}}), ConfigError);
}
