// SPDX-License-Identifier: Apache-2.0
//
// Admission control: how much more memory the running sequences may need. An engine admits a new sequence only
// if there is memory for it and for all running sequences until each is finished. `HeadPlan::peak_memory` bounds a
// text that shares nothing; this header computes what is left of that bound for a cache that already holds rows, and
// that shares pages with prefixes and forks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/plan_memory.hpp>
#include <kvpolicy/plan/saturating.hpp>
#include <kvpolicy/policy/head.hpp>
#include <kvpolicy/policy/head_settings.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// The memory that is promised to one text. The text grows to `tokens` tokens, and heads with a budget are compressed
/// once, right after the first `prompt` tokens.
struct TextPromise {
  std::size_t tokens = 0;  ///< of prompt and answer
  std::size_t prompt = 0;  ///< the tokens among them that are read before the compression
  std::size_t peak = 0;    ///< bytes: HeadPlan::peak_memory of the same numbers, with the cache's options
};
/// The promise for a cache of this plan and these options.
/// @throws as HeadPlan::peak_memory
template <Element E>
[[nodiscard]] TextPromise promise_of(const HeadPlan<E>& plan, std::size_t tokens,
                                     const CacheOptions& options = {}, std::size_t prompt = 0) {
  return {tokens, prompt, plan.peak_memory(tokens, options, prompt)};
}

namespace detail {

/// Bytes of shared pages that the head will drop and replace by pages of its own, while the other owners may keep
/// the shared ones in use. `only_residual`: the head drops no row; at most its exact rows are quantised one after
/// another.
template <Element E>
[[nodiscard]] std::size_t shared_bytes_to_drop(const HeadRule& rule, const Head& head,
                                               const LayerShape& layer, std::size_t page_rows,
                                               bool only_residual) {
  if (!only_residual) return head.shared_bytes();
  if (!rule.is_quantized()) return 0;
  // Rows leave the exact residual, on pages that the window of exact rows touches.
  return std::min(head.shared_bytes(),
                  rule.most_exact_rows(page_rows) * (layer.head_dim + layer.value_dim) * sizeof(E));
}

/// One head's part of the promise, and the most bytes that it may come to hold instead, including shared pages that
/// it drops and that other owners keep.
struct PromisedGrowth {
  std::size_t promised = 0;
  std::size_t needed = 0;
};

/// The growth of a head that has been given the first `committed` tokens.
template <Element E>
[[nodiscard]] PromisedGrowth growth_of_head(const HeadSettings<E>& settings, const Head& head,
                                            const LayerShape& layer, std::size_t committed,
                                            const CacheOptions& options, const TextPromise& promise) {
  if (!settings.has_rule()) return {0, head.shared_bytes()};
  const HeadRule rule = settings.rule(layer.head_dim);
  const auto to_drop = [&](bool only_residual) {
    return shared_bytes_to_drop<E>(rule, head, layer, options.page_rows, only_residual);
  };
  if (!rule.compresses || rule.compress_every > 0) return {0, to_drop(rule.keeps_every_row())};
  const bool dropped_rows = head.rows() < committed;
  // A compression may drop no row: rows are then quantised as later ones come, and a head that shares has been given
  // rows by others, which count as small already.
  const bool may_keep_all = rule.is_quantized() || rule.adaptive_in_layer;
  const bool was_compressed = dropped_rows || (may_keep_all && head.contents(committed).compressed_once);
  const StorageContext context = options.context(layer.head_dim, layer.value_dim);
  const BudgetMemory<E> budget{settings, context, promise.tokens, promise.prompt};
  if (was_compressed) {
    const std::size_t rows = promise.tokens - std::min(promise.tokens, committed);
    return {budget.most(), head.bytes() + budget.bytes_of_more(rows) + to_drop(dropped_rows)};
  }
  // Heads that share their budgets may keep more rows than their own.
  if (head.is_adaptive_in_layer()) return {0, head.shared_bytes()};
  // As long as it holds all rows, it has dropped none.
  return {budget.most(), std::max(budget.before(), budget.after() + head.shared_bytes())};
}

}  // namespace detail

/// The most bytes that the cache will need beyond those that it holds now, until its text has the promised length.
/// Shared pages count as held. A shared page that the cache will drop counts as new memory as well, because its other
/// owners may keep it. A head that was compressed counts with the rows that it holds and the rows to come, not with
/// its prompt.
template <Element E, AttentionEngine Engine>
[[nodiscard]] std::size_t growth_of(const KvCache<E, Engine>& cache, const TextPromise& promise) {
  std::size_t held = cache.bytes();
  std::size_t needed = promise.peak;
  for (const auto& layer : CacheLayers::of(cache)) {
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      const detail::PromisedGrowth own =
          detail::growth_of_head(cache.plan().at(layer.number, head), *layer.heads[head], layer.shape,
                                 layer.committed, cache.options(), promise);
      held += own.promised;
      needed = detail::saturating_sum(needed, own.needed);
    }
  }
  return needed - std::min(needed, held);
}

/// The most bytes that one call of all layers needs beyond those held now. Sequence i brings the tokens
/// [indptr[i], indptr[i + 1]), as in Batch.
/// @throws ShapeError if `indptr` does not fit, ConfigError for a cache that is missing; CapacityError beyond
/// `max_text_tokens`
template <Element E, AttentionEngine Engine>
[[nodiscard]] std::size_t growth_of(std::span<const BatchSequence<KvCache<E, Engine>>> sequences,
                                    std::span<const std::int32_t> indptr) {
  require<ShapeError>(indptr.size() == sequences.size() + 1, "growth_of: indptr has ", indptr.size(),
                      " entries, must have one more than the ", sequences.size(), " sequences");
  std::size_t total = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    require<ShapeError>(indptr[i] <= indptr[i + 1], "growth_of: sequence ", i, ": indptr falls from ",
                        indptr[i], " to ", indptr[i + 1]);
    require(sequences[i].cache != nullptr, "growth_of: sequence ", i, " has no cache");
    const auto& cache = *sequences[i].cache;
    const std::size_t tokens = cache.tokens() + static_cast<std::size_t>(indptr[i + 1] - indptr[i]);
    total = detail::saturating_sum(
        total, growth_of(cache, promise_of(cache.plan(), tokens, cache.options(), tokens)));
  }
  return total;
}

/// Refuses a call that may need more than `free` bytes. Nothing is changed.
/// @throws OutOfMemory that says what is lacking; as growth_of
template <Element E, AttentionEngine Engine>
void require_room(std::span<const BatchSequence<KvCache<E, Engine>>> sequences,
                  std::span<const std::int32_t> indptr, std::size_t free) {
  const std::size_t wanted = growth_of(sequences, indptr);
  require<OutOfMemory>(wanted <= free, "require_room: the calls of ", sequences.size(),
                       " sequences take up to ", wanted, " bytes, of which ", free, " are free and ",
                       wanted - std::min(wanted, free),
                       " are lacking; move a sequence out, or let prefixes go");
}

}  // namespace kvpolicy
