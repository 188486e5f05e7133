// SPDX-License-Identifier: Apache-2.0
//
// Formats points of an evaluation (evaluation.hpp) as Markdown: a table for each suite and measure,
// a row for each plan, a column for each length.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace kvpolicy::tools {

/// Means over the seeds, with the standard deviation where there are several seeds. Rows and
/// columns keep the order of the points.
[[nodiscard]] std::string evaluation_tables(const std::vector<nlohmann::ordered_json>& points);

}  // namespace kvpolicy::tools
