// SPDX-License-Identifier: Apache-2.0
//
// What the reads with a bound of a recording came to, in a few numbers: for the terminal and --json, where the page
// shows every head and step. Only heads count whose keys are in halves, because others read all of their rows.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "recording.hpp"

namespace kvpolicy::tools {

/// The largest and the median of some shares.
struct ShareRange {
  double largest = 0;
  double median = 0;  ///< of an even number of shares the mean of the two in the middle
};

/// Over all reads with a bound: one for each new token and KV head whose keys are in halves.
struct BoundSummary {
  std::size_t reads = 0;
  ShareRange bound;                        ///< what the rows left unread hold of a query's attention at most
  ShareRange measured;                     ///< what they hold
  double rows_read = 0;                    ///< share of the rows that the heads kept
  std::vector<double> rows_read_by_layer;  ///< the same; negative for a layer without such heads
};

/// Nothing if no token was read with a bound.
[[nodiscard]] std::optional<BoundSummary> summarize_bound(const Recording& recording);

/// Lines for a terminal, each with a label of the width that `visualize` prints.
[[nodiscard]] std::string shown(const BoundSummary& summary);

}  // namespace kvpolicy::tools
