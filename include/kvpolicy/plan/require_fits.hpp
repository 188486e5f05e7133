// SPDX-License-Identifier: Apache-2.0
//
// Whether a table of heads is one of the model's.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_table.hpp>

namespace kvpolicy::detail {

/// Refuses a table of another model's heads.
/// @throws ConfigError unless `table` has one entry for each KV head of `shape`.
template <class T>
void require_fits(const HeadTable<T>& table, const ModelShape& shape, const char* what) {
  require(table.layers() == shape.layers && table.heads() == shape.kv_heads, what, ": a table of ",
          table.layers(), " layers x ", table.heads(), " heads does not fit a model of ",
          shape.layers, " layers x ", shape.kv_heads, " KV heads");
}

}  // namespace kvpolicy::detail
