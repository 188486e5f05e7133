// SPDX-License-Identifier: Apache-2.0
//
// What a KV head keeps and what a query reads of it, as plain numbers. A policy states its rule
// (`rule` of its policy_traits), and everything that treats heads of all policies alike goes by the
// rule: the device cache, printed plans. What a rule's numbers mean is in core/rule_ranges.hpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/rule_ranges.hpp>

namespace kvpolicy {

/// How votes of neighbouring rows are joined.
enum class Pooling : std::uint8_t { max, average };

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(Pooling) {
  return {"max", "average"};
}

/// One KV head's rule. Rows are counted, and so are queries.
struct HeadRule {
  // Retention: all rows live, or the first `sinks` and the latest `recent`.
  std::size_t sinks = 0;
  std::size_t recent = 0;   ///< 0: all rows live
  bool prefill_chunk_mask = false;  ///< a window belongs to a call's first query and not to each query
  std::optional<RotaryConfig> rotary_in_cache = {};  ///< sinks seem to stand right before the window

  // Storage: where rows lie, and how a row lies once it has left the residual.
  bool engine_pages = false;  ///< in pages of an inference engine's own tensor
  Encoding encoding = Encoding::float32;  ///< float32: as the row came
  bool key_per_channel = false;           ///< keys share a scale along the text
  std::size_t key_group = 0;              ///< channels, or rows where `key_per_channel`
  std::size_t value_group = 0;            ///< channels
  std::size_t residual = 0;               ///< latest rows that stay exact, at least
  bool kivi_flush = false;                ///< the residual is emptied as KIVI does

  // Eviction: rows go by rank.
  bool compresses = false;
  std::size_t budget = 0;            ///< rows that stay by rank
  std::size_t kept_rows = 0;         ///< latest rows that stay besides
  std::size_t compress_from = 0;     ///< a text of fewer tokens stays whole
  std::size_t compress_every = 0;    ///< the head compresses by itself at so many rows more; 0: never
  bool after_first_compress = false; ///< that begins with the first compression it is told to make
  bool adaptive_in_layer = false;       ///< budgets of the layer's heads are one
  double safeguard = 0.0;            ///< share of its budget that such a head keeps whatever the others have
  std::string_view scorer = {};      ///< the name of what ranks the rows
  Ranking ranking = Ranking::none;   ///< what it looks at
  KeyNumbers key_numbers = {};       ///< its settings, where that is the key
  std::size_t observation_window = 0;            ///< latest queries that vote
  Pooling pooling = Pooling::max;
  std::size_t pooled_rows = 1;

  // Selection: a query reads some of the rows.
  std::size_t chunk = 0;          ///< rows chosen together; 0: every row is read
  std::size_t chosen_rows = 0;
  std::size_t refresh_every = 0;  ///< a choice stands for so many rows; 0: until told otherwise
  std::string_view summary = {};  ///< the name of what stands for a chunk's keys
  std::size_t summary_vectors = 0;  ///< how many vectors that is

  friend bool operator==(const HeadRule&, const HeadRule&) = default;

  [[nodiscard]] bool is_quantized() const { return kvpolicy::is_quantized(encoding); }
  /// Whether the head grows with the text. Only such heads have rows in slow memory.
  [[nodiscard]] bool keeps_every_row() const { return recent == 0 && !compresses; }

  // The parts of the rule that say which rows.
  [[nodiscard]] constexpr WindowRule<std::size_t> window_rule() const {
    return {sinks, recent, prefill_chunk_mask};
  }
  /// Counts rows besides the sinks, which are never quantised.
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
