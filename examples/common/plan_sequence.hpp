// SPDX-License-Identifier: Apache-2.0
//
// The sequences of sequence.hpp, for rows of one element type: what sequence.cpp and float_rows.cpp compile.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cpu.hpp>
#include <kvpolicy/fastgen.hpp>
#include <kvpolicy/policy/chunk_summary.hpp>
#include <reference_model/run.hpp>
#include <reference_model/scoring_pass.hpp>

#include "bytes_read.hpp"
#include "footprint.hpp"
#include "sequence.hpp"

namespace kvpolicy::tools {

template <Element E>
class PlanSequence final : public Sequence {
 public:
  using Cache = cpu::KvCache<E>;

  PlanSequence(const reference::Llama& model, Cache cache) : model_{&model}, cache_{std::move(cache)} {}

  [[nodiscard]] std::unique_ptr<Sequence> fork() const override {
    auto fork = std::make_unique<PlanSequence>(*model_, cache_.fork());
    fork->fastgen_ = fastgen_;
    fork->footprint_ = footprint_;
    return fork;
  }

  [[nodiscard]] std::unique_ptr<Sequence> fork_as(HeadPlan<bfloat16> plan) const override {
    if constexpr (std::same_as<E, bfloat16>) {
      reference::limit_windows(plan, model_->config());
      auto fork = std::make_unique<PlanSequence>(*model_, cache_.fork_as(std::move(plan)));
      fork->footprint_ = footprint_;
      return fork;
    } else {
      return Sequence::fork_as(std::move(plan));
    }
  }

  std::vector<float> prefill(std::span<const int> tokens, std::size_t chunk, const Report& report) override {
    std::size_t rows = rows_held();
    std::size_t read = 0;
    return reference::prefill(*model_, cache_, tokens, chunk, [&](std::size_t done, std::size_t total) {
      footprint_.add(rows, heads(), done - read);
      rows = rows_held();
      read = done;
      if (report) report(done, total);
    });
  }

  std::vector<float> decode(int token, const Reading& reading) override {
    AttendOptions options{.read = reading.read, .refresh_selection = reading.refresh_each_step};
    if (reading.read == Read::bounded) {
      options.bound.epsilon = reading.epsilon;
      options.bound.certainty = reading.certainty;
      rows_read_.assign(cache_.plan().shape().kv_heads, 0);
      options.bound.rows_read = rows_read_;
    }
    const std::size_t rows = rows_held();
    auto logits = reference::step(*model_, cache_, std::array{token}, reference::LogitsOf::last, options);
    footprint_.add(rows, heads(), 1);
    return logits;
  }

  std::vector<float> score(std::span<const int> tokens) override {
    const std::size_t rows = rows_held();
    auto logits = reference::step(*model_, cache_, tokens, reference::LogitsOf::all);
    footprint_.add(rows, heads(), tokens.size());
    return logits;
  }

  void compress() override {
    if (fastgen_) {
      if constexpr (std::same_as<E, bfloat16>) {
        const AttentionProfile profile = profile_attention(cache_, fastgen_->observation_window);
        auto plan = fastgen_plan<E>(cache_.plan().shape(), profile, *fastgen_);
        reference::limit_windows(plan, model_->config());
        cache_ = cache_.fork_as(std::move(plan));
        fastgen_.reset();
      }
    }
    cache_.compress();
  }

  void score_rows(std::span<const int> text, const reference::RepeatRequest& ask) override {
    // A pass reads over a fork, which holds what this cache does and its own rows.
    std::size_t read = 0;
    reference::score_by_repeating(*model_, cache_, text, ask, 512, [&](std::size_t done, std::size_t total) {
      footprint_.add(rows_held() + read * heads(), heads(), done - read);
      read = done == total ? 0 : done;
    });
  }

  [[nodiscard]] std::vector<double> largest_scores(std::size_t sinks, std::size_t recent) const override {
    const ModelShape& shape = cache_.plan().shape();
    std::vector<double> largest;
    for (std::size_t i = 0; i < shape.kv_head_count(); ++i) {
      const Head& head = cache_.head(i / shape.kv_heads, i % shape.kv_heads);
      double most = 0.0;
      if (head.roles().waits_for_scoring) {
        const std::span<const double> scores = head.accumulated();
        for (std::size_t row = sinks; row + recent < scores.size(); ++row) most = std::max(most, scores[row]);
      }
      largest.push_back(most);
    }
    return largest;
  }

  void choose_after_prompt(const FastGenConfig& config) override {
    if constexpr (std::same_as<E, bfloat16>) {
      fastgen_ = config;
    } else {
      Sequence::choose_after_prompt(config);
    }
  }

  [[nodiscard]] std::size_t tokens() const override { return cache_.tokens(); }
  [[nodiscard]] std::size_t bytes() const override { return cache_.bytes(); }

  [[nodiscard]] double footprint() const override {
    return footprint_.share_of_full(heads(), cache_.tokens());
  }

  [[nodiscard]] std::vector<std::size_t> head_bytes() const override {
    const ModelShape& shape = cache_.plan().shape();
    std::vector<std::size_t> bytes;
    for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
      bytes.push_back(bytes_shown(cache_, head / shape.kv_heads, head % shape.kv_heads, Read::all));
    }
    return bytes;
  }

  [[nodiscard]] std::size_t bytes_read(const Reading& reading) const override {
    // With epsilon 0 it is a read of all rows.
    const bool bounded = reading.read == Read::bounded && reading.epsilon > 0.0F;
    if (bounded) return bytes_of_bounded(cache_, rows_read_);
    std::size_t total = bytes_shown(cache_, reading.read);
    if (!reading.refresh_each_step) return total;
    const ModelShape& shape = cache_.plan().shape();
    for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
      total += summary_bytes(cache_.plan().at(head / shape.kv_heads, head % shape.kv_heads));
    }
    return total;
  }

 private:
  [[nodiscard]] std::size_t heads() const { return cache_.plan().shape().kv_head_count(); }
  // Rows that all heads hold together, those that no policy has seen yet included.
  [[nodiscard]] std::size_t rows_held() const {
    const ModelShape& shape = cache_.plan().shape();
    std::size_t rows = (cache_.tokens() - cache_.commit_point()) * heads();
    for (std::size_t i = 0; i < heads(); ++i) {
      rows += cache_.head(i / shape.kv_heads, i % shape.kv_heads).rows();
    }
    return rows;
  }
  // Bytes of the summaries that a head reads to select chunks.
  [[nodiscard]] std::size_t summary_bytes(const HeadSettings<E>& head) const {
    const std::size_t head_dim = cache_.plan().shape().head_dim;
    const HeadRule rule = head.rule(head_dim);
    if (rule.chunk == 0) return 0;
    const std::size_t vectors = rule.summary == MinMaxKey::name ? MinMaxKey::vectors : MeanKey::vectors;
    return vectors * (cache_.tokens() / rule.chunk) * head_dim * sizeof(E);
  }

  const reference::Llama* model_;
  Cache cache_;
  Footprint footprint_;
  std::vector<std::size_t> rows_read_;    // of the latest bounded read, layers added up
  std::optional<FastGenConfig> fastgen_;  // is set until the next compress
};

template <Element E>
std::unique_ptr<Sequence> make_plan_sequence(const reference::Llama& model, HeadPlan<E> plan,
                                             const CacheOptions& options) {
  reference::limit_windows(plan, model.config());
  using Made = PlanSequence<E>;
  // Not by the plan's needs: a fork may have another plan.
  CacheOptions own = options;
  own.value_outputs = model.value_outputs();
  return std::make_unique<Made>(model, typename Made::Cache{std::move(plan), own});
}

}  // namespace kvpolicy::tools
