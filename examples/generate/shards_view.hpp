// SPDX-License-Identifier: Apache-2.0
//
// Shows who holds which heads, for `plan shards`.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include <kvpolicy/plan/shards.hpp>

namespace kvpolicy::tools {

/// How bytes become time: what `plan shards` predicts by.
struct ShardTimes {
  double bandwidth = 2.0e12;  ///< bytes that a device reads in a second
  double message = 10e-6;     ///< seconds that a part of a cut head adds to a layer
  [[nodiscard]] double seconds(double cost) const { return cost / bandwidth; }
};

/// The slowest ranks' time for all layers, in seconds: costs are bytes.
[[nodiscard]] double step_seconds(const Shards& shards, const ShardTimes& times);

/// A line for each layer and a cell for each rank: "0 3 5" are whole heads, "2:34%" is a third of head 2's rows.
[[nodiscard]] std::string shards_map(const Shards& shards, bool bold);

/// The same as JSON: of each layer and rank its parts (head, and slots from and to if it is cut), and what merges.
[[nodiscard]] nlohmann::ordered_json shards_json(const Shards& shards);

}  // namespace kvpolicy::tools
