// SPDX-License-Identifier: Apache-2.0
//
// What a device cache will hold, known before it is made.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/cuda/head_store.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::gpu {

/// What KvCache::bytes is once there is room for `tokens` (KvCache::reserve, or steps that came so
/// far: these make room by whole pages, up to max_tokens). Before any compression; a compressed
/// head keeps its budget and window and has room for the tokens since. Rows that may be rolled back
/// lie with the others, so there is no tail. Page tables, selections and the engine's workspace
/// come on top (KvCache::overhead_bytes, Engine::workspace_bytes). `slow` is what
/// KvCache::slow_bytes is: the latest and the chosen rows lie on the device as well, and count
/// twice.
/// @throws ConfigError for options or heads that a device cache refuses, CapacityError for a text
/// that it refuses
template <class... T>
[[nodiscard]] MemoryEstimate memory_of(const HeadPlan<T...>& plan, std::size_t tokens,
                                       const CacheOptions& options = {}) {
  options.validate();
  require<CapacityError>(tokens < (std::size_t{1} << 30), "gpu::memory_of: ", tokens,
                         " tokens, must be fewer than 2^30");
  const ModelShape& shape = plan.shape();
  check_served(shape);
  const StoreContext context{.head_dim = shape.head_dim,
                             .page_rows = options.page_rows,
                             .tail_rows = options.tail_rows(),
                             .has_slow_memory = options.has_slow_memory(),
                             .latest_rows = options.latest_rows,
                             .max_tokens = options.max_tokens};
  MemoryEstimate estimate;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      const HeadRule settings = served_rule(plan, layer, head);
      check_pages(settings, options, shape.head_dim * 2);
      const bool held = settings.compresses && settings.is_quantized();
      const HeadGeometry geometry{settings, context, held};
      estimate.heads += geometry.bytes(tokens);
      estimate.slow += geometry.slow_bytes(tokens);
    }
    const std::size_t observed = std::max(plan.observed_queries(layer), options.kept_queries);
    if (observed > 0) {
      estimate.queries += (observed + options.tail_rows()) * shape.q_heads * shape.head_dim * 2;
    }
  }
  return estimate;
}

}  // namespace kvpolicy::gpu
