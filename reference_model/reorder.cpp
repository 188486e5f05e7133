// SPDX-License-Identifier: Apache-2.0
#include <reference_model/reorder.hpp>

#include <span>
#include <utility>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {
namespace {

void move_outputs(Linear& layer, const HeadOrder& order, std::size_t head_dim) {
  layer.weight = layer.weight.changed(
      [&](std::span<float> weight) { reorder_rows(weight, order, head_dim, layer.inputs()); });
  if (!layer.bias.empty()) reorder_rows(std::span{layer.bias}, order, head_dim, 1);
}

}  // namespace

Llama reordered(const Llama& model, const std::vector<HeadOrder>& orders) {
  const LlamaConfig& config = model.config();
  require(orders.size() == config.layers, "reordered: ", orders.size(), " orders, the model has ",
          config.layers, " layers");
  LlamaWeights weights = model.weights();
  for (std::size_t i = 0; i < config.layers; ++i) {
    require(orders[i].size() == config.kv_heads, "reordered: the order of layer ", i, " has ",
            orders[i].size(), " heads, the model has ", config.kv_heads);
    const HeadOrder queries = query_order(orders[i], config.q_heads / config.kv_heads);
    LlamaLayer& layer = weights.layers[i];
    move_outputs(layer.q, queries, config.head_dim);
    move_outputs(layer.k, orders[i], config.head_dim);
    move_outputs(layer.v, orders[i], config.head_dim);
    layer.o.weight = layer.o.weight.changed(
        [&](std::span<float> weight) { reorder_columns(weight, queries, config.head_dim, config.hidden); });
  }
  return Llama{config, std::move(weights)};
}

}  // namespace kvpolicy::reference
