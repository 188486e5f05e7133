// SPDX-License-Identifier: Apache-2.0
//
// Model shapes that no real model has: layers differ in everything that a layer may differ in, and heads are
// chosen to fit them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>

#include "cache/random_operations.hpp"

namespace test {

/// Primes times 8, and multiples of vector widths.
inline const std::vector<std::size_t> some_channels{8, 24, 40, 56, 64, 88, 104, 128, 136};

inline kvpolicy::LayerShape random_layer_shape(Random& random) {
  if (below(random, 4) == 0) return {.q_heads = below(random, 3)};  // a layer without a cache
  kvpolicy::LayerShape layer;
  layer.kv_heads = 1 + below(random, 3);
  layer.q_heads = layer.kv_heads * (1 + below(random, 3));
  layer.head_dim = one_of(random, some_channels);
  if (below(random, 3) > 0) layer.value_dim = one_of(random, some_channels);
  if (below(random, 3) == 0) layer.window = 1 + below(random, 40);
  if (below(random, 3) == 0) layer.softcap = 4.0F;
  return layer;
}

inline kvpolicy::ModelShape random_shape(Random& random) {
  kvpolicy::ModelShape shape{.layers = 2 + below(random, 3)};
  for (std::size_t l = 0; l < shape.layers; ++l) shape.per_layer.push_back(random_layer_shape(random));
  if (shape.kv_head_count() == 0) shape.per_layer.back() = {2, 1, 24, 40};
  return shape;
}

/// Adapts a head so that its groups fit the layer's channels and it keeps no more than the layer's window.
inline HeadSpec fitted(HeadSpec spec, const kvpolicy::LayerShape& layer) {
  if (spec.key_group > 0 && !spec.per_channel) spec.key_group = 8;
  if (spec.value_group > 0) spec.value_group = 8;
  const bool narrower =
      spec.kind == Kind::window && !spec.prefill_chunk_mask && spec.sinks + spec.recent <= layer.window;
  if (layer.window > 0 && !narrower) spec = {.kind = Kind::window, .sinks = 0, .recent = layer.window};
  return spec;
}

inline std::vector<HeadSpec> random_heads(Random& random, const kvpolicy::ModelShape& shape,
                                          bool compress_by_itself) {
  std::vector<HeadSpec> heads;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const kvpolicy::LayerShape layer = shape.layer(l);
    for (const HeadSpec& spec : some_heads(below(random, 40), layer.kv_heads, compress_by_itself)) {
      heads.push_back(fitted(spec, layer));
    }
  }
  return heads;
}

/// Random operations on caches of random shapes.
template <kvpolicy::Element E, class In, class Backend = HostBackend<E>>
void random_shapes(std::uint64_t seed, int shapes, std::size_t operations) {
  Random random{seed};
  for (int i = 0; i < shapes; ++i) {
    CAPTURE(i);
    const kvpolicy::ModelShape shape = random_shape(random);
    shape.validate();
    CacheOptions options{.max_rollback = below(random, 3) == 0 ? 0 : below(random, 20),
                         .max_append = 1 + below(random, 20),
                         .page_rows = below(random, 2) == 0 ? 16U : 64U};
    Logits logits;
    if (below(random, 2) == 0) logits.scale = 0.2F;
    if (below(random, 3) == 0) logits.sinks.assign(9, -0.5F);
    const auto heads = random_heads(random, shape, options.max_rollback == 0);
    random_operations<E, In, Backend>(random(), shape, heads, options, logits, operations);
  }
}

}  // namespace test
