// SPDX-License-Identifier: Apache-2.0
//
// Who may come in: how much memory sequences take yet, so that an engine admits one only if all that run
// can go on to their ends. `HeadPlan::peak_memory` says what a text takes alone; here stands what is left of that for a
// cache that holds some rows already, and shares pages with prefixes and with forks.
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

/// What one text is promised, if it becomes `tokens` tokens long and heads with a budget are compressed once, right
/// after the first `prompt` of them.
struct TextPromise {
  std::size_t tokens = 0;  ///< of prompt and answer
  std::size_t prompt = 0;  ///< of them, those that are read before the compression
  std::size_t peak = 0;    ///< bytes: HeadPlan::peak_memory of the same numbers, with the cache's options
};
/// What a cache of this plan and these options is promised.
/// @throws as HeadPlan::peak_memory
template <Element E>
[[nodiscard]] TextPromise promise_of(const HeadPlan<E>& plan, std::size_t tokens,
                                     const CacheOptions& options = {}, std::size_t prompt = 0) {
  return {tokens, prompt, plan.peak_memory(tokens, options, prompt)};
}

namespace detail {

/// Of the pages that a head shares, bytes of those that it will drop, and obtain others for: who shares them may
/// keep them in use. `only_residual`: rows do not go, and are quantised by and by, if at all.
template <Element E>
[[nodiscard]] std::size_t shared_bytes_to_drop(const HeadRule& rule, const Head& head,
                                               const LayerShape& layer, std::size_t page_rows,
                                               bool only_residual) {
  if (!only_residual) return head.shared_bytes();
  if (!rule.is_quantized()) return 0;
  // Rows leave the exact residual, on pages that the window of exact rows touches.
  const std::size_t group = rule.key_per_channel ? rule.key_group : 1;
  const std::size_t rows = rule.residual + group + 2 * page_rows;
  return std::min(head.shared_bytes(), rows * (layer.head_dim + layer.value_dim) * sizeof(E));
}

/// A head's part of a promise, and what it may come to hold instead, with pages that it drops and others keep.
struct PromisedGrowth {
  std::size_t promised = 0;
  std::size_t needed = 0;
};

/// Of a head that holds its share of the first `committed` tokens.
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
  // A compression that left all rows makes them be quantised as others come.
  const bool was_compressed =
      dropped_rows || (rule.is_quantized() && head.contents(committed).told_to_compress);
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

/// The most bytes that a cache takes, beyond those that it holds now, until its text is as long as it was promised.
/// Pages that the cache shares are counted as held; those that it will drop and others may keep are counted anew.
/// A head that was compressed is counted with what it holds and the rows to come, not with its prompt.
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

/// The most bytes that a call of all layers with so many tokens of each sequence takes beyond those held now.
/// `indptr` as in Batch.
/// @throws ShapeError if `indptr` does not fit; CapacityError beyond `max_text_tokens`
template <Element E, AttentionEngine Engine>
[[nodiscard]] std::size_t growth_of(std::span<const BatchSequence<KvCache<E, Engine>>> sequences,
                                    std::span<const std::int32_t> indptr) {
  require<ShapeError>(indptr.size() == sequences.size() + 1, "growth_of: indptr has ", indptr.size(),
                      " places, must have one more than the ", sequences.size(), " sequences");
  std::size_t total = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    require<ShapeError>(indptr[i] <= indptr[i + 1], "growth_of: sequence ", i, ": indptr falls from ",
                        indptr[i], " to ", indptr[i + 1]);
    const auto& cache = *sequences[i].cache;
    const std::size_t tokens = cache.tokens() + static_cast<std::size_t>(indptr[i + 1] - indptr[i]);
    total += growth_of(cache, promise_of(cache.plan(), tokens, cache.options(), tokens));
  }
  return total;
}

/// Refuses a call that may not fit into `free` bytes, before anything is changed.
/// @throws CapacityError that says what is lacking; as growth_of
template <Element E, AttentionEngine Engine>
void require_room(std::span<const BatchSequence<KvCache<E, Engine>>> sequences,
                  std::span<const std::int32_t> indptr, std::size_t free) {
  const std::size_t wanted = growth_of(sequences, indptr);
  require<CapacityError>(wanted <= free, "Batch: the calls of ", sequences.size(), " sequences take up to ",
                         wanted, " bytes, of which ", free, " are free and ", wanted - std::min(wanted, free),
                         " are lacking; move a sequence out, or let prefixes go");
}

}  // namespace kvpolicy
