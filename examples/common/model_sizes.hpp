// SPDX-License-Identifier: Apache-2.0
//
// Shapes of well-known models, and memory sizes as people write them.
#pragma once

#include <cstddef>
#include <string>

#include <kvpolicy/core/model_shape.hpp>

namespace kvpolicy::tools {

/// Accepts the name of a known model, four numbers "layers,q_heads,kv_heads,head_dim", or a model
/// folder. Of a folder's config.json only these four numbers are read, so the model may be one that
/// the tools cannot run.
/// @throws ConfigError, FormatError
[[nodiscard]] ModelShape parse_shape(const std::string& text);

/// The known names with their shapes, one a line.
[[nodiscard]] std::string known_shapes();

/// Parses "80GB" (10^9), "80GiB" (2^30), "512MiB", "1.5TB", "1000" (bytes).
/// @throws ConfigError
[[nodiscard]] std::size_t parse_bytes(const std::string& text);

}  // namespace kvpolicy::tools
