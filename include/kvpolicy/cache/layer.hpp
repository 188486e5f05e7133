// SPDX-License-Identifier: Apache-2.0
//
// One layer of a cache: its heads' policies, and what no policy has seen yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/observation_window.hpp>
#include <kvpolicy/cache/pending_tree.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/cache/tail.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/progress.hpp>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/policy/head.hpp>

namespace kvpolicy {

/// The parts of KvCache that concern a single layer. Committed rows were handed to the policies, the
/// others lie in the tail; nodes of a tree count as tokens.
template <Element E>
struct CacheLayer : TextProgress<std::size_t> {
  using element_type = E;

  std::size_t number = 0;  // in the model
  LayerShape shape;
  std::vector<HeadPtr> heads;
  HeadRoles roles;  // of all heads together
  Tail<E> tail;
  ObservationWindow<E> queries;
  PendingTree tree = {};  // what the latest rows are, where they are guesses that branch
  // How the model's logits are made, as its last call said: a compression observes them alike.
  std::optional<float> scale = {};
  float softcap = 0.0F;
  std::vector<float> attention_sink_bias = {};

  void add(HeadPtr head) {
    const HeadRoles& own = head->roles();
    roles = {roles.selects || own.selects, roles.compresses || own.compresses,
             roles.accumulates || own.accumulates, roles.shares || own.shares,
             roles.waits_for_scoring || own.waits_for_scoring};
    heads.push_back(std::move(head));
  }

  /// Tokens of the text, on which a pending tree hangs.
  [[nodiscard]] std::size_t text() const { return tokens - tree.size(); }

  /// What a query right after the text would read of a head, and all nodes of a pending tree.
  [[nodiscard]] SegmentList segments(std::size_t head, Read read) const {
    SegmentList list;
    const ReadRequest request{static_cast<std::int64_t>(text()), 1, read};
    heads[head]->show(request, list);
    for_each_uncommitted(head,
                         [&](const Segment& rows) { heads[head]->show_uncommitted(rows, request, list); });
    return list;
  }

  /// Bookkeeping besides the rows: this object, its heads and their page tables.
  [[nodiscard]] std::size_t overhead_bytes() const {
    std::size_t total =
        sizeof(*this) + heads.capacity() * sizeof(HeadPtr) + attention_sink_bias.capacity() * sizeof(float);
    for (const HeadPtr& head : heads) total += head->overhead_bytes();
    return total;
  }

  void release_unused() noexcept {
    for (const HeadPtr& head : heads) head->release_unused();
  }

  /// visit(segment) for one head's rows that no policy has seen: first the text's, then the tree's.
  template <class Visit>
  void for_each_uncommitted(std::size_t head, Visit visit) const {
    tail.for_each_segment(head, committed, text(), visit);
    std::size_t node = 0;
    tail.for_each_segment(head, text(), tokens, [&](const Segment& rows) {
      visit(tree.place(rows, node));
      node += rows.rows;
    });
  }

  /// Takes back the rows after the first `count`.
  void truncate(std::size_t count) noexcept {
    tree.truncate(count - std::min(count, text()));
    tokens = count;
    queries.truncate(count);
    undo_refresh(count);
  }

  /// The nodes of `path` become rows of the text; all other nodes of the pending tree are dropped.
  void accept(std::span<const std::size_t> path) noexcept {
    const std::size_t root = text();
    // A path's nodes ascend, so no row is overwritten before it has moved.
    for (std::size_t i = 0; i < path.size(); ++i) tail.move(root + path[i], root + i);
    queries.keep(root, path);
    tree.truncate(0);
    tokens = root + path.size();
    // Where a node and all before it stay, its choice was made by the text's query.
    undo_refresh(root + unmoved_nodes(path));
  }

  /// The oldest `rows` rows of the tail go to the policies, which have reserved for them.
  void commit_tail(std::size_t rows) {
    for (std::size_t head = 0; head < heads.size() && rows > 0; ++head) {
      tail.for_each_segment(head, committed, committed + rows,
                            [&](const Segment& segment) { heads[head]->commit(segment); });
    }
    committed += rows;
  }

  void undo_refresh(std::size_t count) noexcept {
    if (!roles.selects) return;
    for (const HeadPtr& head : heads) head->undo_refresh(count);
  }
  void end_refresh(bool keep) noexcept {
    if (!roles.selects) return;
    for (const HeadPtr& head : heads) head->end_refresh(keep);
  }
  void forget_selection() noexcept {
    for (const HeadPtr& head : heads) head->forget_selection();
  }

  /// The sums of a call whose rows are committed, as `observe_call` made them.
  void accumulate(std::span<const std::vector<float>> sums, std::size_t group) noexcept {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      if (!sums[head].empty()) heads[head]->accumulate(sums[head], group);
    }
  }

  /// @throws ShapeError if a head that would drop rows lacks queries to choose by.
  void check_queries(std::string_view call) const {
    if (!roles.compresses) return;
    for (const HeadPtr& head : heads) {
      kvpolicy::check_queries("KvCache", call, queries, head->observed_queries(), tokens,
                              head->is_compressible(uncommitted()));
    }
  }

  /// Before a compression: whether what its heads are ranked by is known. `in_model`: heads that share over the model
  /// are ranked, because one of them drops rows.
  /// @throws ShapeError
  void check_ranked(std::string_view call, bool in_model) const {
    if (!roles.compresses) return;
    const bool in_layer = std::ranges::any_of(heads, [&](const HeadPtr& head) {
      return head->is_adaptive_in_layer() && !head->is_adaptive_in_model() &&
             head->is_compressible(uncommitted());
    });
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const Head& head = *heads[i];
      const bool shares = head.is_adaptive_in_model() ? in_model : head.is_adaptive_in_layer() && in_layer;
      const bool ranked = shares || head.is_compressible(uncommitted());
      kvpolicy::check_queries("KvCache", call, queries, head.observed_queries(), tokens, ranked);
      if (!ranked || !head.roles().waits_for_scoring) continue;
      check_scored("KvCache", number, i, head.unscored_rows(uncommitted()), head.rows() + uncommitted());
    }
  }

  /// Whether a head's settings ask for a compression now, and it can be done.
  [[nodiscard]] bool is_due(const Head& head) const {
    return head.wants_compress() && head.unscored_rows(0) == 0 &&
           knows_latest(queries, head.observed_queries(), tokens);
  }
};

}  // namespace kvpolicy
