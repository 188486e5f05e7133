// SPDX-License-Identifier: Apache-2.0
//
// Scores the rows of one layer's heads that are compressed: how each head ranks its rows, and the launches
// that this takes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <vector>

#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/observation.hpp>
#include <kvpolicy/cuda/score_launches.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// Rankings for the kernels. `take` must see the same heads as `run`.
template <Element E>
class RowScoring {
 public:
  RowScoring(const Engine<E>& engine, const Layer& layer, std::size_t page_rows)
      : engine_{&engine}, layer_{&layer}, page_rows_{static_cast<int>(page_rows)}, how_(layer.heads.size()) {}

  /// A head is compressed to `survivors` rows, if it does not share its budget.
  void add(std::size_t head, std::size_t survivors) {
    const HeadStore& store = layer_->heads[head];
    const HeadRule& rule = store.settings();
    const std::size_t rows = layer_->tokens - store.evicted();
    rows_ = std::max(rows_, rows);
    packs_ = packs_ || rule.is_quantized();
    // Where the text stays whole, the budget is all rows but those that are always kept.
    const bool by_keys = rule.ranking == Ranking::keys;
    how_[head] = {.ranking = rule.ranking,
                  .average = rule.pooling == Pooling::average,
                  .votes = rule.votes,
                  .kept_rows = static_cast<int>(rule.kept_rows),
                  .budget = static_cast<int>(rule.budget_rule().candidates(survivors)),
                  .kernel = static_cast<int>(rule.pooled_rows)};
    if (by_keys) {
      how_[head].scorer = engine_->own_kernels().number_of(rule.scorer);
      how_[head].key_numbers = rule.key_numbers;
    }
    if (survivors == rows && !rule.adaptive_in_layer) return;  // no row is compared with another
    how_[head].queries = static_cast<int>(rule.observation_window);
    how_[head].prior_share = rule.prior_share;
    how_[head].weighs_values = rule.weighs_values;
    how_[head].value_norm = rule.value_norm;
    how_[head].unweighed_share = rule.unweighed_share;
    lifts_ = lifts_ || rule.prior_share > 0.0;
    weighs_ = weighs_ || rule.weighs_values;
    weighs_lengths_ = weighs_lengths_ || (rule.weighs_values && rule.value_norm == ValueNorm::value_l2);
    weighs_outputs_ = weighs_outputs_ || how_[head].weighs_outputs();
    if (rule.ranking == Ranking::expected) {
      how_[head].scorer = number_of(*rule.expected);
      how_[head].first_rows = static_cast<int>(rule.first_rows);
      draws_ = std::max(draws_, how_[head].queries);
    } else {
      queries_ = std::max(queries_, how_[head].queries);
    }
    if (by_keys) key_scorers_.insert(how_[head].scorer);
    by_directions_ = by_directions_ || rule.ranking == Ranking::key_directions;
  }

  /// Scratch memory of one layer's scoring, on the device.
  struct Memory {
    CompressionSettings* how = nullptr;  ///< [kv_heads]
    float* scores = nullptr;             ///< [kv_heads, pitch]
    float* unpooled = nullptr;           ///< the same
    float* weighed = nullptr;            ///< the same, or null
    float* of_query_heads = nullptr;     ///< [q_heads, pitch], or null
    double* directions = nullptr;
    // Of queries to come (kernels/expected_queries.cuh).
    float* frequencies = nullptr;  ///< [settings, head_dim / 2]
    float* moments = nullptr;
    double* logits = nullptr;
    typename Engine<E>::ObserveMemory observe = {};
  };
  [[nodiscard]] Memory take(ArrayCarver& carver) const {
    Memory memory{.how = carver.take<CompressionSettings>(how_.size()),
                  .scores = carver.take<float>(how_.size() * rows_),
                  .unpooled = carver.take<float>(how_.size() * rows_)};
    if (weighs_) memory.weighed = carver.take<float>(how_.size() * rows_);
    if (weighs_outputs_) memory.of_query_heads = carver.take<float>(engine_->shape().q_heads * rows_);
    if (queries_ > 0) memory.observe = engine_->observe_memory(carver, queries_);
    if (by_directions_) memory.directions = directions_memory(*engine_, carver);
    if (!expected_.empty()) {
      const ModelShape& shape = engine_->shape();
      memory.frequencies = carver.take<float>(expected_.size() * shape.head_dim / 2);
      memory.moments = carver.take<float>(shape.q_heads * shape.head_dim *
                                          static_cast<std::size_t>(expected_columns(draws_)));
      memory.logits = carver.take<double>(shape.q_heads * rows_);
    }
    return memory;
  }
  [[nodiscard]] RowScores scores(const Memory& memory) const {
    return {memory.scores, memory.unpooled, pitch(), memory.weighed};
  }

  /// Tells the kernels how each head ranks its rows, and scores the rows; sums that are added up need no
  /// work. @throws DeviceError
  void run(const Memory& memory, const HeadView* views, const LayerState* state, cudaStream_t stream) const {
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < how_.size(); ++head) writes.write(memory.how + head, how_[head]);
    writes.flush();
    for (const int scorer : key_scorers_) {
      engine_->score_keys({.heads = views,
                           .state = state,
                           .compressions = memory.how,
                           .scorer = scorer,
                           .page_rows = page_rows_,
                           .scores = memory.scores,
                           .pitch = pitch()},
                          stream);
    }
    if (by_directions_) {
      score_directions(*engine_,
                       {.heads = views,
                        .state = state,
                        .compressions = memory.how,
                        .page_rows = page_rows_,
                        .sums = memory.directions,
                        .scores = memory.scores,
                        .pitch = pitch()},
                       stream);
    }
    if (queries_ > 0) {
      ObserveParams observed =
          observe_latest(*engine_, *layer_, views, state, page_rows_, memory.observe, stream);
      observed.compressions = memory.how;
      observed.queries = queries_;
      engine_->score_votes({.observed = observed,
                            .scores = memory.scores,
                            .unpooled = memory.unpooled,
                            .of_query_heads = memory.of_query_heads,
                            .pitch = pitch()},
                           packs_, stream);
    }
    expect(memory, views, state, stream);
    if (lifts_) {
      lift_scores(*engine_,
                  {.heads = views,
                   .state = state,
                   .compressions = memory.how,
                   .group = static_cast<int>(engine_->shape().queries_per_kv()),
                   .scores = memory.scores,
                   .of_query_heads = memory.of_query_heads,
                   .pitch = pitch()},
                  stream);
    }
    weigh(memory, views, state, stream);
  }

 private:
  // The number of what a head expects, among what heads of the layer do.
  [[nodiscard]] int number_of(const ExpectedQueries& expected) {
    const auto found = std::ranges::find(expected_, expected);
    const auto number = static_cast<int>(found - expected_.begin());
    if (found == expected_.end()) expected_.push_back(expected);
    return number;
  }
  void expect(const Memory& memory, const HeadView* views, const LayerState* state,
              cudaStream_t stream) const {
    const ModelShape& shape = engine_->shape();
    const QueryRing& queries = layer_->queries;
    const double scale = layer_->scale ? static_cast<double>(*layer_->scale)
                                       : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      float* place = memory.frequencies + i * shape.head_dim / 2;
      const std::vector<float> frequencies = inverse_frequencies(expected_[i].rotary, shape.head_dim);
      struct TwoFloats {
        float number[2];
      };
      DeviceWrites writes{stream};
      for (std::size_t pair = 0; pair < frequencies.size(); pair += 2) {
        writes.write(reinterpret_cast<TwoFloats*>(place + pair),
                     TwoFloats{{frequencies[pair], frequencies[pair + 1]}});
      }
      writes.flush();
      score_expected(*engine_,
                     {.heads = views,
                      .state = state,
                      .compressions = memory.how,
                      .setting = static_cast<int>(i),
                      .group = static_cast<int>(shape.queries_per_kv()),
                      .page_rows = page_rows_,
                      .q = queries.view(),
                      .query_slots = static_cast<int>(queries.slots()),
                      .first_query = static_cast<int>(queries.end() - queries.size()),
                      .future = static_cast<int>(expected_[i].future),
                      .inverse_frequencies = place,
                      .scale = scale,
                      .columns = expected_columns(draws_),
                      .moments = memory.moments,
                      .logits = memory.logits,
                      .scores = memory.scores,
                      .unpooled = memory.unpooled,
                      .of_query_heads = memory.of_query_heads,
                      .pitch = pitch()},
                     stream);
    }
  }
  void weigh(const Memory& memory, const HeadView* views, const LayerState* state,
             cudaStream_t stream) const {
    const WeighValuesParams rows{.heads = views,
                                 .state = state,
                                 .compressions = memory.how,
                                 .page_rows = page_rows_,
                                 .scores = memory.scores,
                                 .weighed = memory.weighed,
                                 .pitch = pitch()};
    if (weighs_lengths_) weigh_values(*engine_, rows, stream);
    if (!weighs_outputs_) return;
    const ConstTensor& weights = *layer_->outputs;
    weigh_outputs(*engine_,
                  {.rows = rows,
                   .group = static_cast<int>(engine_->shape().queries_per_kv()),
                   .of_query_heads = memory.of_query_heads,
                   .weights = {.data = const_cast<std::byte*>(weights.data),
                               .token_stride = static_cast<long long>(weights.token_stride),
                               .head_stride = static_cast<long long>(weights.head_stride)},
                   .outputs = static_cast<int>(weights.tokens)},
                  stream);
  }
  [[nodiscard]] long long pitch() const { return static_cast<long long>(rows_); }

  const Engine<E>* engine_;
  const Layer* layer_;
  int page_rows_;
  std::vector<CompressionSettings> how_;   // of each head
  std::size_t rows_ = 0;                   // rows of a head
  int queries_ = 0;                        // latest queries that a head asks to compare its rows
  std::set<int> key_scorers_;              // whose functions of the key are asked
  std::vector<ExpectedQueries> expected_;  // what heads expect, each once
  int draws_ = 0;                          // latest queries that stand for those to come, of a head
  bool by_directions_ = false;             // whether a head is ranked by what its keys have in common
  bool packs_ = false;
  bool lifts_ = false;           // whether a head's scores are lifted to a share of their mean
  bool weighs_ = false;          // whether a head's scores are multiplied by norms of values,
  bool weighs_lengths_ = false;  // by their lengths,
  bool weighs_outputs_ = false;  // or by those of what they become in the output projection
};

}  // namespace kvpolicy::gpu
