// SPDX-License-Identifier: Apache-2.0
//
// A model that reads a text over a full cache and reports, when a token is read, which rows each
// query head attends to and how much. The methods that find important heads use it.
//
//     reference::ObservedText<cpu::Engine<>> text{model};
//     text.read(prompt);                                    // quickly, unobserved
//     logits = text.observe(token, [](layer, q_head, attention) { … });
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/duo.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// `attention` is [tokens read, this one included], the share of each position; the shares sum to
/// 1. Called for every layer, then for every query head, in order.
using AttentionVisit =
    std::function<void(std::size_t layer, std::size_t q_head, std::span<const float> attention)>;

/// The model must outlive it. Cannot be copied; not thread-safe.
template <AttentionEngine Engine = ScalarEngine>
class ObservedText {
 public:
  /// @throws ConfigError if the model's shape is impossible
  explicit ObservedText(const Llama& model) : model_{&model}, cache_{plan_for_model(model.config())} {}

  [[nodiscard]] std::size_t tokens() const { return cache_.tokens(); }

  /// Reads more tokens, `chunk` at a time. Returns logits of the last one, or none for no tokens.
  std::vector<float> read(std::span<const int> tokens, std::size_t chunk = 512) {
    if (tokens.empty()) return {};
    return prefill(*model_, cache_, tokens, chunk);
  }

  /// Reads one token, shows `visit` the attention of each query head, and returns the token's
  /// logits.
  std::vector<float> observe(int token, const AttentionVisit& visit) {
    require_ready(*model_, cache_);
    const std::array one{token};
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
      show(layer, q, k, v, visit);
      cache_.step(layer, q, k, v, out);
    };
    return model_->forward(one, cache_.tokens(), attend, LogitsOf::last);
  }

 private:
  [[nodiscard]] static HeadPlan<float> plan_for_model(const LlamaConfig& config) {
    HeadPlan<float> plan{config.shape()};
    limit_windows(plan, config);
    return plan;
  }

  // Runs before the row is appended, so that the cache shows exactly what this query may see.
  void show(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v, const AttentionVisit& visit) {
    const std::size_t position = cache_.tokens(layer);
    const std::size_t group = q.heads / k.heads;
    std::vector<SegmentList> lists(k.heads);
    std::vector<std::span<const Segment>> heads;
    std::vector<std::vector<float>> sums(k.heads);
    std::vector<std::span<float>> sum_views;
    for (std::size_t head = 0; head < k.heads; ++head) {
      SegmentList& list = lists[head];
      list = cache_.segments(layer, head);
      list.push_back(
          rows_of(k.row(0, head), v.row(0, head), 1, k.head_dim, static_cast<std::int64_t>(position)));
      std::size_t rows = 0;
      for (const Segment& segment : list) rows += segment.rows;
      sums[head].resize(group * rows);
      heads.emplace_back(list);
      sum_views.emplace_back(sums[head]);
    }
    cache_.engine().observe(LayerObservation{ConstTensor{q}, static_cast<std::int64_t>(position), heads,
                                             sum_views, AttendOptions{}});
    std::vector<float> attention(position + 1);
    for (std::size_t q_head = 0; q_head < q.heads; ++q_head) {
      const std::size_t head = q_head / group;
      const std::size_t rows = sums[head].size() / group;
      const float* share = sums[head].data() + q_head % group * rows;
      std::ranges::fill(attention, 0.0F);
      for (const Segment& segment : lists[head]) {
        for (std::size_t row = 0; row < segment.rows; ++row) {
          attention[static_cast<std::size_t>(segment.position_of(row))] = *share++;
        }
      }
      visit(layer, q_head, attention);
    }
  }

  const Llama* model_;
  KvCache<float, Engine> cache_;
};

}  // namespace kvpolicy::reference
