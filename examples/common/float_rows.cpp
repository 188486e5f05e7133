// SPDX-License-Identifier: Apache-2.0
//
// Plans and sequences with rows of float, for the few tools that have them besides bfloat16.
#include <utility>

#include <kvpolicy/io/plan_json.hpp>

#include "../tool_plan.hpp"
#include "plan_sequence.hpp"

namespace kvpolicy::tools {

template <>
HeadPlan<float> make_plan<float>(const PlanArguments& arguments, const ModelShape& shape,
                                 const std::filesystem::path& weights, io::OrderedJson* settings) {
  // A plan file does not name the element type, so writing and parsing converts the plan.
  return io::parse_plan<float>(io::format_plan(make_plan<bfloat16>(arguments, shape, weights, settings)));
}

std::unique_ptr<Sequence> make_sequence(const reference::Llama& model, HeadPlan<float> plan) {
  return make_plan_sequence(model, std::move(plan), {});
}

}  // namespace kvpolicy::tools
