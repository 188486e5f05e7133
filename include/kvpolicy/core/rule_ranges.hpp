// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of a head's rule (core/head_rule.hpp): which rows live, which of them a query
// reads, where the quantised rows end, which heads compress and how many rows survive. Policies and
// storages of the host, the device cache and its kernels all use these functions, so a rule has one
// meaning.
//
// Rows are numbered from 0 in the order of the text. No number here is negative. `Int` is
// std::size_t on the host and int in kernels.
#pragma once

#include <kvpolicy/core/host_device.hpp>

namespace kvpolicy {

/// The consecutive rows [begin, end).
template <class Int>
struct RowRange {
  Int begin = 0;
  Int end = 0;

  /// 0 where `end` comes before `begin`.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int rows() const { return detail::minus(end, begin); }

  friend bool operator==(const RowRange&, const RowRange&) = default;
};

/// The sinks and the sliding window of a head. Without a window (`recent` = 0) every row lives.
template <class Int>
struct WindowRule {
  Int sinks = 0;            ///< the text's first rows, which always live
  Int recent = 0;           ///< latest rows that live besides; 0: all
  bool prefill_chunk_mask = false;  ///< `recent` counts from the call's first query, not from each query

  /// The oldest row besides the sinks that lives in a text of `tokens` tokens.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int first_kept(Int tokens) const {
    return recent == 0 ? sinks : detail::larger(sinks, detail::minus(tokens, recent));
  }
  /// How many rows live in a text of `tokens` tokens.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int kept_rows(Int tokens) const {
    return detail::smaller(sinks, tokens) + detail::minus(tokens, first_kept(tokens));
  }

  /// The oldest row besides the sinks that any query of a call reads; the call's lowest query is at
  /// `first_position`. With `prefill_chunk_mask` that query reads the `recent` rows before it, else they include
  /// its own.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int first_read(Int first_position) const {
    return first_kept(first_position + (prefill_chunk_mask ? 0 : 1));
  }
  /// A query at t reads a row at p besides the sinks only if p > t - query_window. `unlimited`: what stands for
  /// no such limit.
  template <class Window>
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Window query_window(Window unlimited) const {
    return recent > 0 && !prefill_chunk_mask ? static_cast<Window>(recent) : unlimited;
  }

  /// The sinks among the rows `rows`.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr RowRange<Int> sinks_among(RowRange<Int> rows) const {
    return {rows.begin, detail::smaller(detail::larger(sinks, rows.begin), rows.end)};
  }
  /// What the queries of a call read of the rows `rows` besides the sinks: each of them as far as its
  /// `query_window` goes.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr RowRange<Int> recent_among(RowRange<Int> rows,
                                                                         Int first_position) const {
    return {detail::smaller(detail::larger(first_read(first_position), rows.begin), rows.end),
            rows.end};
  }
};

/// When rows leave the residual, the latest rows, which stay exact.
template <class Int>
struct ResidualRule {
  Int residual = 0;   ///< latest rows that stay exact, at least
  Int unit = 1;       ///< rows are quantised so many at a time
  bool kivi = false;  ///< all are quantised whenever their number is a multiple of `residual`

  /// How many of the first `rows` rows are quantised.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int quantized(Int rows) const {
    if (kivi) return rows / residual * residual;
    return rows > residual ? (rows - residual) / unit * unit : 0;
  }
};

/// Rows that are chosen in chunks, of which only full ones are eligible.
template <class Int>
struct ChunkRule {
  Int chunk = 0;          ///< rows of a chunk; 0: every row is read
  Int budget = 0;         ///< chunks that a query reads
  Int refresh_every = 0;  ///< a choice stands for so many rows; 0: until told otherwise

  /// Chunks whose rows are all among the first `rows`.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int closed(Int rows) const { return rows / chunk; }
  /// Rows of these chunks; a query reads all rows after them.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int closed_rows(Int rows) const {
    return closed(rows) * chunk;
  }
  /// How many chunks are chosen among the first `rows` rows.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int chosen(Int rows) const {
    return detail::smaller(budget, closed(rows));
  }
  /// Whether a choice made when `then` rows were committed is too old once `now` are.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_stale(Int then, Int now) const {
    return refresh_every > 0 && now - then >= refresh_every;
  }
};

/// Of a budget that heads share, the rows that one head keeps whatever the others have.
template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int safe_rows(double safeguard, Int budget) {
  return static_cast<Int>(safeguard * static_cast<double>(budget));
}

/// How many rows a compression leaves a head, and when the head compresses by itself. `rows` are those
/// that it holds, `tokens` those of the text.
template <class Int>
struct BudgetRule {
  Int budget = 0;         ///< rows that stay by rank
  Int kept_rows = 0;      ///< latest rows that stay besides
  Int compress_from = 0;  ///< a text of fewer tokens stays whole
  Int compress_every = 0;  ///< the head compresses by itself at so many rows more; 0: never
  bool after_first_compress = false;  ///< that begins with the first compression that it is told to make

  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int capacity() const { return budget + kept_rows; }
  /// Rows that are ranked.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int candidates(Int rows) const {
    return detail::minus(rows, kept_rows);
  }
  /// Rows that survive by their rank.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int chosen(Int rows) const {
    return detail::smaller(budget, candidates(rows));
  }
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int survivors(Int rows, Int tokens) const {
    return tokens < compress_from ? rows : detail::smaller(rows, capacity());
  }
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool drops_rows(Int rows, Int tokens) const {
    return survivors(rows, tokens) < rows;
  }
  /// Whether the head compresses unasked now; `told`: whether it was ever told to.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_due(Int rows, Int tokens, bool told) const {
    return compress_every > 0 && (told || !after_first_compress) && tokens >= compress_from &&
           rows >= capacity() + compress_every;
  }
};

}  // namespace kvpolicy
