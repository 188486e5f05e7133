// SPDX-License-Identifier: Apache-2.0
//
// A choice of chunks as runs of rows: whether it is one, and which rows of a part of the text it leaves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/segment.hpp>

namespace kvpolicy::detail {

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

/// Of the rows [first, first + rows) those that are in `chosen` or come after row `chosen_end`: adds them to
/// `runs`, counted from `first`, and returns their number.
inline std::size_t clip_chosen(std::span<const RowRun> chosen, std::size_t chosen_end, std::size_t first,
                               std::size_t rows, std::vector<RowRun>& runs) {
  const std::size_t last = first + rows;
  std::size_t total = 0;
  const auto add = [&](RowRun run) {
    const std::size_t from = std::max(run.first, first);
    const std::size_t to = std::min(run.first + run.rows, last);
    if (from >= to) return;
    total += to - from;
    if (!runs.empty() && runs.back().first + runs.back().rows == from - first) {
      runs.back().rows += to - from;
    } else {
      runs.push_back({from - first, to - from});
    }
  };
  for (const RowRun& run : chosen) add(run);
  add({chosen_end, last - std::min(last, chosen_end)});
  return total;
}

}  // namespace kvpolicy::detail
