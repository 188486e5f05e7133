// SPDX-License-Identifier: Apache-2.0
//
// Shows plans: a picture of what each head keeps, and the memory of each policy.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <kvpolicy/io/policy_json.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::tools {

/// A sentence on a pattern's cut that falls into a tie, from the settings of its plan
/// (tool_plan.hpp); empty if it does not.
[[nodiscard]] std::string tie_text(const io::OrderedJson& settings);

/// One line for each layer, one cell for each KV head, and a legend below.
[[nodiscard]] std::string plan_map(const HeadPlan<bfloat16>& plan, bool colour);

/// The memory of the heads that have the same policy and precision.
struct PolicyShare {
  std::string name;  ///< "full", "full, 4 bits", "sink_recent", …
  std::size_t heads = 0;
  std::size_t bytes = 0;       ///< after heads with a budget were compressed
  std::size_t peak_bytes = 0;  ///< before the compression
};

/// The heads by policy, in the order in which the plan first has them.
template <Element E>
[[nodiscard]] std::vector<PolicyShare> policy_shares(const HeadPlan<E>& plan, std::size_t tokens,
                                                     const CacheOptions& options);
extern template std::vector<PolicyShare> policy_shares(const HeadPlan<float>&, std::size_t,
                                                       const CacheOptions&);
extern template std::vector<PolicyShare> policy_shares(const HeadPlan<bfloat16>&, std::size_t,
                                                       const CacheOptions&);

/// Heads whose budget exceeds a text: the unused rows go to no other head.
struct UnusedBudgets {
  std::size_t heads = 0;
  std::size_t rows = 0;  ///< of all budgets beyond the text, windows included
};
template <Element E>
[[nodiscard]] UnusedBudgets unused_budgets(const HeadPlan<E>& plan, std::size_t tokens);

extern template UnusedBudgets unused_budgets(const HeadPlan<float>&, std::size_t);
extern template UnusedBudgets unused_budgets(const HeadPlan<bfloat16>&, std::size_t);

/// "3 heads may keep more rows than 1,000 tokens have; 200 rows of the budgets go to no head".
[[nodiscard]] std::string shown_unused(const UnusedBudgets& unused, std::size_t tokens);

}  // namespace kvpolicy::tools
