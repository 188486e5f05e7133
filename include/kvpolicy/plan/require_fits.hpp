// SPDX-License-Identifier: Apache-2.0
//
// Checks that a table of heads belongs to a model. A table has the same number of heads in each layer, so
// it fits only models whose layers all have that number; their windows and channels may differ.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_table.hpp>

namespace kvpolicy {

/// The number of query and KV heads that each layer of the model has (the shape of layer 0).
/// @throws ConfigError if layers have different numbers of heads, or share a cache
[[nodiscard]] inline LayerShape same_heads(const ModelShape& shape, const char* what) {
  shape.validate();
  const LayerShape first = shape.layer(0);
  for (std::size_t l = 1; l < shape.per_layer.size(); ++l) {
    const LayerShape own = shape.layer(l);
    require(own.q_heads == first.q_heads && own.kv_heads == first.kv_heads, what, ": layer ", l, " has ",
            own.q_heads, " query heads and ", own.kv_heads, " KV heads, layer 0 has ", first.q_heads, " and ",
            first.kv_heads, "; a model whose layers differ in that has no table of heads, set each head");
  }
  return first;
}

namespace detail {

/// Checks that a table has the shape of the model's heads.
/// @throws ConfigError unless `table` has one entry for each KV head of `shape`.
template <class T>
void require_fits(const HeadTable<T>& table, const ModelShape& shape, const char* what) {
  const std::size_t kv_heads = same_heads(shape, what).kv_heads;
  require(table.layers() == shape.layers && table.heads() == kv_heads, what, ": a table of ", table.layers(),
          " layers x ", table.heads(), " heads does not fit a model of ", shape.layers, " layers x ",
          kv_heads, " KV heads");
}

}  // namespace detail
}  // namespace kvpolicy
