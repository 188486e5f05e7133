// SPDX-License-Identifier: Apache-2.0
//
// Shapes of well-known models, and sizes as people write them.
#pragma once

#include <cstddef>
#include <string>

#include <kvpolicy/core/model_shape.hpp>

namespace kvpolicy::tools {

/// A known model's name, four numbers "layers,q_heads,kv_heads,head_dim", or a model folder, of whose
/// config.json it reads these four and which layers have a window or no cache: a plan needs no more of a
/// model that the tools cannot run. A latent cache (kv_lora_rank) is refused. Also a GGUF file of an
/// architecture that the reference model computes.
/// @throws ConfigError, FormatError
[[nodiscard]] ModelShape parse_shape(const std::string& text);

/// What to say beside bytes of a cache for the shape of a known model that caches one latent row for all heads: a
/// cache of ours keeps its channels as keys and again as values. Empty for any other shape.
[[nodiscard]] std::string latent_note(const ModelShape& shape);

/// The known names, with their shapes, a line each.
[[nodiscard]] std::string known_shapes();

/// "80GB" (10^9), "80GiB" (2^30), "512MiB", "1.5TB", "1000" (bytes).
/// @throws ConfigError
[[nodiscard]] std::size_t parse_bytes(const std::string& text);

}  // namespace kvpolicy::tools
