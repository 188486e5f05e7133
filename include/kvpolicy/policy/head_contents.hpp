// SPDX-License-Identifier: Apache-2.0
//
// What one head holds, part by part, for a copy of the head in another place: the host's heads and the
// device's store the same rows in different pages, and hand them to each other in this form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/core/segment.hpp>

namespace kvpolicy {

/// One choice of chunks (policy/chunk_retrieval_cache.hpp).
struct ChosenChunks {
  std::vector<RowRun> runs = {};  ///< of rows, ascending, not touching
  std::size_t committed = 0;      ///< rows that were committed when the choice was made
  std::size_t tokens = 0;         ///< of the text, with the query that chose
};

/// The committed rows of one head and what the head knows of them. Planes point into memory of whoever
/// filled this in, and stay valid until that changes.
struct HeadContents {
  std::size_t committed = 0;           ///< rows that the head was given, kept or not
  SegmentList rows = {};               ///< rows that it keeps, in the order of the text, as they are stored
  bool quantization_deferred = false;  ///< rows stay exact until the first compression
  bool compressed_once = false;        ///< the head was compressed, also if no row was dropped
  std::size_t unshared_rows = 0;       ///< that it would keep if it shared no budget with other heads
  /// The attention that each row got so far, where the head adds it up; `unscored` of a row that no scoring pass has
  /// seen, where it waits for one.
  std::vector<double> accumulated = {};
  static constexpr double unscored = -1.0;
  /// The summaries of the full chunks: one plane for each vector of a summary. The last chunk, if it is not full, is
  /// summarised again from its keys.
  std::vector<Plane> summaries = {};
  std::vector<ChosenChunks> choices = {};  ///< the last counts, those before it return with a rollback
};

namespace detail {

/// Rows between those that a head keeps: zeros. A policy that drops rows by their number can be given
/// them instead of the rows that it dropped.
[[nodiscard]] inline Segment zero_rows(const std::vector<std::byte>& one_row, Encoding encoding,
                                       std::size_t rows, std::size_t position) {
  const Plane plane{.format = {.encoding = encoding}, .base = one_row.data()};
  return {.keys = plane, .values = plane, .rows = rows, .position = static_cast<std::int64_t>(position)};
}

}  // namespace detail
}  // namespace kvpolicy
