// SPDX-License-Identifier: Apache-2.0
//
// How heads with a budget drop rows: what their scorers want to know is asked of the engine, every
// head's survivors are copied to fresh pages, and swapped in when nothing can fail any more.
#pragma once

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/layer.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
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

/// Fills `sums` with what the attention that the latest `window` queries that the layer has kept pay to the rows in
/// `heads` comes to. Returns how many queries are known, at most `window`.
/// @throws what the engine throws, std::bad_alloc
template <class Layer, AttentionEngine Engine>
std::size_t observe_latest(const Layer& layer, Engine& engine, std::size_t window, Votes votes,
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
          .scale = layer.scale, .softcap = layer.softcap, .attention_sink_bias = layer.attention_sink_bias},
      votes});
  return count;
}

/// Fills `sums` with the attention that queries to come can be expected to pay to the rows of KV head `head`, by the
/// latest `window` queries that the layer has kept. Returns how many are known.
/// @throws std::bad_alloc
template <class Layer>
std::size_t expect_by_latest(const Layer& layer, std::size_t window, std::size_t head,
                             const ExpectedQueries& expected, std::span<const Segment> rows,
                             std::span<float> sums) {
  using E = typename Layer::element_type;
  const LayerShape& shape = layer.shape;
  std::vector<E> kept(window * shape.q_heads * shape.head_dim);
  const std::size_t count = layer.queries.copy_latest(window, kept.data());
  const std::size_t group = shape.queries_per_kv();
  std::vector<float> queries(count * group * shape.head_dim);
  for (std::size_t i = 0; i < count; ++i) {
    const E* from = kept.data() + (i * shape.q_heads + head * group) * shape.head_dim;
    std::transform(from, from + group * shape.head_dim,
                   queries.begin() + static_cast<std::ptrdiff_t>(i * group * shape.head_dim),
                   [](E number) { return static_cast<float>(number); });
  }
  const double scale =
      layer.scale ? static_cast<double>(*layer.scale) : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  expect_attention(expected, queries, group, shape.head_dim, static_cast<std::int64_t>(layer.tokens - count),
                   scale, rows, sums);
  return count;
}

/// One compression of a cache's layers. `Layer` is a CacheLayer.
template <class Layer, AttentionEngine Engine>
class Compression {
 public:
  /// `observed_rows` grows by the keys that are read, once nothing can fail any more.
  Compression(Engine& engine, std::size_t& observed_rows) : engine_{engine}, observed_rows_{observed_rows} {}

  /// All heads that compress, or those alone whose settings ask for it now.
  /// @throws std::bad_alloc, StorageError, ShapeError if rows have no scores that need them, with all heads as they were
  void run(std::span<Layer> layers, bool only_due) {
    std::vector<std::vector<bool>> active;
    active.reserve(layers.size());
    for (Layer& layer : layers) active.push_back(active_heads(layer, only_due));
    KVPOLICY_TRY {
      shares_in_model_ = false;
      for (std::size_t l = 0; l < layers.size(); ++l) {
        for (std::size_t i = 0; i < active[l].size(); ++i) {
          const Head& head = *layers[l].heads[i];
          if (active[l][i] && head.is_adaptive_in_model() && head.is_compressible(0)) shares_in_model_ = true;
        }
      }
      for (std::size_t l = 0; l < layers.size(); ++l) prepare(layers[l], active[l]);
      in_model_.share();
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
  // Heads whose rows compete, and what each brings.
  struct Competition {
    std::vector<Head*> heads;
    std::vector<SharingHead> rows;

    void add(Head& head, SharingHead own) {
      heads.push_back(&head);
      rows.push_back(std::move(own));
    }
    // Each head is told which of its rows survive.
    void share() {
      auto chosen = share_rows(rows);
      for (std::size_t i = 0; i < heads.size(); ++i) heads[i]->prepare_survivors(std::move(chosen[i]));
      heads.clear();
      rows.clear();
    }
  };
  // What is asked of the engine at once.
  struct Question {
    std::size_t window;  // latest queries
    Votes votes;
    friend auto operator<=>(const Question&, const Question&) = default;
  };

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
      one_shares = one_shares || (ranked[i] && head.is_adaptive_in_layer() && !head.is_adaptive_in_model());
    }
    std::set<Question, std::greater<>> questions;
    sums_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Head& head = *layer.heads[i];
      if (head.is_adaptive_in_model()) {
        ranked[i] = active[i] && shares_in_model_;
      } else if (head.is_adaptive_in_layer()) {
        ranked[i] = one_shares;
      }
      sums_[i].clear();
      if (!ranked[i]) continue;
      check_scored("KvCache", layer.number, i, head.unscored_rows(), head.rows());
      questions.insert({head.observed_queries(), head.votes()});
    }
    for (const Question& question : questions) {
      std::vector<bool> asked(count, false);
      for (std::size_t i = 0; i < count; ++i) {
        const Head& head = *layer.heads[i];
        asked[i] = ranked[i] && Question{head.observed_queries(), head.votes()} == question;
      }
      const std::size_t seen = question.window == 0 ? 0 : observe(layer, question, asked);
      for (std::size_t i = 0; i < count; ++i) {
        if (!asked[i]) continue;
        Head& head = *layer.heads[i];
        const std::size_t group = layer.shape.queries_per_kv();
        if (head.is_adaptive_in_layer()) {
          Competition& with = head.is_adaptive_in_model() ? in_model_ : in_layer_;
          with.add(head, head.compete(sums_[i], group, seen));
        } else {
          head.prepare_compress(sums_[i], group, seen);
        }
      }
    }
    in_layer_.share();
  }

  // Fills the sums of these heads with the attention of the latest queries, of which so many are known.
  std::size_t observe(Layer& layer, const Question& question, const std::vector<bool>& asked) {
    std::vector<SegmentList> shown(layer.heads.size());
    std::vector<std::span<const Segment>> heads(layer.heads.size());
    std::vector<std::span<float>> sums(layer.heads.size());
    std::size_t expecting = 0, observing = 0;
    for (std::size_t i = 0; i < layer.heads.size(); ++i) {
      if (!asked[i]) continue;
      const Head& head = *layer.heads[i];
      head.show({.first_position = static_cast<std::int64_t>(layer.tokens)}, shown[i]);
      sums_[i].resize(layer.shape.queries_per_kv() * head.rows());
      read_ += head.rows();
      if (const auto expected = head.expected_queries()) {
        expecting = expect_by_latest(layer, question.window, i, *expected, shown[i], sums_[i]);
        continue;
      }
      heads[i] = shown[i];
      sums[i] = sums_[i];
      ++observing;
    }
    if (observing == 0) return expecting;
    return observe_latest(layer, engine_, question.window, question.votes, heads, sums);
  }

  Engine& engine_;
  std::size_t& observed_rows_;
  std::size_t read_ = 0;                  // keys, by this compression
  bool shares_in_model_ = false;          // whether heads that share over the model lose rows
  std::vector<std::vector<float>> sums_;  // of each head, [group, rows]
  Competition in_layer_;                  // of the current layer
  Competition in_model_;
};

/// What the heads of a layer that add up attention get from one call.
struct CallSums {
  std::vector<std::vector<float>> of_heads;  ///< [kv_heads] of [group, rows shown], or empty
  detail::Scratch<std::span<const Segment>> shown;
  detail::Scratch<std::span<float>> views;
};

/// Fills `sums` for a call whose attention the heads have just been shown. A head that need not know the call has none.
/// @throws what the engine throws
template <class Layer, AttentionEngine Engine>
void observe_call(const Layer& layer, Engine& engine, const LayerAttention& call, CallSums& sums,
                  std::size_t& observed_rows) {
  const std::size_t count = layer.heads.size();
  const std::span<std::span<const Segment>> heads = sums.shown.take(count);
  const std::span<std::span<float>> views = sums.views.take(count);
  sums.of_heads.resize(count);
  std::size_t read = 0;
  for (const Votes votes : {Votes::mean, Votes::largest}) {
    bool any = false;
    for (std::size_t i = 0; i < count; ++i) {
      const Head& head = *layer.heads[i];
      const HeadRoles& roles = head.roles();
      const bool wants = roles.accumulates && (!roles.waits_for_scoring || call.options.scores_rows);
      if (!wants) sums.of_heads[i].clear();
      heads[i] = {};
      views[i] = {};
      if (!wants || head.votes() != votes) continue;
      heads[i] = call.heads[i];
      const std::size_t rows = count_rows(heads[i]);
      sums.of_heads[i].resize(call.queries_per_kv() * rows);  // from the last call's size: grows by doubling
      views[i] = sums.of_heads[i];
      read += rows;
      any = true;
    }
    if (!any) continue;
    engine.observe(LayerObservation{call.queries, call.first_position, heads, views,
                                    AttendOptions{.scale = call.options.scale,
                                                  .softcap = call.options.softcap,
                                                  .attention_sink_bias = call.options.attention_sink_bias},
                                    votes});
  }
  observed_rows += read;
}

}  // namespace kvpolicy
