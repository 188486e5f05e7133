// SPDX-License-Identifier: Apache-2.0
//
// TriForce: lossless speculative decoding in three levels. A small model with a streaming cache drafts
// tokens; the target verifies them over the rows that its cache selects; the target then decides over all
// rows. It suits long texts, where reading the whole cache for each token dominates the time: the cache is
// read once for many tokens instead, and the text keeps the target's distribution.
//
//     kvpolicy::CacheOptions options{.max_rollback = 32, .max_append = 32};
//     kvpolicy::KvCache cache{kvpolicy::triforce_plan(shape), options};
//     kvpolicy::KvCache draft_cache{kvpolicy::triforce_draft_plan(small_shape), options};
//     auto decoder = kvpolicy::triforce(model, cache, small_model, draft_cache);
//     decoder.read_prompt(prompt);
//     decoder.generate(500, [](const kvpolicy::NewToken& token) { return show(token); });
//
// Method: Sun et al., arXiv:2404.11912. Where we differ: the middle level verifies without bias
// (speculation/selected_draft.hpp); chunks are selected per KV head among all committed rows, and later
// rows are read as well (policy/chunk_retrieval_cache.hpp); the number of draft tokens adapts to
// measurements (speculation/draft_length.hpp). Trees of draft tokens, n-grams and batches are in
// speculation/. docs/triforce.md walks through a run.
#pragma once

#include <cstddef>
#include <utility>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/speculation/batch.hpp>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/model_draft.hpp>
#include <kvpolicy/speculation/ngram_draft.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>
#include <kvpolicy/speculation/tree_draft.hpp>
#include <kvpolicy/speculation/tree_shape.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy {

/// The paper's settings, which it chose for a prompt of 120 Ki tokens.
struct TriForceConfig {
  std::size_t chunk = 8;      ///< rows chosen together
  std::size_t budget = 4096;  ///< rows that the middle level reads, besides the latest
};
/// Settings of `triforce_draft_plan`; the paper's small model keeps 256 rows in total.
struct TriForceDraftConfig {
  std::size_t sinks = 16;    ///< first rows that are never dropped
  std::size_t recent = 240;  ///< latest rows kept besides
};

/// The plan of the target, whose middle level reads selected chunks.
/// @throws ConfigError if chunk and budget do not fit each other
template <Element E = float>
[[nodiscard]] HeadPlan<E> triforce_plan(const ModelShape& shape, const TriForceConfig& config = {}) {
  using Policy = ChunkRetrievalCache<DenseStorage<E>>;
  return HeadPlan<E>{shape, typename Policy::Config{.chunk = config.chunk, .budget = config.budget}};
}
/// Like `triforce_plan`, over quantised rows.
/// @throws ConfigError also if a chunk is no multiple of the rows that share a scale
template <Element E = float>
[[nodiscard]] HeadPlan<E> quantized_triforce_plan(const ModelShape& shape, const TriForceConfig& config = {},
                                                  const ResidualConfig& quantized = {}) {
  using Policy = ChunkRetrievalCache<ResidualStorage<E>>;
  return HeadPlan<E>{
      shape, typename Policy::Config{.chunk = config.chunk, .budget = config.budget, .storage = quantized}};
}
/// The plan of the small model, which keeps the first and the latest rows of a text.
/// @throws ConfigError if `recent` is 0
template <Element E = float>
[[nodiscard]] HeadPlan<E> triforce_draft_plan(const ModelShape& shape,
                                              const TriForceDraftConfig& config = {}) {
  using Policy = SinkRecentCache<DenseStorage<E>>;
  return HeadPlan<E>{shape, typename Policy::Config{.sinks = config.sinks, .recent = config.recent}};
}

/// Joins the three levels to a decoder. All arguments except the options must outlive it. If `options`
/// fixes the number of draft tokens, the middle level's number is fixed too.
/// @throws ConfigError as SpeculativeDecoder
template <class Model, class Cache, class SmallModel, class SmallCache>
[[nodiscard]] auto triforce(Model& model, Cache& cache, SmallModel& small, SmallCache& small_cache,
                            SpeculationOptions options = {}, SelectedDraftOptions middle = {}) {
  using Small = ModelDraft<SmallModel, SmallCache>;
  using Middle = SelectedDraft<Model, Cache, Small>;
  middle.adapt = middle.adapt && options.adapt;
  return SpeculativeDecoder<Model, Cache, Middle>{
      model, cache, Middle{model, cache, Small{small, small_cache}, middle}, std::move(options)};
}

}  // namespace kvpolicy
