// SPDX-License-Identifier: Apache-2.0
//
// DuoAttention's deployment step (Xiao et al., arXiv:2410.10819, section 2.3): in each layer the retrieval
// heads move before the streaming heads, so that an engine can split a layer's cache in two by slicing. Our
// own engines do not need it; it serves engines that do, and checkpoints that were reordered before they
// were loaded here.
//
// The output of a layer stays the same if these move together: the rows of K and V (groups of head_dim
// rows, one for each KV head) and of their biases; the rows of Q and its bias (one group for each query
// head, in the order of the KV heads they read); and the columns of O. O's bias belongs to no head.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/duo_gates.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy {

/// A permutation: entry i is the old index of the head that gets index i.
using HeadOrder = std::vector<std::size_t>;

namespace detail {

/// Checks that `order` is a permutation.
/// @throws ConfigError unless `order` has each of 0 to order.size() - 1 once.
inline void check_order(const HeadOrder& order) {
  std::vector<bool> met(order.size(), false);
  for (const std::size_t head : order) {
    require(head < order.size(), "HeadOrder: has head ", head, ", must have 0 to ", order.size() - 1,
            ", each once");
    require(!met[head], "HeadOrder: has head ", head, " twice, must have 0 to ", order.size() - 1,
            ", each once");
    met[head] = true;
  }
}

}  // namespace detail

/// For each layer the KV heads in their new order: retrieval heads first, then streaming heads; each kind
/// stays in its old order.
[[nodiscard]] inline std::vector<HeadOrder> deployment_orders(const HeadKinds& kinds) {
  std::vector<HeadOrder> orders(kinds.layers());
  for (std::size_t layer = 0; layer < kinds.layers(); ++layer) {
    for (const HeadKind kind : {HeadKind::retrieval, HeadKind::streaming}) {
      for (std::size_t head = 0; head < kinds.heads(); ++head) {
        if (kinds(layer, head) == kind) orders[layer].push_back(head);
      }
    }
  }
  return orders;
}

/// The order of the query heads that belongs to an order of their KV heads.
[[nodiscard]] inline HeadOrder query_order(const HeadOrder& kv_order, std::size_t group) {
  HeadOrder order;
  order.reserve(kv_order.size() * group);
  for (const std::size_t head : kv_order) {
    for (std::size_t i = 0; i < group; ++i) order.push_back(head * group + i);
  }
  return order;
}

/// The order that undoes `order`.
[[nodiscard]] inline HeadOrder inverse_order(const HeadOrder& order) {
  detail::check_order(order);
  HeadOrder inverse(order.size());
  for (std::size_t place = 0; place < order.size(); ++place) inverse[order[place]] = place;
  return inverse;
}

/// Moves the output rows of a weight [order.size() * head_dim, columns], row-major, in groups of `head_dim`
/// rows. A bias is a weight of one column.
/// @throws ConfigError for an order that is no permutation, ShapeError for a weight of another
/// size.
template <class T>
void reorder_rows(std::span<T> weight, const HeadOrder& order, std::size_t head_dim, std::size_t columns) {
  detail::check_order(order);
  const std::size_t block = head_dim * columns;
  require<ShapeError>(weight.size() == order.size() * block, "reorder_rows: the weight has ", weight.size(),
                      " numbers, must have ", order.size(), " heads x ", head_dim, " rows x ", columns,
                      " columns");
  const std::vector<T> old(weight.begin(), weight.end());
  for (std::size_t place = 0; place < order.size(); ++place) {
    std::ranges::copy(std::span{old}.subspan(order[place] * block, block),
                      weight.begin() + static_cast<std::ptrdiff_t>(place * block));
  }
}

/// Moves the input columns of a weight [rows, order.size() * head_dim], row-major, in groups of `head_dim`
/// columns.
/// @throws ConfigError for an order that is no permutation, ShapeError for a weight of another
/// size.
template <class T>
void reorder_columns(std::span<T> weight, const HeadOrder& order, std::size_t head_dim, std::size_t rows) {
  detail::check_order(order);
  const std::size_t columns = order.size() * head_dim;
  require<ShapeError>(weight.size() == rows * columns, "reorder_columns: the weight has ", weight.size(),
                      " numbers, must have ", rows, " rows x ", order.size(), " heads x ", head_dim,
                      " columns");
  // Each row is moved like a weight of one column.
  for (std::size_t row = 0; row < rows; ++row) {
    reorder_rows(weight.subspan(row * columns, columns), order, head_dim, 1);
  }
}

/// The plan for a model whose KV heads were moved by `orders`, one order for each layer.
/// @throws ConfigError if the orders do not fit the plan.
template <class... T>
[[nodiscard]] auto reordered(const HeadPlan<T...>& plan, const std::vector<HeadOrder>& orders) {
  const ModelShape& shape = plan.shape();
  require(orders.size() == shape.layers, "reordered: ", orders.size(), " orders, the plan has ", shape.layers,
          " layers");
  HeadPlan<typename HeadPlan<T...>::element_type> moved = plan;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t heads = shape.layer(layer).kv_heads;
    require(orders[layer].size() == heads, "reordered: the order of layer ", layer, " has ",
            orders[layer].size(), " heads, the plan has ", heads);
    detail::check_order(orders[layer]);
    for (std::size_t place = 0; place < heads; ++place) {
      moved.set(layer, place, plan.at(layer, orders[layer][place]));
    }
  }
  return moved;
}

}  // namespace kvpolicy
