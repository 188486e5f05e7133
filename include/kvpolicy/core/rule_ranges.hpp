// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of a head's rule (core/head_rule.hpp): which rows live, which of them a query reads, which
// rows are quantised, which heads compress and how many rows survive. The policies and storages of the
// host, the device cache and its kernels all use these functions, so a rule means the same everywhere.
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

  /// Number of rows; 0 if `end` comes before `begin`.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int rows() const { return detail::minus(end, begin); }

  friend bool operator==(const RowRange&, const RowRange&) = default;
};

/// The sinks and the sliding window of a head. Without a window (`recent` = 0) every row lives.
template <class Int>
struct WindowRule {
  Int sinks = 0;                    ///< first rows of the text, which always live
  Int recent = 0;                   ///< latest rows that live besides the sinks; 0: all
  bool prefill_chunk_mask = false;  ///< `recent` counts from the call's first query, not from each query

  /// The oldest row besides the sinks that lives in a text of `tokens` tokens.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int first_kept(Int tokens) const {
    return recent == 0 ? sinks : detail::larger(sinks, detail::minus(tokens, recent));
  }
  /// How many rows live in a text of `tokens` tokens.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int kept_rows(Int tokens) const {
    return detail::smaller(sinks, tokens) + detail::minus(tokens, first_kept(tokens));
  }

  /// The oldest row besides the sinks that any query of a call reads; the call's first query is at
  /// `first_position`. With `prefill_chunk_mask` that query reads the `recent` rows before it; otherwise
  /// the `recent` rows include its own.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int first_read(Int first_position) const {
    return first_kept(first_position + (prefill_chunk_mask ? 0 : 1));
  }
  /// The window of a query: a query at t reads a row at p besides the sinks only if p > t - query_window.
  /// `unlimited` is returned if there is no such limit.
  template <class Window>
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Window query_window(Window unlimited) const {
    return recent > 0 && !prefill_chunk_mask ? static_cast<Window>(recent) : unlimited;
  }

  /// The sinks among the rows `rows`.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr RowRange<Int> sinks_among(RowRange<Int> rows) const {
    return {rows.begin, detail::smaller(detail::larger(sinks, rows.begin), rows.end)};
  }
  /// The rows among `rows`, besides the sinks, that at least one query of a call reads, according to its
  /// `query_window`.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr RowRange<Int> recent_among(RowRange<Int> rows,
                                                                          Int first_position) const {
    return {detail::smaller(detail::larger(first_read(first_position), rows.begin), rows.end), rows.end};
  }
};

/// The rule that decides which rows leave the residual, which are the latest rows and stay exact.
template <class Int>
struct ResidualRule {
  Int residual = 0;   ///< at least so many latest rows stay exact
  Int unit = 1;       ///< rows that are quantised together
  bool kivi = false;  ///< all rows are quantised when their number is a multiple of `residual`

  /// How many of the first `rows` rows are quantised.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int quantized(Int rows) const {
    if (kivi) return rows / residual * residual;
    return rows > residual ? (rows - residual) / unit * unit : 0;
  }
};

/// Selection by retrieval chunks. Only full chunks can be selected.
template <class Int>
struct ChunkRule {
  Int chunk = 0;          ///< rows of a chunk; 0: every row is read
  Int budget = 0;         ///< chunks that a query reads
  Int refresh_every = 0;  ///< committed rows until a new choice; 0: only on request

  /// Number of full chunks among the first `rows` rows.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int closed(Int rows) const { return rows / chunk; }
  /// Number of rows in full chunks; a query reads all rows after them.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int closed_rows(Int rows) const {
    return closed(rows) * chunk;
  }
  /// How many chunks are chosen among the first `rows` rows.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int chosen(Int rows) const {
    return detail::smaller(budget, closed(rows));
  }
  /// Whether a choice is too old: `then` rows were committed when it was made, and `now` rows are.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_stale(Int then, Int now) const {
    return refresh_every > 0 && now - then >= refresh_every;
  }
};

/// The rows of its budget that a head keeps in any case when a layer's heads share their budgets (Ada-KV).
template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int safe_rows(double safeguard, Int budget) {
  return static_cast<Int>(safeguard * static_cast<double>(budget));
}

/// The rule that decides how many rows survive a compression of a head, and when the head compresses by
/// itself. `rows` is the number of rows that the head holds, `tokens` the length of the text.
template <class Int>
struct BudgetRule {
  Int budget = 0;                     ///< rows that survive by rank
  Int kept_rows = 0;                  ///< latest rows that always survive
  Int compress_from = 0;              ///< a shorter text is not compressed
  Int compress_every = 0;             ///< rows until the head compresses again by itself; 0: never
  bool after_first_compress = false;  ///< `compress_every` starts with the first requested compression

  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int capacity() const { return budget + kept_rows; }
  /// Number of rows that are ranked.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int candidates(Int rows) const {
    return detail::minus(rows, kept_rows);
  }
  /// Number of rows that survive by rank.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int chosen(Int rows) const {
    return detail::smaller(budget, candidates(rows));
  }
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int survivors(Int rows, Int tokens) const {
    return tokens < compress_from ? rows : detail::smaller(rows, capacity());
  }
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool drops_rows(Int rows, Int tokens) const {
    return survivors(rows, tokens) < rows;
  }
  /// Whether the head must compress by itself now; `compressed_once`: whether it ever was.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_due(Int rows, Int tokens, bool compressed_once) const {
    return compress_every > 0 && (compressed_once || !after_first_compress) && tokens >= compress_from &&
           rows >= capacity() + compress_every;
  }
};

}  // namespace kvpolicy
