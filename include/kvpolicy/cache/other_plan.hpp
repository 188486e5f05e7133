// SPDX-License-Identifier: Apache-2.0
//
// How the heads of one layer take over the rows of another plan's heads: `KvCache::fork_as`. Every
// row is handed to the new policy as if the text had come anew, so that it quantises, summarises
// and evicts from exact numbers.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory_resource>
#include <span>
#include <variant>
#include <vector>

#include <kvpolicy/cache/layer.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/storage/slow_memory.hpp>

namespace kvpolicy {

/// The policy that a head has, if it is a P.
template <class P, class Policy>
[[nodiscard]] const P* policy_if(const Policy& head) {
  return std::visit(
      []<class Q>(const Q& policy) -> const P* {
        if constexpr (std::same_as<P, Q>) return &policy;
        return nullptr;
      },
      head);
}

/// All `count` committed rows of a text, in its order, as numbers that were never quantised.
/// @throws ConfigError if the policy dropped one or quantised one.
template <KvPolicy P>
[[nodiscard]] SegmentList exact_rows(const P& policy, std::size_t count, std::size_t layer,
                                     std::size_t head) {
  SegmentList shown;
  policy.segments({.first_position = 0, .tokens = count}, shown);
  std::size_t next = 0;
  bool quantized = false;
  for (const Segment& rows : shown) {
    quantized = quantized || is_quantized(rows.keys.format.encoding) ||
                is_quantized(rows.values.format.encoding);
    rows.for_each_run([&](const RowRun& run) {
      for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
        if (rows.position_of(row) == static_cast<std::int64_t>(next)) ++next;
      }
    });
  }
  require(next == count && policy.rows() == count, "KvCache::fork_as: KV head ", head, " of layer ",
          layer, " holds ", policy.rows(), " of ", count,
          " rows; a head of another policy or other settings needs all of them");
  require(!quantized, "KvCache::fork_as: KV head ", head, " of layer ", layer,
          " holds quantised rows; a head of another policy or other settings needs exact ones");
  return shown;
}

/// What the policy has added up of each row's attention.
/// @throws ConfigError if it has not
template <KvPolicy P>
[[nodiscard]] std::span<const double> accumulated_by([[maybe_unused]] const P& policy,
                                                     std::size_t layer, std::size_t head) {
  if constexpr (AccumulatingPolicy<P>) {
    return policy.accumulated();
  } else {
    fail<ConfigError>("KvCache::fork_as: KV head ", head, " of layer ", layer,
                      " has not added up the attention that its rows got; a head that ranks by it "
                      "needs all of it, from the first query on");
  }
}

/// Rows that will be read become available, where they lie in slow memory.
inline void fetch_rows(std::pmr::memory_resource* memory, const SegmentList& list,
                       std::size_t head_dim) {
  auto* slow = dynamic_cast<SlowMemory*>(memory);
  if (slow == nullptr) return;
  std::vector<SlowMemory::Range> ranges;
  for (const Segment& rows : list) {
    rows.for_each_run([&](const RowRun& run) {
      list_ranges(*slow, rows.keys, head_dim, run.first, run.rows, ranges);
      list_ranges(*slow, rows.values, head_dim, run.first, run.rows, ranges);
    });
  }
  slow->fetch(ranges);
}

/// A new policy takes rows that are all of a text's so far.
/// @throws ShapeError if it cannot hold them, std::bad_alloc, StorageError
template <KvPolicy P>
void commit_all(P& policy, const SegmentList& list, std::size_t count) {
  const auto each = [&](auto act) {
    for (const Segment& shown : list) {
      // Reach, rotation and the like are the old policy's.
      const Segment all{.keys = shown.keys, .values = shown.values, .rows = shown.rows,
                        .position = shown.position, .positions = shown.positions};
      shown.for_each_run([&](const RowRun& run) { act(all.part(run.first, run.rows)); });
    }
  };
  if constexpr (requires(const Segment& rows) { policy.check(rows); }) {
    each([&](const Segment& rows) { policy.check(rows); });
  }
  policy.reserve(count);
  each([&](const Segment& rows) { policy.commit(rows); });
  policy.release_spare();
}

/// The new layer `to` takes over what `from` holds. `is_same(head)`: whether a head has the same
/// policy with the same settings in both; then it takes a copy, which shares the full pages.
/// @throws as above
template <class Policy, class OtherPolicy, Element E, class IsSame>
void take_layer(CacheLayer<Policy, E>& to, const CacheLayer<OtherPolicy, E>& from,
                std::size_t layer, const StorageContext& context, IsSame is_same) {
  for (std::size_t head = 0; head < to.heads.size(); ++head) {
    std::visit(
        [&]<class P>(P& policy) {
          const P* same = is_same(head) ? policy_if<P>(from.heads[head]) : nullptr;
          if (same != nullptr) {
            policy = *same;
          } else if (from.committed > 0) {
            const SegmentList rows = std::visit(
                [&](const auto& old) { return exact_rows(old, from.committed, layer, head); },
                from.heads[head]);
            fetch_rows(context.slow_memory, rows, context.head_dim);
            commit_all(policy, rows, from.committed);
            if constexpr (AccumulatingPolicy<P>) {
              policy.inherit(std::visit(
                  [&](const auto& old) { return accumulated_by(old, layer, head); },
                  from.heads[head]));
            }
          }
          if constexpr (requires(const Segment& rows) { policy.check(rows); }) {
            from.for_each_uncommitted(head, [&](const Segment& rows) { policy.check(rows); });
          }
        },
        to.heads[head]);
  }
  to.tail = Tail<E>{from.tail};
  to.queries.take(from.queries);
  to.tokens = from.tokens;
  to.committed = from.committed;
  to.tree = from.tree;
  to.scale = from.scale;
  to.softcap = from.softcap;
  to.sink_logits = from.sink_logits;
}

}  // namespace kvpolicy
