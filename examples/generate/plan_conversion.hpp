// SPDX-License-Identifier: Apache-2.0
//
// `plan convert`: a plan as the files that were published with DuoAttention and HeadKV.
#pragma once

#include <kvpolicy/headkv.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::tools {

/// Heads that keep every row get gate 1, streaming heads gate 0.
/// @throws ConfigError for heads of other policies, or windows that differ
[[nodiscard]] io::DuoPattern pattern_of(const HeadPlan<bfloat16>& plan);

/// Scores in proportion to the budgets; with beta = 1, and the capacity and the window that go to `config`, they give
/// the same budgets again. @throws ConfigError for heads without a budget or with another scorer than SnapKV's
[[nodiscard]] HeadScores scores_of(const HeadPlan<bfloat16>& plan, HeadKvConfig& config);

}  // namespace kvpolicy::tools
