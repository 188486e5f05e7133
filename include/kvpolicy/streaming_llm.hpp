// SPDX-License-Identifier: Apache-2.0
//
// StreamingLLM: every head keeps the first rows of a text and the latest ones, and sees them as if nothing
// lay between. It suits endless streams: memory is fixed, and the distances that the model meets never
// exceed sinks + recent. Rows that leave the window are forgotten.
//
//     auto plan = kvpolicy::streaming_llm_plan<kvpolicy::float16>(shape, {.rotary_in_cache = rotary});
//     kvpolicy::KvCache cache{plan};
//
// Method: Xiao et al., arXiv:2309.17453. Where we differ: the published code rotates all keys again, to
// their positions in the cache. That changes only the distances of the sinks, so here a query is rotated
// for the sinks only (policy/sink_recent_cache.hpp). Each query has its own window, whatever prefill chunk
// it comes in, unless `mask` says otherwise.
#pragma once

#include <cstddef>
#include <optional>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// Settings of `streaming_llm_plan`: what every head keeps, and at which positions.
struct StreamingLlmConfig {
  std::size_t sinks = 4;      ///< First rows that are never dropped; the paper's number.
  std::size_t recent = 1020;  ///< Latest rows kept besides; the paper's cache has 1,024 in all.
  Mask mask = Mask::exact;
  /// The model's own rotary embedding: positions are then those in the cache, as in the paper. If it is not
  /// set, rows keep their positions in the text.
  std::optional<RotaryConfig> rotary_in_cache = {};
};

/// A plan that serves texts of any length in fixed memory.
/// @throws ConfigError if `recent` is 0, or a setting does not work.
template <Element E = float>
[[nodiscard]] HeadPlan<E> streaming_llm_plan(const ModelShape& shape, const StreamingLlmConfig& config = {}) {
  using Policy = SinkRecentCache<DenseStorage<E>>;
  return HeadPlan<E>{shape, typename Policy::Config{.sinks = config.sinks,
                                                    .recent = config.recent,
                                                    .mask = config.mask,
                                                    .rotary_in_cache = config.rotary_in_cache}};
}

}  // namespace kvpolicy
