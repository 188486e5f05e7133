// SPDX-License-Identifier: Apache-2.0
//
// How heads with a budget drop rows: what their scorers want to know is asked of the engine, every
// head's survivors are copied to fresh pages, and swapped in when nothing can fail any more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <vector>

#include <kvpolicy/cache/layer.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/scratch.hpp>
#include <kvpolicy/policy/head.hpp>
#include <kvpolicy/policy/shared_rows.hpp>

namespace kvpolicy {

/// The rows that segments show.
[[nodiscard]] inline std::size_t count_rows(std::span<const Segment> segments) {
  std::size_t rows = 0;
  for (const Segment& segment : segments) {
    segment.for_each_run([&](const RowRun& run) { rows += run.rows; });
  }
  return rows;
}

/// Fills `sums` with the attention that the latest `window` queries that the layer has kept pay to the rows in
/// `heads`. Returns how many queries are known, at most `window`.
/// @throws what the engine throws, std::bad_alloc
template <class Layer, AttentionEngine Engine>
std::size_t observe_latest(const Layer& layer, Engine& engine, std::size_t window,
                           std::span<const std::span<const Segment>> heads,
                           std::span<const std::span<float>> sums) {
  using E = typename Layer::element_type;
  const LayerShape& shape = layer.shape;
  std::vector<E> queries(window * shape.q_heads * shape.head_dim);
  const std::size_t count = layer.queries.copy_latest(window, queries.data());
  const TensorView<const E> view{queries.data(), count, shape.q_heads, shape.head_dim};
  engine.observe(LayerObservation{
      ConstTensor{view}, static_cast<std::int64_t>(layer.tokens - count), heads, sums,
      AttendOptions{
          .scale = layer.scale, .softcap = layer.softcap, .attention_sink_bias = layer.attention_sink_bias}});
  return count;
}

/// One compression of a cache's layers. `Layer` is a CacheLayer.
template <class Layer, AttentionEngine Engine>
class Compression {
 public:
  /// `observed_rows` grows by the keys that are read, once nothing can fail any more.
  Compression(Engine& engine, std::size_t& observed_rows) : engine_{engine}, observed_rows_{observed_rows} {}

  /// All heads that compress, or those alone whose settings ask for it now.
  /// @throws std::bad_alloc, StorageError, with all heads as they were
  void run(std::span<Layer> layers, bool only_due) {
    std::vector<std::vector<bool>> active;
    active.reserve(layers.size());
    for (Layer& layer : layers) active.push_back(active_heads(layer, only_due));
    KVPOLICY_TRY {
      for (std::size_t l = 0; l < layers.size(); ++l) prepare(layers[l], active[l]);
    }
    KVPOLICY_CATCH_ALL {
      for (const Layer& layer : layers) {
        for (const HeadPtr& head : layer.heads) head->end_compress(false);
      }
      KVPOLICY_RETHROW;
    }
    // Nothing may fail from here on.
    observed_rows_ += read_;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      for (std::size_t head = 0; head < active[l].size(); ++head) {
        if (active[l][head]) layers[l].heads[head]->end_compress(true);
      }
    }
  }

 private:
  static std::vector<bool> active_heads(const Layer& layer, bool only_due) {
    const std::size_t count = layer.heads.size();
    std::vector<bool> active(count, false);
    bool one_shares = false;
    for (std::size_t i = 0; i < count; ++i) {
      const Head& head = *layer.heads[i];
      if (!head.roles().compresses) continue;
      active[i] = !only_due || layer.is_due(head);
      one_shares = one_shares || (active[i] && head.is_adaptive_in_layer());
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (layer.heads[i]->is_adaptive_in_layer()) active[i] = one_shares;
    }
    return active;
  }

  void prepare(Layer& layer, const std::vector<bool>& active) {
    // Who loses rows, and how many queries each asks: heads that want fewer are observed apart.
    const std::size_t count = layer.heads.size();
    std::vector<bool> ranked(count, false);
    bool one_shares = false;
    for (std::size_t i = 0; i < count; ++i) {
      const Head& head = *layer.heads[i];
      ranked[i] = active[i] && head.is_compressible(0);
      one_shares = one_shares || (ranked[i] && head.is_adaptive_in_layer());
    }
    std::set<std::size_t, std::greater<>> windows;
    sums_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Head& head = *layer.heads[i];
      if (head.is_adaptive_in_layer()) ranked[i] = one_shares;
      sums_[i].clear();
      if (ranked[i]) windows.insert(head.observed_queries());
    }
    sharing_.clear();
    for (const std::size_t window : windows) {
      std::vector<bool> asked(count, false);
      for (std::size_t i = 0; i < count; ++i) {
        asked[i] = ranked[i] && layer.heads[i]->observed_queries() == window;
      }
      const std::size_t seen = window == 0 ? 0 : observe(layer, window, asked);
      for (std::size_t i = 0; i < count; ++i) {
        if (!asked[i]) continue;
        Head& head = *layer.heads[i];
        if (head.is_adaptive_in_layer()) {
          sharing_.push_back(head.compete(sums_[i], layer.shape.queries_per_kv(), seen));
        } else {
          head.prepare_compress(sums_[i], layer.shape.queries_per_kv(), seen);
        }
      }
    }
    if (!one_shares) return;
    // Heads that share ask the same queries, so they have come in the order of the heads.
    auto chosen = share_rows(sharing_);
    auto next = chosen.begin();
    for (const HeadPtr& head : layer.heads) {
      if (head->is_adaptive_in_layer()) head->prepare_survivors(std::move(*next++));
    }
  }

  // Fills the sums of these heads with the attention of the latest `window` queries, of which so many
  // are known.
  std::size_t observe(Layer& layer, std::size_t window, const std::vector<bool>& asked) {
    std::vector<SegmentList> shown(layer.heads.size());
    std::vector<std::span<const Segment>> heads(layer.heads.size());
    std::vector<std::span<float>> sums(layer.heads.size());
    for (std::size_t i = 0; i < layer.heads.size(); ++i) {
      if (!asked[i]) continue;
      const Head& head = *layer.heads[i];
      head.show({.first_position = static_cast<std::int64_t>(layer.tokens)}, shown[i]);
      heads[i] = shown[i];
      sums_[i].resize(layer.shape.queries_per_kv() * head.rows());
      sums[i] = sums_[i];
      read_ += head.rows();
    }
    return observe_latest(layer, engine_, window, heads, sums);
  }

  Engine& engine_;
  std::size_t& observed_rows_;
  std::size_t read_ = 0;                  // keys, by this compression
  std::vector<std::vector<float>> sums_;  // of each head, [group, rows]
  std::vector<SharingHead> sharing_;      // of the heads that share, in their order
};

/// What the heads of a layer that add up attention get from one call.
struct CallSums {
  std::vector<std::vector<float>> of_heads;  ///< [kv_heads] of [group, rows shown], or empty
  detail::Scratch<std::span<const Segment>> shown;
  detail::Scratch<std::span<float>> views;
};

/// Fills `sums` for a call whose attention the heads have just been shown.
/// @throws what the engine throws
template <class Layer, AttentionEngine Engine>
void observe_call(const Layer& layer, Engine& engine, const LayerAttention& call, CallSums& sums,
                  std::size_t& observed_rows) {
  const std::size_t count = layer.heads.size();
  const std::span<std::span<const Segment>> heads = sums.shown.take(count);
  const std::span<std::span<float>> views = sums.views.take(count);
  sums.of_heads.resize(count);
  std::size_t read = 0;
  for (std::size_t head = 0; head < count; ++head) {
    heads[head] = layer.heads[head]->roles().accumulates ? call.heads[head] : std::span<const Segment>{};
    const std::size_t rows = count_rows(heads[head]);
    sums.of_heads[head].resize(call.queries_per_kv() * rows);  // from the last call's size: grows by doubling
    views[head] = sums.of_heads[head];
    read += rows;
  }
  engine.observe(LayerObservation{call.queries, call.first_position, heads, views,
                                  AttendOptions{.scale = call.options.scale,
                                                .softcap = call.options.softcap,
                                                .attention_sink_bias = call.options.attention_sink_bias}});
  observed_rows += read;
}

}  // namespace kvpolicy
