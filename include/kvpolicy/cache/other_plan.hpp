// SPDX-License-Identifier: Apache-2.0
//
// How the heads of one layer take over the rows of another plan's heads: `KvCache::fork_as`. Every
// row is handed to the new policy as if it had just come, so that the policy quantises, summarises
// and evicts from exact numbers.
#pragma once

#include <cstddef>
#include <vector>

#include <kvpolicy/cache/layer.hpp>
#include <kvpolicy/cache/other_plan_checks.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/memory/slow_memory.hpp>
#include <kvpolicy/policy/head.hpp>

namespace kvpolicy {

/// All `count` committed rows of a text, in its order, as numbers that were never quantised.
/// @throws ConfigError if the policy dropped one or quantised one.
[[nodiscard]] inline SegmentList exact_rows(const Head& own, std::size_t count, std::size_t layer,
                                            std::size_t head) {
  SegmentList shown;
  own.show({.first_position = 0, .tokens = count}, shown);
  std::size_t next = 0;
  bool quantized = false;
  for (const Segment& rows : shown) {
    quantized =
        quantized || is_quantized(rows.keys.format.encoding) || is_quantized(rows.values.format.encoding);
    rows.for_each_run([&](const RowRun& run) {
      for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
        if (rows.position_of(row) == static_cast<std::int64_t>(next)) ++next;
      }
    });
  }
  check_exact_rows("KvCache", layer, head, own.rows(), count, next == count && own.rows() == count,
                   quantized);
  return shown;
}

/// Rows that will be read become available, where they lie in slow memory.
inline void fetch_rows(const StorageContext& context, const SegmentList& list) {
  if (context.slow_tier == 0) return;
  PageProvider& slow = *context.pages().provider(context.slow_tier);
  std::vector<PageProvider::Range> ranges;
  for (const Segment& rows : list) {
    list_ranges(slow, rows, context.head_dim, context.value_channels(), ranges);
  }
  slow.fetch(ranges);
}

/// A new policy takes rows that are all of a text's so far.
/// @throws ShapeError if it cannot hold them, std::bad_alloc, StorageError
inline void commit_all(Head& head, const SegmentList& list, std::size_t count) {
  const auto each = [&](auto act) {
    for (const Segment& shown : list) {
      // Reach, rotation and the like are the old policy's.
      const Segment all{.keys = shown.keys,
                        .values = shown.values,
                        .rows = shown.rows,
                        .position = shown.position,
                        .positions = shown.positions};
      shown.for_each_run([&](const RowRun& run) { act(all.part(run.first, run.rows)); });
    }
  };
  each([&](const Segment& rows) { head.check(rows); });
  head.reserve(count);
  each([&](const Segment& rows) { head.commit(rows); });
  head.release_unused();
}

/// The new layer `to` takes over what `from` holds. `is_same(head)`: whether a head has the same
/// policy with the same settings in both; then it takes a copy, which shares the full pages.
/// @throws as above
template <Element E, class IsSame>
void take_layer(CacheLayer<E>& to, const CacheLayer<E>& from, const StorageContext& context, IsSame is_same) {
  const std::size_t layer = from.number;
  for (std::size_t i = 0; i < to.heads.size(); ++i) {
    const Head& old = *from.heads[i];
    if (is_same(i)) {
      to.heads[i] = HeadPtr{old.fork()};
    } else if (from.committed > 0) {
      const SegmentList rows = exact_rows(old, from.committed, layer, i);
      fetch_rows(context, rows);
      Head& head = *to.heads[i];
      commit_all(head, rows, from.committed);
      if (head.roles().accumulates) {
        const bool known = old.roles().accumulates && old.votes() == head.votes() &&
                           old.roles().waits_for_scoring == head.roles().waits_for_scoring;
        // A scoring pass may come later.
        check_accumulated("KvCache", layer, i, !head.roles().waits_for_scoring, known);
        if (known) head.inherit(old.accumulated());
      }
    }
    from.for_each_uncommitted(i, [&](const Segment& rows) { to.heads[i]->check(rows); });
  }
  to.tail = Tail<E>{from.tail};
  to.queries.take(from.queries);
  to.tokens = from.tokens;
  to.committed = from.committed;
  to.tree = from.tree;
  to.scale = from.scale;
  to.softcap = from.softcap;
  to.attention_sink_bias = from.attention_sink_bias;
}

}  // namespace kvpolicy
