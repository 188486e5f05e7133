// SPDX-License-Identifier: Apache-2.0
//
// An attention engine that records what another engine does. It attends with the engine inside it,
// and notes which rows the last query of each call was given and how it attends to them. Caches use
// it like any other engine, so the record shows what really happens. A read with a bound comes in parts
// (core/bounded_attention.hpp): whoever makes one sets `Watch::in_parts`, and the record adds up their rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>

#include "../common/bytes_read.hpp"
#include "recording.hpp"

namespace kvpolicy::tools {

/// Sorts rows and joins neighbours to runs.
[[nodiscard]] RowRuns runs_of(std::vector<std::size_t> rows);

/// The rows of one KV head that the last query of a call read.
struct WatchedHead {
  RowRuns read;
  std::size_t bytes_read = 0;  ///< of cached rows and of upper halves; the call's own rows are still in
                               ///< the caller's memory
  std::vector<RowAttention> attention;  ///< by row, ascending
};

/// Where a WatchingEngine stores its record; must outlive the engine and its copies.
struct Watch {
  float least_attention = 0;
  bool in_parts = false;           ///< calls are parts of one read: their rows and bytes are added to `heads`
  std::vector<WatchedHead> heads;  ///< of the latest call: [kv_heads]
};

/// `Inner` is an AttentionEngine. Calls with a token tree are not recorded.
template <AttentionEngine Inner>
class WatchingEngine {
 public:
  WatchingEngine() = default;
  explicit WatchingEngine(Watch& watch) : watch_{&watch} {}

  void attend(const LayerAttention& work) {
    inner_.attend(work);
    if (watch_ == nullptr || work.options.tree != nullptr || work.queries.tokens == 0) return;
    if (watch_->in_parts) {
      add_part(work);
    } else {
      look(work);
    }
  }
  void bound(const LayerBounds& work)
    requires BoundingEngine<Inner>
  {
    inner_.bound(work);
    if (watch_ == nullptr) return;
    for (std::size_t head = 0; head < work.heads.size(); ++head) {
      for (const Segment& segment : work.heads[head]) {
        watch_->heads[head].bytes_read += bytes_of_rows(segment.keys, segment.rows, work.queries.head_dim);
      }
    }
  }
  void observe(const LayerObservation& work) { inner_.observe(work); }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) {
    inner_.score(rows, query, out);
  }

  /// Notes the rows of a call and the attention to them, as if it had been made.
  void look(const LayerAttention& work) {
    const std::size_t last = work.queries.tokens - 1;
    ConstTensor query = work.queries;
    query.data = work.queries.row(last, 0);
    query.tokens = 1;
    const std::size_t group = work.queries_per_kv();
    std::vector<std::vector<float>> sums(work.heads.size());
    std::vector<std::span<float>> views;
    for (std::size_t head = 0; head < sums.size(); ++head) {
      std::size_t rows = 0;
      for (const Segment& segment : work.heads[head]) {
        segment.for_each_run([&](const RowRun& run) { rows += run.rows; });
      }
      sums[head].resize(group * rows);
      views.emplace_back(sums[head]);
    }
    inner_.observe(LayerObservation{query, work.position(last), work.heads, views, work.options});
    watch_->heads.assign(sums.size(), {});
    for (std::size_t head = 0; head < sums.size(); ++head) {
      note(work, head, sums[head], watch_->heads[head]);
    }
  }

 private:
  void add_part(const LayerAttention& work) {
    const std::size_t last = work.queries.tokens - 1;
    for (std::size_t head = 0; head < work.heads.size(); ++head) {
      WatchedHead& seen = watch_->heads[head];
      std::vector<std::size_t> read;
      for (const RowRun& run : seen.read) {
        for (std::size_t i = 0; i < run.rows; ++i) read.push_back(run.first + i);
      }
      for (const Segment& segment : work.heads[head]) {
        std::size_t cached = 0;
        segment.for_each_run([&](const RowRun& run) {
          for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
            if (!work.sees(last, segment, row)) continue;
            read.push_back(static_cast<std::size_t>(segment.position_of(row)));
            cached += segment.position_of(row) < work.first_position ? 1 : 0;
          }
        });
        seen.bytes_read += bytes_of_rows(segment, cached, work.queries.head_dim);
      }
      seen.read = runs_of(std::move(read));
    }
  }

  void note(const LayerAttention& work, std::size_t head, std::span<const float> sums,
            WatchedHead& seen) const {
    const std::size_t last = work.queries.tokens - 1;
    const std::size_t group = work.queries_per_kv();
    const std::size_t rows = sums.size() / group;
    std::vector<std::size_t> read;
    std::size_t at = 0;
    for (const Segment& segment : work.heads[head]) {
      std::size_t cached = 0;
      segment.for_each_run([&](const RowRun& run) {
        for (std::size_t row = run.first; row < run.first + run.rows; ++row, ++at) {
          if (!work.sees(last, segment, row)) continue;
          read.push_back(static_cast<std::size_t>(segment.position_of(row)));
          cached += segment.position_of(row) < work.first_position ? 1 : 0;
          float share = 0;
          for (std::size_t query = 0; query < group; ++query) share += sums[query * rows + at];
          share /= static_cast<float>(group);
          if (share >= watch_->least_attention) seen.attention.push_back({read.back(), share});
        }
      });
      seen.bytes_read += bytes_of_rows(segment, cached, work.queries.head_dim);
    }
    seen.read = runs_of(std::move(read));
    std::ranges::sort(seen.attention, {}, &RowAttention::row);
  }

  Inner inner_;
  Watch* watch_ = nullptr;
};

}  // namespace kvpolicy::tools
