// SPDX-License-Identifier: Apache-2.0
//
// What each KV head of a plan costs: the bytes of rows that a decode step reads, and the bytes that a cache holds.
// Heads of different policies differ by the length of the text, so whoever divides heads among devices
// (plan/shards.hpp) divides these, not the heads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy {

/// A number for each KV head of a model: `costs[layer][head]`. Layers without a cache have no numbers. The unit is the
/// caller's: bytes, or times measured for heads of each kind.
using HeadCosts = std::vector<std::vector<double>>;

/// Rows that one query at the end of a text of `tokens` tokens reads of a head. A head that compresses has been
/// compressed; one that selects reads its selection and the rows after the last full chunk.
[[nodiscard]] inline std::size_t rows_read(const HeadRule& rule, std::size_t tokens) {
  if (rule.compresses) return rule.budget_rule().survivors(tokens, tokens);
  if (rule.chunk > 0) {
    const auto chunks = rule.chunk_rule();
    return chunks.chosen(tokens) * rule.chunk + tokens - chunks.closed_rows(tokens);
  }
  return rule.recent > 0 ? rule.window_rule().kept_rows(tokens) : tokens;
}

namespace detail {

/// The rows of `rows_read`, by how they are stored.
struct StepRows {
  std::size_t exact = 0;
  std::size_t packed = 0;
};

[[nodiscard]] inline StepRows step_rows(const HeadRule& rule, std::size_t tokens) {
  const std::size_t rows = rows_read(rule, tokens);
  // In an engine's pages all rows are codes, sinks as well.
  const std::size_t exact_rows = rule.engine_pages ? 0 : rule.sinks + rule.residual;
  const std::size_t packed = rule.is_quantized() ? rows - std::min(rows, exact_rows) : 0;
  return {rows - packed, packed};
}

/// Bytes of one packed key or value, with its part of a scale and a zero.
[[nodiscard]] inline double packed_bytes(std::size_t bits, Codebook codebook, std::size_t group,
                                         std::size_t channels) {
  const auto numbers = static_cast<double>(channels);
  return numbers * static_cast<double>(bits) / 8 +
         numbers * static_cast<double>(param_bytes_of_group(codebook)) / static_cast<double>(group);
}

}  // namespace detail

/// Bytes of the rows that one query at the end of a text of `tokens` tokens reads of a head (`rows_read`), keys and
/// values, in a cache whose exact numbers have `element_bytes` bytes; without the summaries that a new selection needs.
[[nodiscard]] inline double bytes_read(const HeadRule& rule, std::size_t tokens, const LayerShape& layer,
                                       std::size_t element_bytes) {
  const detail::StepRows rows = detail::step_rows(rule, tokens);
  const auto side = [&](Encoding encoding, Codebook codebook, std::size_t group, std::size_t channels) {
    const double exact =
        static_cast<double>(channels) * static_cast<double>(element_bytes) * static_cast<double>(rows.exact);
    if (rows.packed == 0) return exact;
    return exact + detail::packed_bytes(bits_of(encoding), codebook, group, channels) *
                       static_cast<double>(rows.packed);
  };
  return side(rule.key_encoding, rule.key_codebook, rule.key_group, layer.head_dim) +
         side(rule.value_encoding, rule.value_codebook, rule.value_group, layer.value_dim);
}

/// The same for a head that is read with a bound (Read::bounded), of whose rows in halves the share `rows_read` is read
/// in full: exact rows, the upper halves of all other keys, and those rows, whose upper halves count once more.
/// @throws ConfigError for a head whose keys are not in halves, or a share that is not from 0 to 1
[[nodiscard]] inline double bytes_read_with_bound(const HeadRule& rule, std::size_t tokens,
                                                  const LayerShape& layer, std::size_t element_bytes,
                                                  double rows_read) {
  require(is_in_halves(rule.key_encoding), "bytes_read_with_bound: keys are ", name_of(rule.key_encoding),
          ", must be in halves (", name_of(Encoding::uint4x2), "), of which a bound reads the upper ones");
  require(rows_read >= 0.0 && rows_read <= 1.0, "bytes_read_with_bound: rows_read is ", rows_read,
          ", must be a share of the rows in halves, 0 to 1");
  const detail::StepRows rows = detail::step_rows(rule, tokens);
  const double exact = static_cast<double>(layer.head_dim + layer.value_dim) *
                       static_cast<double>(element_bytes) * static_cast<double>(rows.exact);
  const double upper =
      detail::packed_bytes(bits_of(upper_half_encoding), rule.key_codebook, rule.key_group, layer.head_dim);
  const double whole =
      detail::packed_bytes(bits_of(rule.key_encoding), rule.key_codebook, rule.key_group, layer.head_dim) +
      detail::packed_bytes(bits_of(rule.value_encoding), rule.value_codebook, rule.value_group,
                           layer.value_dim);
  return exact + (upper + rows_read * whole) * static_cast<double>(rows.packed);
}

/// `bytes_read` of every head of a plan. A layer that reads the cache of another layer has no heads of its own, and its
/// reading is not counted.
/// @throws ConfigError if a policy does not state its rule
template <class... T>
[[nodiscard]] HeadCosts bytes_read(const HeadPlan<T...>& plan, std::size_t tokens) {
  using E = typename HeadPlan<T...>::element_type;
  HeadCosts costs(plan.shape().layers);
  plan.for_each_head([&](std::size_t layer, std::size_t, const HeadSettings<E>& settings) {
    const LayerShape own = plan.shape().layer(layer);
    costs[layer].push_back(bytes_read(settings.rule(own.head_dim), tokens, own, sizeof(E)));
  });
  return costs;
}

/// Bytes that each head of a plan takes in a cache after `tokens` tokens, compressed where it compresses.
/// @throws as HeadPlan::memory
template <class... T>
[[nodiscard]] HeadCosts bytes_held(const HeadPlan<T...>& plan, std::size_t tokens,
                                   const CacheOptions& options = {}) {
  using E = typename HeadPlan<T...>::element_type;
  HeadCosts bytes(plan.shape().layers);
  plan.for_each_head([&](std::size_t layer, std::size_t, const HeadSettings<E>& settings) {
    LayerShape own = plan.shape().layer(layer);
    own.q_heads = own.queries_per_kv();
    own.kv_heads = 1;
    ModelShape one{.layers = 1};
    one.per_layer.push_back(own);
    bytes[layer].push_back(
        static_cast<double>(HeadPlan<E>{one, settings}.memory(tokens, options, true).heads));
  });
  return bytes;
}

}  // namespace kvpolicy
