// SPDX-License-Identifier: Apache-2.0
//
// Counts what a decode step has to read; every GB/s that the bench prints is computed from it. Each
// case checks that the heads show exactly as many rows. For a text of N rows, the query's own (not
// committed yet) included, a KV head of head_dim d reads
//
//   all rows          N
//   sinks + recent    min(N, sinks + recent)
//   a budget          min(rows when it was compressed, budget + window) and the rows since
//   chosen chunks     budget + rows since the last closed chunk, and, where the call chooses a new
//                     selection, the summary of each closed chunk: one vector (mean) or two (min, max)
//
// of d elements for key and value. Quantised rows have d bits / 8 bytes, and 4 bytes for the scale
// and zero of each group. Queries and outputs are not counted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

namespace kvpolicy::bench {

/// The rows of one side (keys or values) of a head that a query reads.
struct SideRows {
  std::size_t exact = 0;
  std::size_t packed = 0;
  friend bool operator==(const SideRows&, const SideRows&) = default;
};

struct HeadReads {
  SideRows keys;
  SideRows values;
  std::size_t summary_vectors = 0;
  double packed_key_bytes = 0.0;  ///< of one row
  double packed_value_bytes = 0.0;

  [[nodiscard]] double bytes(std::size_t head_dim, std::size_t element_bytes) const {
    const auto row = static_cast<double>(head_dim * element_bytes);
    return static_cast<double>(keys.exact + values.exact + summary_vectors) * row +
           static_cast<double>(keys.packed) * packed_key_bytes +
           static_cast<double>(values.packed) * packed_value_bytes;
  }
};

/// The history of a text besides its length.
struct History {
  std::size_t compressed_at = 0;  ///< tokens when budgets were enforced; 0: never
  std::size_t chosen_at = 0;      ///< committed rows when the selection in use was made
  bool selected = false;          ///< the call reads selected chunks
  bool refreshes = false;         ///< the call chooses them itself
};

[[nodiscard]] inline HeadReads exact_reads(std::size_t rows, std::size_t summary_vectors = 0) {
  return {.keys = {.exact = rows}, .values = {.exact = rows}, .summary_vectors = summary_vectors};
}

/// Rows of a residual with steady flush: at least `residual` of the committed rows are exact, and the sinks.
[[nodiscard]] inline HeadReads quantized_reads(const HeadRule& rule, std::size_t tokens,
                                               std::size_t head_dim) {
  const std::size_t committed = tokens - 1;
  const std::size_t beyond = committed - std::min(committed, rule.sinks + rule.residual);
  // A group of neighbouring keys of each channel is quantised when all its keys are older than the
  // residual. Groups begin after the sinks.
  const std::size_t keys = rule.key_per_channel ? beyond / rule.key_group * rule.key_group : beyond;
  const auto d = static_cast<double>(head_dim);
  const auto codes = [&](Encoding encoding) { return d * static_cast<double>(bits_of(encoding)) / 8; };
  const auto params = [&](Codebook codebook, std::size_t group) {
    return static_cast<double>(param_bytes_of_group(codebook)) * d / static_cast<double>(group);
  };
  return {.keys = {.exact = tokens - keys, .packed = keys},
          .values = {.exact = tokens - beyond, .packed = beyond},
          .packed_key_bytes = codes(rule.key_encoding) + params(rule.key_codebook, rule.key_group),
          .packed_value_bytes = codes(rule.value_encoding) + params(rule.value_codebook, rule.value_group)};
}

[[nodiscard]] inline HeadReads head_reads(const HeadRule& rule, std::size_t tokens, std::size_t head_dim,
                                          const History& history) {
  if (rule.is_quantized()) return quantized_reads(rule, tokens, head_dim);
  if (rule.recent > 0) return exact_reads(std::min(tokens, rule.sinks + rule.recent));
  if (rule.chunk > 0) {
    if (!history.selected) return exact_reads(tokens);
    const std::size_t committed = history.refreshes ? tokens - 1 : history.chosen_at;
    const std::size_t chunks = committed / rule.chunk;
    const std::size_t chosen = std::min(chunks * rule.chunk, rule.chosen_rows);
    const std::size_t vectors = rule.summary == MinMaxKey::name ? MinMaxKey::vectors : MeanKey::vectors;
    return exact_reads(chosen + tokens - chunks * rule.chunk, history.refreshes ? chunks * vectors : 0);
  }
  if (rule.compresses) {
    const std::size_t kept = std::min(history.compressed_at, rule.budget + rule.kept_rows);
    return exact_reads(kept + tokens - history.compressed_at);
  }
  return exact_reads(tokens);
}

/// Counts for one head of a plan.
template <Element E>
[[nodiscard]] HeadReads reads_of(const HeadPlan<E>& plan, std::size_t layer, std::size_t head,
                                 std::size_t tokens, const History& history) {
  const std::size_t head_dim = plan.shape().head_dim;
  return head_reads(plan.at(layer, head).rule(head_dim), tokens, head_dim, history);
}

/// Counts for all heads of a layer.
template <Element E>
[[nodiscard]] double layer_bytes(const HeadPlan<E>& plan, std::size_t layer, std::size_t tokens,
                                 const History& history) {
  double bytes = 0.0;
  for (std::size_t head = 0; head < plan.shape().kv_heads; ++head) {
    bytes += reads_of(plan, layer, head, tokens, history).bytes(plan.shape().head_dim, sizeof(E));
  }
  return bytes;
}

/// The sinks and window of a head; 0 and 0 for a head that sees all rows.
struct Window {
  std::size_t sinks = 0;
  std::size_t recent = 0;
};
template <Element E>
[[nodiscard]] Window window_of(const HeadPlan<E>& plan, std::size_t layer, std::size_t head) {
  const HeadRule rule = plan.at(layer, head).rule(plan.shape().head_dim);
  return {rule.sinks, rule.recent};
}

/// Pairs of a query and a visible row in one head, for a chunk of `queries` after `cached` rows.
[[nodiscard]] inline double visible_pairs(const Window& window, std::size_t cached, std::size_t queries) {
  const auto triangle = [](double n) { return n * (n + 1) / 2; };
  const auto first = static_cast<double>(cached);
  const auto last = static_cast<double>(cached + queries);
  if (window.recent == 0) return triangle(last) - triangle(first);
  const auto reach = static_cast<double>(window.sinks + window.recent);
  // A query sees min(position + 1, sinks + recent) rows.
  const double growing = triangle(std::min(last, reach)) - triangle(std::min(first, reach));
  return growing + reach * (last - std::max(first, std::min(last, reach)));
}

/// Floating-point operations of a chunk's attention in one layer: two products of head_dim for each
/// pair.
template <Element E>
[[nodiscard]] double layer_flops(const HeadPlan<E>& plan, std::size_t layer, std::size_t cached,
                                 std::size_t queries) {
  double pairs = 0.0;
  for (std::size_t head = 0; head < plan.shape().kv_heads; ++head) {
    pairs += visible_pairs(window_of(plan, layer, head), cached, queries);
  }
  return pairs * static_cast<double>(plan.shape().queries_per_kv() * plan.shape().head_dim) * 4.0;
}

}  // namespace kvpolicy::bench
