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

namespace kvpolicy {

namespace detail {

/// Of the pages that a head shares, bytes of those that it will drop, and obtain others for: who shares them may
/// keep them in use.
template <Element E>
[[nodiscard]] std::size_t shared_bytes_to_drop(const HeadSettings<E>& settings, const Head& head,
                                               const LayerShape& layer, std::size_t page_rows) {
  if (!settings.has_rule()) return head.shared_bytes();
  const HeadRule rule = settings.rule(layer.head_dim);
  if (!rule.keeps_every_row()) return head.shared_bytes();
  if (!rule.is_quantized()) return 0;
  // Rows leave the exact residual, on pages that the window of exact rows touches.
  const std::size_t group = rule.key_per_channel ? rule.key_group : 1;
  const std::size_t rows = rule.residual + group + 2 * page_rows;
  return std::min(head.shared_bytes(), rows * (layer.head_dim + layer.value_dim) * sizeof(E));
}

}  // namespace detail

/// The most bytes that a cache takes, beyond those that it holds now, on its way to a text whose memory was
/// predicted as `peak` (HeadPlan::peak_memory with the cache's options). Pages that the cache shares are counted
/// as held; those that it will drop and others may keep are counted anew.
template <Element E, AttentionEngine Engine>
[[nodiscard]] std::size_t growth_of(const KvCache<E, Engine>& cache, std::size_t peak) {
  std::size_t anew = 0;
  const HeadPlan<E>& plan = cache.plan();
  for (const auto& layer : CacheLayers::of(cache)) {
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      anew += detail::shared_bytes_to_drop(plan.at(layer.number, head), *layer.heads[head], layer.shape,
                                           cache.options().page_rows);
    }
  }
  return peak - std::min(peak, cache.bytes()) + anew;
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
    total += growth_of(cache, cache.plan().peak_memory(tokens, cache.options(), tokens));
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
