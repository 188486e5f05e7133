// SPDX-License-Identifier: Apache-2.0
//
// Which chunks a head that retrieves has chosen (policy/chunk_retrieval_cache.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/core/scratch.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy::detail {

/// What one query chose.
struct ChunkSelection {
  std::vector<RowRun> runs;   // of rows, ascending, not touching
  std::size_t chunks_end;     // rows from here on are read on top
  std::size_t rows;           // committed when it was chosen
  std::size_t tokens;         // the text with the query that chose

  template <class Archive>
  void serialize(Archive& archive) {
    archive(runs, chunks_end, rows, tokens);
  }

  /// Adds to `out` the rows of [first, first + count) that are read, as runs counted from `first`.
  /// Returns their number.
  std::size_t clip(std::size_t first, std::size_t count, std::vector<RowRun>& out) const {
    const std::size_t last = first + count;
    std::size_t total = 0;
    const auto add = [&](RowRun run) {
      const std::size_t from = std::max(run.first, first);
      const std::size_t to = std::min(run.first + run.rows, last);
      if (from >= to) return;
      total += to - from;
      if (!out.empty() && out.back().first + out.back().rows == from - first) {
        out.back().rows += to - from;
      } else {
        out.push_back({from - first, to - from});
      }
    };
    for (const RowRun& run : runs) add(run);
    add({chunks_end, last - std::min(last, chunks_end)});
    return total;
  }
};

/// What a head needs once it has chosen.
struct ChunkChoice {
  std::vector<ChunkSelection> selections;  // the last counts, those before it return with a rollback
  std::optional<ChunkSelection> pending;
  std::vector<RowRun> spare_runs;  // of a choice that is gone, for the next
  mutable std::vector<std::vector<RowRun>> shown_runs;  // what the last `segments` points to

  [[nodiscard]] std::size_t bytes() const {
    std::size_t runs = spare_runs.capacity();
    const std::size_t total = sizeof(ChunkChoice) + selections.capacity() * sizeof(ChunkSelection) +
                        shown_runs.capacity() * sizeof(std::vector<RowRun>);
    for (const ChunkSelection& selection : selections) {
      runs += selection.runs.capacity();
    }
    for (const std::vector<RowRun>& shown : shown_runs) runs += shown.capacity();
    return total + runs * sizeof(RowRun);
  }
};

/// Whether `runs` are whole chunks of `chunk` rows, ascending, apart from each other, before row `end` and
/// not more than `budget` rows.
[[nodiscard]] inline bool are_chunks(std::span<const RowRun> runs, std::size_t chunk, std::size_t end,
                                     std::size_t budget) {
  std::size_t next = 0;
  std::size_t total = 0;
  for (const RowRun& run : runs) {
    if (run.first < next || run.first > end || run.rows == 0 || run.rows > end - run.first ||
        run.first % chunk != 0 || run.rows % chunk != 0) {
      return false;
    }
    next = run.first + run.rows;
    total += run.rows;
  }
  return total <= budget;
}

/// Scratch memory of a choice, which belongs to the thread that chooses.
struct RefreshScratch {
  Scratch<float> scores;
  Scratch<std::uint32_t> ranks;
  Scratch<std::size_t> chosen;
};
[[nodiscard]] inline RefreshScratch& refresh_scratch() {
  thread_local RefreshScratch scratch;
  return scratch;
}

}  // namespace kvpolicy::detail
