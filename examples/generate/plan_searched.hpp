// SPDX-License-Identifier: Apache-2.0
//
// `plan search`: the plan with the least damage within bytes that a cache takes, or that a step reads, or both.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include <CLI/CLI.hpp>

#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/search.hpp>

#include "../common/plan_search.hpp"

namespace kvpolicy::tools {

/// What a plan may cost, and what is known about the heads.
struct SearchArguments {
  HeadKnowledge known = {};
  std::string shape = {};       ///< empty: that of the model folder `known.weights`
  std::string bytes = {};       ///< empty: an eighth of a full cache, or any number if `bytes_read` is given
  std::string bytes_read = {};  ///< empty: any number
  std::string output = {};      ///< where the plan goes; empty: nowhere

  void add_to(CLI::App& command);
};

/// The plan that was found, and what it was found by. Writes it to `output`.
class SearchedPlan {
 public:
  /// @throws as `search_choices`, `parse_budget` and `search_plan`, ConfigError where neither a shape nor a model
  /// folder is given, StorageError if the plan cannot be written
  SearchedPlan(const SearchArguments& arguments, std::size_t context, const CacheOptions& options);

  /// A picture of the plan below its costs.
  [[nodiscard]] std::string text(bool colour) const;
  [[nodiscard]] nlohmann::ordered_json json() const;

 private:
  // How the plan has to be read so that it reads no more than was counted; empty if all of its rows are.
  [[nodiscard]] std::string reading() const;
  [[nodiscard]] double times_smaller() const {
    return static_cast<double>(full_) / static_cast<double>(found_->bytes);
  }

  std::string output_;
  std::string from_;
  std::size_t choices_ = 0;
  std::optional<double> epsilon_;
  std::size_t context_;
  std::optional<std::size_t> bytes_allowed_;
  std::optional<std::size_t> read_allowed_;
  std::size_t full_ = 0;  // bytes of a full cache
  double full_read_ = 0;  // and what a step reads of it
  bool bounded_ = false;  // some head is read with a bound
  std::optional<FoundPlan<bfloat16>> found_;
};

}  // namespace kvpolicy::tools
