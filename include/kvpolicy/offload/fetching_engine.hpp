// SPDX-License-Identifier: Apache-2.0
//
// An engine that wraps any other engine and reads rows from slow memory before the inner engine uses them.
// It fetches a layer's rows when the layer is attended, and meanwhile reads ahead the rows of the layer
// that followed it the last time. Rows that cannot be read cause a StorageError here, before anything has
// changed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/memory/slow_memory.hpp>

namespace kvpolicy::offload {

/// An AttentionEngine that fetches the rows of a layer from slow memory and then calls an inner
/// engine. A copy has its own inner engine and shares the memory, which must outlive both.
template <AttentionEngine Inner>
class FetchingEngine {
 public:
  FetchingEngine(Inner inner, PageProvider& memory) : inner_{std::move(inner)}, memory_{&memory} {}

  [[nodiscard]] Inner& inner() { return inner_; }

  /// @throws StorageError, and what the inner engine throws; `observe`, `score` and `bound` throw the same
  void attend(const LayerAttention& work) {
    fetch(work.heads, work.queries.head_dim, work.out.head_dim);
    inner_.attend(work);
  }
  void observe(const LayerObservation& work) {
    fetch(work.heads, work.queries.head_dim, 0);  // values are not read
    inner_.observe(work);
  }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) {
    ranges_.clear();
    list_ranges(*memory_, rows, query.size(), 0, out.size(), ranges_);
    memory_->fetch(ranges_);
    inner_.score(rows, query, out);
  }
  void bound(const LayerBounds& work) {
    fetch(work.heads, work.queries.head_dim, 0);
    if constexpr (BoundingEngine<Inner>) {
      inner_.bound(work);
    } else {
      ScalarEngine{}.bound(work);
    }
  }

 private:
  using Range = PageProvider::Range;
  // A layer is identified by the address of its first slow rows, because full pages never move.
  using Layer = const std::byte*;
  struct Known {
    std::vector<Range> ranges;  // ranges of the latest read
    Layer next = nullptr;
  };
  /// If there are more layers than this, some belong to texts that no longer exist.
  static constexpr std::size_t most_layers = 4096;

  // Fetches keys of `head_dim` channels and values of `value_dim` channels; 0: no values.
  void fetch(std::span<const std::span<const Segment>> heads, std::size_t head_dim, std::size_t value_dim) {
    ranges_.clear();
    for (const auto segments : heads) {
      for (const Segment& segment : segments) {
        list_ranges(*memory_, segment, head_dim, value_dim, ranges_);
      }
    }
    if (ranges_.empty()) return;
    memory_->fetch(ranges_);
    // What a query chose says nothing of what the next one will read.
    const bool chosen = std::ranges::any_of(heads, [](std::span<const Segment> segments) {
      return std::ranges::any_of(segments, [](const Segment& rows) { return !rows.runs.empty(); });
    });
    if (value_dim == 0 || chosen) return;
    if (const std::vector<Range>* ahead = follow(ranges_.front().data())) memory_->fetch_ahead(*ahead);
  }

  // Records that `layer` was read. Returns what was read after it the last time, or null if that is
  // unknown.
  const std::vector<Range>* follow(Layer layer) {
    if (known_.size() >= most_layers) known_.clear();
    Known& own = known_[layer];
    own.ranges.assign(ranges_.begin(), ranges_.end());
    if (const auto last = known_.find(last_); last != known_.end()) last->second.next = layer;
    last_ = layer;
    const auto next = known_.find(own.next);
    return next == known_.end() || own.next == layer ? nullptr : &next->second.ranges;
  }

  Inner inner_;
  PageProvider* memory_;
  std::vector<Range> ranges_;
  std::unordered_map<Layer, Known> known_;
  Layer last_ = nullptr;
};

}  // namespace kvpolicy::offload
