// SPDX-License-Identifier: Apache-2.0
//
// StreamingLLM: every head keeps the opening rows of a text and the latest ones, and sees them as
// if nothing lay between. For endless streams: memory is fixed, the distances that the model meets
// never exceed sinks + recent, and what falls out of the window is forgotten.
//
//     auto plan = kvpolicy::streaming_llm_plan<kvpolicy::half>(shape, {.rotary_in_cache = rotary});
//     kvpolicy::StreamingLlmCache<kvpolicy::half> cache{plan};
//
// Method: Xiao et al., arXiv:2309.17453. Where we differ: the published code turns all keys anew to
// their places in the cache; only the sinks' distances differ by that, so here a query is turned
// for the sinks alone (policy/sink_recent_cache.hpp). Each query has a window of its own, whatever
// chunk it comes in; `mask` says otherwise.
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
  std::size_t sinks = 4;      ///< Opening rows that never go; the paper's number.
  std::size_t recent = 1020;  ///< Latest rows kept besides; the paper's cache is 1,024 in all.
  Mask mask = Mask::exact;
  /// The model's own rotary embedding: positions are then those in the cache, as in the paper.
  /// Without it rows keep their position in the text.
  std::optional<RotaryConfig> rotary_in_cache = {};
};

/// The plan under which a text may go on for ever.
/// @throws ConfigError if `recent` is 0, or a setting does not work.
template <Element E = float>
[[nodiscard]] HeadPlan<E> streaming_llm_plan(
    const ModelShape& shape, const StreamingLlmConfig& config = {}) {
  using Policy = SinkRecentCache<DenseStorage<E>>;
  return HeadPlan<E>{
      shape, typename Policy::Config{.sinks = config.sinks,
                                     .recent = config.recent,
                                     .mask = config.mask,
                                     .rotary_in_cache = config.rotary_in_cache}};
}

}  // namespace kvpolicy
