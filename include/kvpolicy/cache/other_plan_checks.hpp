// SPDX-License-Identifier: Apache-2.0
//
// What `fork_as` refuses, on the host and on a device: a text can go under another plan only if the
// heads that change still hold all of it, as exact rows. `cache` is the name with which a message begins.
#pragma once

#include <cstddef>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>

namespace kvpolicy {

/// Refuses a plan for another model.
/// @throws ConfigError
inline void check_same_shape(std::string_view cache, const ModelShape& own, const ModelShape& other) {
  require(own == other, cache, "::fork_as: the plans are for models of different shapes");
}

/// Refuses a head that changes and holds `rows` of the text's `count` committed rows: not the whole text,
/// or some of it `quantized`.
/// @throws ConfigError
inline void check_exact_rows(std::string_view cache, std::size_t layer, std::size_t head, std::size_t rows,
                             std::size_t count, bool whole, bool quantized) {
  require(whole, cache, "::fork_as: KV head ", head, " of layer ", layer, " holds ", rows, " of ", count,
          " rows; a head of another policy or other settings needs all of them");
  require(!quantized, cache, "::fork_as: KV head ", head, " of layer ", layer,
          " holds quantised rows; a head of another policy or other settings needs exact ones");
}

/// Refuses a head that ranks its rows by all the attention that they ever got, if the head that it takes
/// the rows from has not added that up.
/// @throws ConfigError
inline void check_accumulated(std::string_view cache, std::size_t layer, std::size_t head, bool needed,
                              bool known) {
  require(!needed || known, cache, "::fork_as: KV head ", head, " of layer ", layer,
          " has not added up the attention that its rows got as the new one does; a head that ranks by it "
          "needs all of ",
          "it, from the first query on, and the same votes");
}

}  // namespace kvpolicy
