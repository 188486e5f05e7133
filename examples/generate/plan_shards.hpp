// SPDX-License-Identifier: Apache-2.0
//
// `plan shards`: divides a plan's heads among ranks and says who holds what and how long a step takes, as predicted.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <CLI/CLI.hpp>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/shards.hpp>

namespace kvpolicy::tools {

/// How heads are divided, and what bytes and messages are worth.
struct ShardArguments {
  BalanceConfig balance = {.ranks = 2};  ///< cut_rows, merge_cost and most_bytes follow from the others
  bool whole = false;
  std::string memory = {};     ///< of a rank; empty: any
  std::string costs = {};      ///< a file of measured costs; empty: costs are bytes
  double bandwidth_gb = 2039;  ///< that a device reads in a second, without such a file: an A100 with 80 GB
  double message_us = 10;      ///< that a part of a cut head adds to its layer

  void add_to(CLI::App& command);
};

class PlanShards {
 public:
  /// @throws as `balance`, for a size of memory that is none, and for a file of costs that cannot be read or does not
  /// have what the plan needs
  PlanShards(const HeadPlan<bfloat16>& plan, std::size_t context, const CacheOptions& options,
             const ShardArguments& arguments);

  /// A line for each layer and a cell for each rank ("0 3 5" are whole heads, "2:34%" is a third of head 2's rows), and
  /// what it comes to.
  [[nodiscard]] std::string text(bool bold) const;
  /// The same, of each layer and rank its parts (head, and slots from and to if it is cut), and what merges.
  [[nodiscard]] nlohmann::ordered_json json() const;

 private:
  // The slowest ranks' time for all layers.
  [[nodiscard]] double seconds_of(const Shards& shards) const;
  [[nodiscard]] std::string map(bool bold) const;
  [[nodiscard]] std::string sums(bool bold) const;
  [[nodiscard]] std::size_t cut_heads() const;

  // What a rank does in a step, and what it holds.
  struct RankSum {
    double read_bytes = 0, seconds = 0, held_bytes = 0;
  };

  ShardArguments arguments_;
  std::size_t context_;
  std::size_t heads_;
  double seconds_per_cost_;  // costs are seconds, or bytes at the bandwidth
  HeadCosts costs_;
  HeadCosts held_;  // bytes
  Shards shards_;
  double ideal_seconds_;                // if nobody waited, and messages took no time
  std::optional<double> even_seconds_;  // with equally many heads, in their order
  std::vector<RankSum> ranks_;
};

}  // namespace kvpolicy::tools
