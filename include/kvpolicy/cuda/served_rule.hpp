// SPDX-License-Identifier: Apache-2.0
//
// Which rules the kernels serve. The device cache knows no policy: it asks a head's settings for
// their rule (core/head_rule.hpp), so a policy of your own runs on the device if it states one.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/pool_pages.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/chunk_summary.hpp>

namespace kvpolicy::gpu {

/// Whether the head's chunks are summarised by their smallest and largest keys.
[[nodiscard]] inline bool has_min_max_summary(const HeadRule& rule) {
  return rule.summary == MinMaxKey::name;
}

/// Whether the head's chunks have a summary for which the engine must have been given kernels.
[[nodiscard]] inline bool has_own_summary(const HeadRule& rule) {
  return rule.chunk > 0 && rule.summary != MeanKey::name && !has_min_max_summary(rule);
}

/// Whether the head ranks its rows by the attention of all queries so far, which is added up.
[[nodiscard]] inline bool accumulates(const HeadRule& rule) { return rule.ranking == Ranking::accumulated; }

/// The widths of the codes that kernels read and write for a head that quantises its rows. Whatever lays out packed
/// pages asks here, because kernels take codes for whole numbers in equal steps.
/// @throws ConfigError for codebooks that kernels do not have
[[nodiscard]] inline Sides packed_widths(const HeadRule& rule) {
  const Codebook codebook = rule.key_codebook == Codebook::even ? rule.value_codebook : rule.key_codebook;
  require(codebook == Codebook::even, "cuda: codes stand for '", name_of(codebook),
          "' numbers, which are read on the host; kernels have 'even' ones");
  return {code_width(rule.key_encoding), code_width(rule.value_encoding)};
}

namespace detail {

inline void check_quantized(const HeadRule& rule, std::size_t head_dim) {
#ifdef KVPOLICY_EXACT_ROWS_ONLY
  fail<ConfigError>(
      "cuda: the plan quantises rows, and this program was compiled without their kernels; compile it "
      "without KVPOLICY_EXACT_ROWS_ONLY");
#endif
  require(head_dim == 64 || head_dim == 128,
          "cuda: quantised rows have kernels for head_dim 64 "
          "and 128, not ",
          head_dim);
  static_cast<void>(packed_widths(rule));
  // Rows that return to the residual are quantised again there, and rotating them back rounds them in between: how
  // far that moves them has not been bounded.
  require(!rule.compresses || !rule.kivi_flush || (!rule.key_hadamard && !rule.value_hadamard),
          "cuda: survivors of a compression are rotated and leave the residual by KIVI's flush; "
          "use Flush::steady, or rows that are not rotated");
  const auto fits = [&](std::size_t group) { return group % 8 == 0 && head_dim % group == 0; };
  require(rule.key_per_channel ? rule.key_group == 16 || rule.key_group == 32 || rule.key_group == 64
                               : fits(rule.key_group),
          "cuda: key_group is ", rule.key_group,
          rule.key_per_channel ? ", must be 16, 32 or 64 rows"
                               : ", must be a multiple of 8 channels that divides head_dim");
  require(fits(rule.value_group), "cuda: value_group is ", rule.value_group,
          ", must be a multiple of 8 channels that divides head_dim = ", head_dim);
  require(!rule.kivi_flush || rule.chunk == 0 || rule.residual % rule.chunk == 0,
          "cuda: kivi's flush over chunks "
          "of ",
          rule.chunk, " rows needs a residual that is a multiple of them, not ", rule.residual);
  require(rule.chunk == 0 || rule.chunk == 16 || rule.chunk == 32 || rule.chunk == 64, "cuda: chunk is ",
          rule.chunk, "; over quantised rows it must be 16, 32 or 64");
}

inline void check_compressing(const HeadRule& rule) {
  require(
      rule.ranking != Ranking::none, "cuda: heads whose rows are ranked by ",
      rule.scorer.empty() ? "a scorer without a name" : rule.scorer,
      " have no kernel, because the scorer's `describe` states no ranking (core/ranking.hpp); state one, or "
      "run the plan on the host");
  if (rule.ranking == Ranking::attention) {
    const std::size_t most = std::min<std::size_t>(rule.kept_rows + 1, 64);
    require(rule.observation_window >= 1 && rule.observation_window <= most, "cuda: observation_window is ",
            rule.observation_window, " queries, must be 1 to ", most,
            rule.kept_rows < 63 ? ": at most one more than the rows that are always kept" : "");
  } else if (rule.ranking == Ranking::expected) {
    require(rule.expected.has_value(), "cuda: ", rule.scorer,
            " ranks rows by queries to come, but its `describe` does not say which (HeadRule::expected)");
    require(rule.observation_window >= 1 && rule.observation_window <= 1024, "cuda: observation_window is ",
            rule.observation_window, " queries, must be 1 to 1024 where they stand for those to come");
    constexpr std::size_t most = std::size_t{1} << 20;
    require(rule.expected->future >= 1 && rule.expected->future <= most && rule.first_rows <= most,
            "cuda: ", rule.scorer, " expects queries at ", rule.expected->future, " positions and ranks ",
            rule.first_rows,
            " first rows above the others, must be 1 to 2^20 positions and at most 2^20 rows");
  } else {
    require(rule.observation_window == 0, "cuda: ", rule.scorer, " asks ", rule.observation_window,
            " queries, but states a ranking that asks none");
  }
  require(rule.prior_share == 0.0 || rule.ranking == Ranking::attention, "cuda: ", rule.scorer,
          " has a prior_share of ", rule.prior_share,
          ", must be 0 unless rows are ranked by the attention of their latest queries");
  require(rule.unweighed_share == 0.0 || rule.weighs_values, "cuda: ", rule.scorer,
          " has an unweighed_share of ", rule.unweighed_share,
          ", must be 0 unless scores are weighed by their values (weighs_values)");
  require(rule.value_norm == ValueNorm::value_l2 || rule.ranking == Ranking::attention ||
              rule.ranking == Ranking::expected || rule.ranking == Ranking::accumulated,
          "cuda: value_norm is 'output_l1' under ", rule.scorer, ", which goes by keys, not by attention");
  require(rule.pooled_rows <= 65, "cuda: the pooling kernel is ", rule.pooled_rows,
          " rows, must be at most 65");
}

}  // namespace detail

/// Refuses a model that the kernels do not serve: its layers may differ in their windows alone, which the
/// heads' rules state, and a value has as many channels as a key. How many is for the engine to say, which
/// knows what is compiled.
/// @throws ConfigError
inline void check_served(const ModelShape& shape) {
  const LayerShape served{shape.q_heads, shape.kv_heads, shape.head_dim, shape.head_dim};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    LayerShape own = shape.layer(l);
    own.window = 0;
    require(own == served, "cuda: layer ", l, " has ", own.q_heads, " query heads, ", own.kv_heads,
            " KV heads of ", own.head_dim, " channels and values of ", own.value_dim, ", a soft cap of ",
            own.softcap, own.reads ? " and reads another layer's cache" : "",
            "; the kernels serve layers that "
            "all have ",
            served.q_heads, " query heads, ", served.kv_heads, " KV heads of ", served.head_dim,
            " channels, values of as many, and no soft cap but the call's; run the plan on the host");
  }
}

/// Refuses a rule that the kernels do not serve.
/// @throws ConfigError
inline void check_served(const HeadRule& rule, std::size_t head_dim) {
  if (rule.is_quantized()) detail::check_quantized(rule, head_dim);
  if (rule.compresses) detail::check_compressing(rule);
  require(
      rule.chunk == 0 || (!rule.summary.empty() && rule.summary_vectors >= 1 && rule.summary_vectors <= 2),
      "cuda: chunks are summarised by ", rule.summary.empty() ? "a summary without a name" : rule.summary,
      " in ", rule.summary_vectors, " vectors; a summary on a device has a name, and 1 or 2 vectors");
  constexpr std::size_t most = std::size_t{1} << 30;
  const auto largest = std::max(
      {rule.sinks, rule.recent, rule.residual, rule.budget, rule.kept_rows, rule.chunk, rule.chosen_rows});
  require(largest <= most, "cuda: a head keeps or reads ", largest, " rows, must be at most 2^30");
}

/// Refuses a rule whose rows cannot lie in the pages that a cache has. `row_bytes` are those of one head's key.
/// @throws ConfigError
inline void check_pages(const HeadRule& rule, const CacheOptions& options, std::size_t row_bytes) {
  require(options.page_rows >= 64 || (!rule.is_quantized() && !rule.compresses && rule.chunk == 0),
          "gpu::CacheOptions: page_rows is ", options.page_rows,
          ", must be at least 64 where a head quantises, compresses or chooses chunks");
  // Chunks are copied from there in whole tiles, and sinks would shift the tiles against the chunks.
  require(!options.has_slow_memory() || !rule.keeps_every_row() || rule.chunk == 0 || rule.sinks == 0,
          "gpu::CacheOptions: slow_memory is given, and a head that chooses chunks has ", rule.sinks,
          " sinks; in slow memory such a head must have none, because its first chunk is always read");
  if (!rule.engine_pages) return;
  require(options.pool != nullptr,
          "gpu::CacheOptions: pool is null, but the plan has heads over "
          "EnginePageStorage; it must be a pool of the engine's pages");
  check_pool(*options.pool, options.page_rows, row_bytes);
}

/// Refuses a rule that weighs rows by an output projection that the cache does not know.
/// @throws ConfigError
template <Element E>
void check_outputs(const HeadRule& rule, const CacheOptions& options, std::size_t layer) {
  if (rule.value_norm != ValueNorm::output_l1) return;
  const ConstTensor* weights =
      options.value_outputs == nullptr ? nullptr : options.value_outputs->layer(layer);
  require(weights != nullptr, "gpu::KvCache: value_norm is 'output_l1' in layer ", layer,
          ", but the cache knows no output projection of the layer; give it "
          "gpu::CacheOptions::value_outputs, or use 'value_l2'");
  require(weights->encoding == encoding_of<E>, "gpu::KvCache: the output projection of layer ", layer, " is ",
          name_of(weights->encoding), ", must be ", name_of(encoding_of<E>), " as the plan's rows are");
}

/// The rule of one head of a plan.
/// @throws ConfigError for a policy that states none, or one that the kernels do not serve.
template <class... T>
[[nodiscard]] HeadRule served_rule(const HeadPlan<T...>& plan, std::size_t layer, std::size_t head) {
  const std::size_t head_dim = plan.shape().head_dim;
  HeadRule rule = plan.at(layer, head).rule(head_dim);
  check_served(rule, head_dim);
  // Sinks are apart from rows that go or get codes. Where all rows stay exact they lie in a line.
  if (rule.keeps_every_row() && !rule.is_quantized()) rule.sinks = 0;
  return rule;
}

}  // namespace kvpolicy::gpu
