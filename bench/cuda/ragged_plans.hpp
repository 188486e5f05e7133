// SPDX-License-Identifier: Apache-2.0
//
// The sequences of the ragged cases: how long each is, under which plan, and what its next step has
// to read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <kvpolicy/policy/head_budget_cache.hpp>

#include "workload.hpp"

namespace kvpolicy::bench {

/// One sequence of a batch, of one layer. A plan that compresses does so before the first step.
struct RaggedSequence {
  Plan plan;
  std::size_t tokens = 0;   ///< in the first step, its own included
  std::size_t queries = 1;  ///< of a step; more than 1 where every head reads all rows

  [[nodiscard]] std::size_t prompt() const { return tokens - queries; }
  [[nodiscard]] bool is_prompt() const { return queries > 1; }
  /// The text in step `number`: decoding appends, a part of a prompt is taken back after each step.
  [[nodiscard]] std::size_t tokens_in_step(std::size_t number) const {
    return is_prompt() ? tokens : tokens + number;
  }
};

[[nodiscard]] inline std::vector<HeadRule> rules_of(const Plan& plan) {
  std::vector<HeadRule> rules;
  for (std::size_t head = 0; head < plan.shape().kv_heads; ++head) {
    rules.push_back(gpu::served_rule(plan, 0, head));
  }
  return rules;
}

/// What a head reads of a text of `tokens` rows, the step's own included, after a prompt of `prompt`.
[[nodiscard]] inline HeadReads reads_after_prompt(const HeadRule& rule, std::size_t tokens,
                                                  std::size_t prompt) {
  return rule.compresses ? compressed_reads(rule, tokens, prompt) : decode_reads(rule, tokens, false, false);
}

[[nodiscard]] inline double bytes_after_prompt(const std::vector<HeadRule>& rules, std::size_t head_dim,
                                               std::size_t tokens, std::size_t prompt) {
  double bytes = 0.0;
  for (const HeadRule& rule : rules) bytes += reads_after_prompt(rule, tokens, prompt).bytes(rule, head_dim);
  return bytes;
}
[[nodiscard]] inline double bytes_in_step(const RaggedSequence& what, std::size_t number) {
  return bytes_after_prompt(rules_of(what.plan), what.plan.shape().head_dim, what.tokens_in_step(number),
                            what.prompt());
}
/// Operations of a part of a prompt; those of decoding are not what it waits for.
[[nodiscard]] inline double prompt_flops(const RaggedSequence& what) {
  if (!what.is_prompt()) return 0.0;
  const ModelShape& shape = what.plan.shape();
  double pairs = 0.0;
  for (const HeadRule& rule : rules_of(what.plan)) pairs += visible_pairs(rule, what.prompt(), what.queries);
  return pairs * static_cast<double>(shape.queries_per_kv()) * flops_of_pair(shape.head_dim);
}

/// The plans that are mixed in one batch.
struct MixedPlans {
  ModelShape shape;
  Streaming::Config window;
  std::size_t residual = 128;   ///< exact rows of quantised heads
  std::size_t capacity = 4096;  ///< mean rows of compressed heads, SnapKV's window included

  [[nodiscard]] Plan full() const { return Plan{shape}; }
  [[nodiscard]] Plan duo() const { return stream_half(full()); }
  [[nodiscard]] Plan duo_int4() const { return stream_half(quantized(4)); }
  [[nodiscard]] Plan int8() const { return quantized(8); }
  /// As HeadKV's: a budget for each head, here from one share to `kv_heads` shares.
  [[nodiscard]] Plan headkv() const {
    Plan plan{shape};
    const std::size_t shares = shape.kv_heads * (shape.kv_heads + 1) / 2;
    const Budget::Config settings;
    const std::size_t rows = (capacity - settings.scorer.observation_window) * shape.kv_heads;
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      plan.set(0, head, Budget::Config{.budget = rows * (head + 1) / shares});
    }
    return plan;
  }

  /// `count` sequences, each under another of four plans than the one before.
  [[nodiscard]] std::vector<RaggedSequence> four(std::size_t count, std::size_t tokens) const {
    const std::vector<Plan> plans{full(), duo(), duo_int4(), headkv()};
    std::vector<RaggedSequence> sequences;
    for (std::size_t i = 0; i < count; ++i) {
      sequences.push_back({.plan = plans[i % plans.size()], .tokens = tokens});
    }
    return sequences;
  }
  /// The same, but every other sequence of the second plan is under a fifth one, at the length at which its
  /// first step reads as many bytes.
  [[nodiscard]] std::vector<RaggedSequence> five(std::size_t count, std::size_t tokens) const {
    std::vector<RaggedSequence> sequences = four(count, tokens);
    const RaggedSequence other{.plan = int8(), .tokens = equal_bytes(int8(), sequences.at(1))};
    for (std::size_t i = 1; i < count; i += 8) sequences[i] = other;
    return sequences;
  }
  /// The first of four plans' sequences reads a part of its prompt, the others decode.
  [[nodiscard]] std::vector<RaggedSequence> prompt(std::size_t count, std::size_t tokens,
                                                   std::size_t part) const {
    std::vector<RaggedSequence> sequences = four(count, tokens);
    sequences.at(0).queries = part;
    return sequences;
  }

 private:
  using Budget = HeadBudgetCache<Dense>;

  [[nodiscard]] Plan quantized(std::size_t bits) const {
    return Plan{shape, Quantized::Config{.storage = {.bits = bits, .residual = residual}}};
  }
  [[nodiscard]] Plan stream_half(Plan plan) const {
    for (std::size_t head = shape.kv_heads / 2; head < shape.kv_heads; ++head) plan.set(0, head, window);
    return plan;
  }
  // Bytes do not only grow with the text, for a block of rows that is quantised is read with fewer.
  [[nodiscard]] static std::size_t equal_bytes(const Plan& plan, const RaggedSequence& as) {
    const double wanted = bytes_in_step(as, 0);
    const std::vector<HeadRule> rules = rules_of(plan);
    std::size_t best = 2;
    double closest = std::numeric_limits<double>::infinity();
    for (std::size_t tokens = 2; tokens <= 2 * as.tokens; ++tokens) {
      const double off =
          std::abs(bytes_after_prompt(rules, plan.shape().head_dim, tokens, tokens - 1) - wanted);
      if (off < closest) {
        best = tokens;
        closest = off;
      }
    }
    return best;
  }
};

}  // namespace kvpolicy::bench
