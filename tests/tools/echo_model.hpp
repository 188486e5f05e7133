// SPDX-License-Identifier: Apache-2.0
//
// A model for tests of the scheduler: what it says next follows from the whole text, which it reads back from its
// cache.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "serve/served_model.hpp"

namespace kvpolicy::serve {

inline constexpr ModelShape echo_shape{2, 2, 2, 16};
inline constexpr int vocabulary = 200;

// What comes after a text: decided by each token and its place.
inline int next_token(const std::vector<int>& text) {
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < text.size(); ++i) {
    state = (state + static_cast<std::uint64_t>(text[i]) * (i + 1)) * 0x9E3779B97F4A7C15U;
    state ^= state >> 29;
  }
  return static_cast<int>(state % vocabulary);
}

// Its rows say which tokens they are of, and it reads the text back from the first head of its last layer.
class EchoModel final : public ServedModel {
 public:
  [[nodiscard]] ModelShape shape() const override { return echo_shape; }
  [[nodiscard]] std::size_t context() const override { return 2000; }
  [[nodiscard]] bool is_end(int token) const override { return token == end; }

  std::vector<reference::BatchedRead> read(std::span<const StepCall> calls) override {
    std::vector<reference::BatchedRead> results(calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (notes_reads)
        reads.push_back({calls[i].tokens[0], calls[i].cache->tokens(), calls[i].tokens.size()});
      try {
        results[i].logits = read(calls[i]);
      } catch (const std::bad_alloc&) {
        results[i].error = std::current_exception();
        ++failures;
      }
    }
    most_calls = std::max(most_calls, calls.size());
    return results;
  }

  struct Piece {
    int first;  // of its tokens
    std::size_t from, tokens;
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  std::vector<Piece> reads;  // all calls, if `notes_reads`
  bool notes_reads = false;
  int end = 7;  // the token that ends a text; -1: none does
  std::size_t failures = 0;
  std::size_t most_calls = 0;

 private:
  [[nodiscard]] static std::vector<float> read(const StepCall& call) {
    Cache& cache = *call.cache;
    const std::size_t count = call.tokens.size();
    const std::size_t numbers = count * echo_shape.kv_heads * echo_shape.head_dim;
    std::vector<float> rows(numbers);
    std::vector<float> out(numbers);
    for (std::size_t t = 0; t < count; ++t) {
      std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(t * numbers / count), numbers / count,
                  static_cast<float>(call.tokens[t]));
    }
    const TensorView<const float> view{rows.data(), count, echo_shape.kv_heads, echo_shape.head_dim};
    for (std::size_t layer = 0; layer < echo_shape.layers; ++layer) {
      cache.step(layer, view, view, view,
                 TensorView<float>{out.data(), count, echo_shape.q_heads, echo_shape.head_dim},
                 {.read = call.selects ? Read::selected : Read::all});
    }
    if (!call.wants_logits) return {};
    std::vector<int> text;
    std::vector<float> row(echo_shape.head_dim);
    for (const Segment& segment : cache.segments(echo_shape.layers - 1, 0)) {
      for (std::size_t i = 0; i < segment.rows; ++i) {
        load_row(segment.values, i, row);
        text.push_back(static_cast<int>(row[3]));
      }
    }
    REQUIRE(text.size() == cache.tokens());
    std::vector<float> logits(vocabulary, 0.0F);
    logits[static_cast<std::size_t>(next_token(text))] = 1.0F;
    return logits;
  }
};

// What a text gets alone.
inline std::vector<int> alone(std::vector<int> text, std::size_t max_new) {
  std::vector<int> written;
  while (written.size() < max_new) {
    const int token = next_token(text);
    if (token == 7) break;
    written.push_back(token);
    text.push_back(token);
  }
  return written;
}

inline std::shared_ptr<const Plan> plan_of(std::size_t kind) {
  using Dense = DenseStorage<bfloat16>;
  auto plan = std::make_shared<Plan>(echo_shape);
  // The first head keeps all, so that the text can be read back.
  for (std::size_t layer = 0; layer < echo_shape.layers; ++layer) {
    if (kind == 1) plan->set(layer, 1, SinkRecentCache<Dense>::Config{.sinks = 4, .recent = 40});
    if (kind == 2) {
      QuantizedResidualCache<bfloat16, Granularity::per_token>::Config config;
      config.storage.bits = 4;
      config.storage.residual = 32;
      config.storage.key_group = config.storage.value_group = 16;
      plan->set(layer, 1, config);
    }
    if (kind == 3) {
      plan->set(
          layer, 1,
          HeadBudgetCache<Dense>::Config{.budget = 20, .scorer = {.observation_window = 4, .kernel = 3}});
    }
  }
  return plan;
}

}  // namespace kvpolicy::serve
