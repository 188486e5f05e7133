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
#include <optional>
#include <set>
#include <span>
#include <utility>
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

/// What the latest queries of a layer let expect of those to come.
template <class Layer>
class LatestQueries {
  using E = typename Layer::element_type;

 public:
  /// The latest `window` that the layer has kept. @throws std::bad_alloc
  LatestQueries(const Layer& layer, std::size_t window)
      : layer_{layer}, kept_(window * layer.shape.q_heads * layer.shape.head_dim) {
    count_ = layer.queries.copy_latest(window, kept_.data());
  }

  [[nodiscard]] std::size_t count() const { return count_; }

  /// Fills `sums` with the attention that is expected to be paid to the rows of KV head `head`.
  /// @throws std::bad_alloc
  void expect(const ExpectedQueries& expected, std::size_t head, std::span<const Segment> rows,
              std::span<float> sums) {
    const LayerShape& shape = layer_.shape;
    const auto end = static_cast<std::int64_t>(layer_.tokens);
    if (!rotation_ || expected_ != expected) {
      rotation_.emplace(expected, shape.head_dim, end);
      expected_ = expected;
    }
    const std::size_t group = shape.queries_per_kv();
    std::vector<float> queries;
    queries.reserve(count_ * group * shape.head_dim);
    for (std::size_t i = 0; i < count_; ++i) {
      const E* from = kept_.data() + (i * shape.q_heads + head * group) * shape.head_dim;
      for (std::size_t j = 0; j < group * shape.head_dim; ++j) queries.push_back(static_cast<float>(from[j]));
    }
    const double scale = layer_.scale ? static_cast<double>(*layer_.scale)
                                      : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
    expect_attention(*rotation_, queries, group, shape.head_dim, end - static_cast<std::int64_t>(count_),
                     scale, rows, sums);
  }

 private:
  const Layer& layer_;
  std::vector<E> kept_;
  std::size_t count_ = 0;
  ExpectedQueries expected_;
  std::optional<MeanRotation> rotation_;
};

/// Whether a head that shares its budget over the model would lose rows once those of the tail were committed: then all
/// such heads are ranked.
template <class Layer>
[[nodiscard]] bool one_drops_in_model(std::span<const Layer> layers) {
  return std::ranges::any_of(layers, [](const Layer& layer) {
    return std::ranges::any_of(layer.heads, [&](const HeadPtr& head) {
      return head->is_adaptive_in_model() && head->is_compressible(layer.uncommitted());
    });
  });
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
      shares_in_model_ = !only_due && one_drops_in_model<Layer>(layers);
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

  // Heads that share over the model do not compress by themselves.
  static bool shares_in_layer(const Head& head) {
    return head.is_adaptive_in_layer() && !head.is_adaptive_in_model();
  }

  static std::vector<bool> active_heads(const Layer& layer, bool only_due) {
    const std::size_t count = layer.heads.size();
    std::vector<bool> active(count, false);
    bool one_shares = false;
    for (std::size_t i = 0; i < count; ++i) {
      const Head& head = *layer.heads[i];
      if (!head.roles().compresses) continue;
      active[i] = !only_due || layer.is_due(head);
      one_shares = one_shares || (active[i] && shares_in_layer(head));
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (shares_in_layer(*layer.heads[i])) active[i] = one_shares;
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
      one_shares = one_shares || (ranked[i] && shares_in_layer(head));
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
    std::optional<LatestQueries<Layer>> latest;  // if a head expects
    bool observing = false;
    for (std::size_t i = 0; i < layer.heads.size(); ++i) {
      if (!asked[i]) continue;
      const Head& head = *layer.heads[i];
      head.show({.first_position = static_cast<std::int64_t>(layer.tokens)}, shown[i]);
      sums_[i].resize(layer.shape.queries_per_kv() * head.rows());
      read_ += head.rows();
      if (const auto expected = head.expected_queries()) {
        if (!latest) latest.emplace(layer, question.window);
        latest->expect(*expected, i, shown[i], sums_[i]);
        continue;
      }
      heads[i] = shown[i];
      sums[i] = sums_[i];
      observing = true;
    }
    if (!observing) return latest ? latest->count() : 0;
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
