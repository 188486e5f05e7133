// SPDX-License-Identifier: Apache-2.0
//
// `plan search`: makes a plan from a budget of bytes and what is known about the heads.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/search.hpp>

namespace kvpolicy::tools {

/// The measurements of heads that a search uses. At most one of the last three fields is set. If
/// none is, the files in `weights` are used: damage.json, else duo/, else
/// headkv/retrieval_heads.json.
struct HeadKnowledge {
  std::string weights = {};
  std::string damage = {};  ///< a file of `identify_heads damage` or `identify_heads shares`
  std::string gates = {};   ///< a DuoAttention pattern folder
  std::string scores = {};  ///< a HeadKV score file

  [[nodiscard]] std::size_t given() const {
    return (damage.empty() ? 0U : 1U) + (gates.empty() ? 0U : 1U) + (scores.empty() ? 0U : 1U);
  }
};

struct SearchChoices {
  std::vector<HeadChoice<bfloat16>> choices;
  std::string from;                    ///< "damages measured at 2,048 tokens (…/damage.json)"
  std::optional<double> epsilon = {};  ///< the bound under which choices with `rows_read` are read
};

/// @throws ConfigError if nothing is known or it does not fit the shape, FormatError for bad files
[[nodiscard]] SearchChoices search_choices(const HeadKnowledge& known, const ModelShape& shape,
                                           std::size_t context);

/// Parses "1/8" as a share of `whole` bytes, or bytes as parse_bytes does.
/// @throws ConfigError
[[nodiscard]] std::size_t parse_budget(const std::string& text, double whole);

}  // namespace kvpolicy::tools
