// SPDX-License-Identifier: Apache-2.0
//
// Describes by plain numbers what a KV head keeps and what a query reads of it. A policy states its rule
// (`rule` of its policy_traits). Code that treats heads of all policies alike, such as the device cache and
// printed plans, reads only the rule. core/rule_ranges.hpp says what a rule's numbers mean.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/rule_ranges.hpp>

namespace kvpolicy {

/// The pooling of SnapKV scores over neighbouring rows.
enum class Pooling : std::uint8_t { max, average };

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(Pooling) { return {"max", "average"}; }

/// The rule of one KV head. Sizes are counted in rows, `observation_window` in queries.
struct HeadRule {
  // Retention: all rows live, or the first `sinks` and the latest `recent`.
  std::size_t sinks = 0;
  std::size_t recent = 0;           ///< 0: all rows live
  bool prefill_chunk_mask = false;  ///< `recent` counts from a call's first query, not from each query
  std::optional<RotaryConfig> rotary_in_cache = {};  ///< sinks are read as if right before the window

  // Storage: where rows lie, and how a row is stored after it has left the residual.
  bool engine_pages = false;                    ///< rows lie in pages of an inference engine's own tensor
  Encoding key_encoding = Encoding::float32;    ///< float32: in the element type of the cache
  Encoding value_encoding = Encoding::float32;  ///< quantised if and only if the keys are
  bool key_per_channel = false;                 ///< neighbouring rows of a key channel share a scale
  std::size_t key_group = 0;                    ///< channels that share a scale; rows if `key_per_channel`
  std::size_t value_group = 0;                  ///< channels that share a scale
  bool key_hadamard = false;               ///< keys are rotated before they are quantised (core/hadamard.hpp)
  bool value_hadamard = false;             ///< the same for values
  Codebook key_codebook = Codebook::even;  ///< what codes stand for (core/codebook.hpp)
  Codebook value_codebook = Codebook::even;  ///< the same for values
  double key_scale = 1.0;                    ///< of a codebook with a scale of the head
  double value_scale = 1.0;                  ///< the same for values
  std::size_t residual = 0;                  ///< at least so many latest rows stay exact
  bool kivi_flush = false;                   ///< the residual is emptied as KIVI does

  // Compression: rows are dropped by rank.
  bool compresses = false;
  std::size_t budget = 0;             ///< rows that survive by rank
  std::size_t kept_rows = 0;          ///< latest rows that always survive
  std::size_t compress_from = 0;      ///< a shorter text is not compressed
  std::size_t compress_every = 0;     ///< rows until the head compresses again by itself; 0: never
  bool after_first_compress = false;  ///< `compress_every` starts with the first requested compression
  bool adaptive_in_layer = false;     ///< the heads of a layer share their budgets (Ada-KV)
  bool adaptive_in_model = false;     ///< and so do all layers' heads; `adaptive_in_layer` is true then
  double safeguard = 0.0;             ///< share of its budget that such a head keeps in any case
  std::string_view scorer = {};       ///< name of the scorer
  Ranking ranking = Ranking::none;    ///< what the scorer looks at
  KeyNumbers key_numbers = {};        ///< the scorer's settings, where it looks at the key
  Votes votes = Votes::mean;          ///< what the attention of several queries comes to
  double prior_share = 0.0;           ///< share of the mean score below which no score is
  bool waits_for_scoring = false;     ///< attention is added up in scoring passes alone
  bool weighs_values = false;         ///< ranks are multiplied by norms of values
  ValueNorm value_norm = ValueNorm::value_l2;  ///< which ones
  double unweighed_share = 0.0;        ///< share of the budget that is chosen before ranks are multiplied
  std::size_t observation_window = 0;  ///< latest queries whose attention ranks the rows
  std::optional<ExpectedQueries> expected = {};  ///< set if those to come rank them, for which these stand
  std::size_t first_rows = 0;                    ///< of the text that rank above all others then
  Pooling pooling = Pooling::max;
  std::size_t pooled_rows = 1;

  // Selection: a query reads some of the rows.
  std::size_t chunk = 0;  ///< rows of a retrieval chunk; 0: every row is read
  std::size_t chosen_rows = 0;
  std::size_t refresh_every = 0;    ///< rows until a new selection; 0: only on request
  std::string_view summary = {};    ///< name of the summary that stands for a chunk's keys
  std::size_t summary_vectors = 0;  ///< how many vectors the summary has

  friend bool operator==(const HeadRule&, const HeadRule&) = default;

  [[nodiscard]] bool is_quantized() const { return kvpolicy::is_quantized(key_encoding); }
  /// Bits of a quantised number, the mean over keys and values; 0 where rows are exact.
  [[nodiscard]] double code_bits() const {
    if (!is_quantized()) return 0.0;
    return static_cast<double>(bits_of(key_encoding) + bits_of(value_encoding)) / 2;
  }
  /// Whether the head grows with the text. Only such heads have rows in slow memory.
  [[nodiscard]] bool keeps_every_row() const { return recent == 0 && !compresses; }

  /// The most rows that the pages of exact rows have room for, in a head that quantises and keeps every row: the
  /// residual, a group of rows that leave it together, and the rest of two pages.
  [[nodiscard]] std::size_t most_exact_rows(std::size_t page_rows) const {
    const std::size_t together = kivi_flush ? residual : key_per_channel ? key_group : 1;
    return residual + together + 2 * page_rows;
  }

  // The parts of the rule that decide which rows live and which are read.
  [[nodiscard]] constexpr WindowRule<std::size_t> window_rule() const {
    return {sinks, recent, prefill_chunk_mask};
  }
  /// The residual rule of the keys. It counts rows besides the sinks, which are never quantised.
  [[nodiscard]] constexpr ResidualRule<std::size_t> key_residual() const {
    return {residual, key_per_channel ? key_group : 1, kivi_flush};
  }
  [[nodiscard]] constexpr ResidualRule<std::size_t> value_residual() const { return {residual}; }
  [[nodiscard]] constexpr ChunkRule<std::size_t> chunk_rule() const {
    return {chunk, chunk == 0 ? 0 : chosen_rows / chunk, refresh_every};
  }
  [[nodiscard]] constexpr BudgetRule<std::size_t> budget_rule() const {
    return {budget, kept_rows, compress_from, compress_every, after_first_compress};
  }
};

}  // namespace kvpolicy
