// SPDX-License-Identifier: Apache-2.0
//
// RazorAttention's scores (Tang et al., arXiv:2407.15891): how much each query head attends to
// earlier occurrences of the token that it reads (echo), and to the tokens that followed them
// (induction). The text is random tokens, repeated, so neither meaning nor distance tells a head
// where to look. The paper reads 2,500 random tokens four times and does not say how several
// earlier occurrences count; here their shares are added.
#pragma once

#include <cstddef>
#include <span>

#include <kvpolicy/plan/headkv_budgets.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// The mean share of attention over the queries of all repetitions but the first, [layers, q_heads]
/// each. A share is from 0 to 1; so is the sum of both scores of a head.
struct RazorScores {
  HeadScores echo;
  HeadScores induction;
};

/// Reads `tokens` `repetitions` times in one text, after the tokens of `opening`, which texts of
/// the model begin with and which are not repeated.
/// @throws ShapeError for fewer than 3 tokens or fewer than 2 repetitions, or for a token outside
/// the vocabulary
[[nodiscard]] RazorScores razor_scores(const Llama& model, std::span<const int> opening,
                                       std::span<const int> tokens, std::size_t repetitions = 4);

}  // namespace kvpolicy::reference
