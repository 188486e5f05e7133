// SPDX-License-Identifier: Apache-2.0
//
// Attention of a model's shape without its weights: every token has random rows and queries, and the next token
// follows from what the last layer attends to. What it costs to serve is then what the cache costs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include <kvpolicy/cpu.hpp>

#include "serve/served_model.hpp"

namespace kvpolicy::bench {

/// A token's numbers depend on the token, its place and the layer alone, so that a text is the same whoever runs
/// beside it.
class RandomRows final : public serve::ServedModel {
 public:
  explicit RandomRows(const ModelShape& shape) : shape_{shape}, queries_(pool_size()), rows_(pool_size()) {
    std::mt19937_64 random{1};
    for (std::size_t i = 0; i < pool_size(); ++i) {
      // Uniform with variance 1, which spreads logits as in a trained model.
      const auto even = [&] { return (static_cast<float>(random() >> 40) * 0x1p-24F - 0.5F) * 3.4641016F; };
      queries_[i] = even();
      rows_[i] = bfloat16{even()};
    }
  }

  [[nodiscard]] ModelShape shape() const override { return shape_; }
  [[nodiscard]] std::size_t context() const override { return 0; }
  [[nodiscard]] bool is_end(int) const override { return false; }
  /// Tokens of answers are below this.
  [[nodiscard]] std::size_t vocabulary() const { return std::min<std::size_t>(256, q_width()); }

  [[nodiscard]] std::vector<reference::BatchedRead> read(std::span<const serve::StepCall> calls) override {
    std::vector<reference::BatchedRead> results(calls.size());
    std::vector<std::size_t> active(calls.size());
    std::iota(active.begin(), active.end(), std::size_t{0});
    std::vector<std::size_t> before;
    for (const serve::StepCall& call : calls) before.push_back(call.cache->tokens());
    for (std::size_t layer = 0; layer < shape_.layers && !active.empty(); ++layer) {
      place(calls, active, before, layer);
      const std::size_t tokens = static_cast<std::size_t>(indptr_.back());
      const auto left_out =
          batch_.step(layer, sequences_, indptr_,
                      TensorView<const float>{q_.data(), tokens, shape_.q_heads, shape_.head_dim},
                      TensorView<const bfloat16>{k_.data(), tokens, shape_.kv_heads, shape_.head_dim},
                      TensorView<const bfloat16>{v_.data(), tokens, shape_.kv_heads, shape_.head_dim},
                      TensorView<float>{out_.data(), tokens, shape_.q_heads, shape_.head_dim});
      for (const LeftOut& one : left_out) results[active[one.sequence]].error = one.error;
      if (layer + 1 == shape_.layers) take_logits(calls, active, results);
      if (left_out.empty()) continue;
      for (const LeftOut& one : left_out) {
        const std::size_t call = active[one.sequence];
        calls[call].cache->truncate(before[call]);
      }
      std::erase_if(active, [&](std::size_t call) { return results[call].error != nullptr; });
    }
    return results;
  }

 private:
  static constexpr std::size_t spare = std::size_t{1} << 20;
  [[nodiscard]] std::size_t q_width() const { return shape_.q_heads * shape_.head_dim; }
  [[nodiscard]] std::size_t row_width() const { return shape_.kv_heads * shape_.head_dim; }
  [[nodiscard]] std::size_t pool_size() const { return spare + q_width(); }

  // Where the numbers of a token begin; `kind`: its query, key or value.
  [[nodiscard]] static std::size_t offset(int token, std::size_t position, std::size_t layer,
                                          std::size_t kind) {
    std::uint64_t state = static_cast<std::uint64_t>(token) + 1;
    for (const std::size_t one : {position, layer, kind}) {
      state = (state + one + 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
      state ^= state >> 29;
    }
    return state % spare;
  }

  void place(std::span<const serve::StepCall> calls, const std::vector<std::size_t>& active,
             const std::vector<std::size_t>& before, std::size_t layer) {
    sequences_.clear();
    indptr_.assign(1, 0);
    for (const std::size_t i : active) {
      const bool selects = calls[i].selects;
      sequences_.push_back(
          {calls[i].cache, {.read = selects ? Read::selected : Read::all, .refresh_selection = selects}});
      indptr_.push_back(indptr_.back() + static_cast<std::int32_t>(calls[i].tokens.size()));
    }
    const auto tokens = static_cast<std::size_t>(indptr_.back());
    q_.resize(tokens * q_width());
    out_.resize(tokens * q_width());
    k_.resize(tokens * row_width());
    v_.resize(tokens * row_width());
    std::size_t row = 0;
    for (const std::size_t i : active) {
      for (std::size_t t = 0; t < calls[i].tokens.size(); ++t, ++row) {
        const auto from = [&](std::size_t kind) {
          return static_cast<std::ptrdiff_t>(offset(calls[i].tokens[t], before[i] + t, layer, kind));
        };
        const auto copy = [row](const auto& pool, std::ptrdiff_t first, std::size_t width, auto& to) {
          std::copy_n(pool.begin() + first, width, to.begin() + static_cast<std::ptrdiff_t>(row * width));
        };
        copy(queries_, from(0), q_width(), q_);
        copy(rows_, from(1), row_width(), k_);
        copy(rows_, from(2), row_width(), v_);
      }
    }
  }

  void take_logits(std::span<const serve::StepCall> calls, const std::vector<std::size_t>& active,
                   std::vector<reference::BatchedRead>& results) const {
    for (std::size_t i = 0; i < active.size(); ++i) {
      const std::size_t call = active[i];
      if (!calls[call].wants_logits || results[call].error != nullptr) continue;
      const auto first = out_.begin() + static_cast<std::ptrdiff_t>(
                                            (static_cast<std::size_t>(indptr_[i + 1]) - 1) * q_width());
      results[call].logits.assign(first, first + static_cast<std::ptrdiff_t>(vocabulary()));
    }
  }

  ModelShape shape_;
  std::vector<float> queries_;
  std::vector<bfloat16> rows_;
  cpu::Batch<bfloat16> batch_;
  // Of the current call.
  std::vector<BatchSequence<serve::Cache>> sequences_;
  std::vector<std::int32_t> indptr_;
  std::vector<float> q_, out_;
  std::vector<bfloat16> k_, v_;
};

}  // namespace kvpolicy::bench
