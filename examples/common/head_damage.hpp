// SPDX-License-Identifier: Apache-2.0
//
// What a model loses when a single head is given another policy: the numbers that plan search adds up.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/search.hpp>
#include <reference_model/llama.hpp>

#include "retrieval_text.hpp"

namespace kvpolicy::tools {

/// What a model pays for texts under a plan, in nats: less is better.
struct TextLoss {
  double answers = 0;  ///< for a whole answer, mean: whether all of it is right is what counts
  double text = 0;     ///< for a token of the text's own end, mean
  [[nodiscard]] double sum() const { return answers + text; }
};

/// Called with the share that is done.
using DamageReport = std::function<void(double share)>;

/// How much every choice harms on every head: the mean of two rises of the loss, that of the head alone
/// having the choice, and that which the head adds where all others have it. Heads that stand in for one
/// another hardly show in the first, and more than their worth in the second: these are the first and the
/// last term of a Shapley value (Shapley, 1953), which the mean of all orders would be. What a choice gains
/// counts as 0, and of one policy and storage a choice of fewer bytes counts as no better than one of more.
///
/// Each text is read once with all rows kept and forked under each plan: what a window does to the reading
/// of a prompt is not measured. Heads with a budget are compressed behind the question, and behind the text
/// for its end.
///
/// Texts are shared among threads; how many there are changes the result by rounding alone.
/// @throws ConfigError as require_bytes, or for no texts or a text of no more than `end` bytes
[[nodiscard]] std::vector<HeadChoice<bfloat16>> measure_damage(
    const reference::Llama& model, std::span<const HeadSettings<bfloat16>> choices,
    std::span<const RetrievalText> texts, const DamageReport& report = {}, std::size_t end = 128);

/// The loss under one plan, by the same texts and the same forks.
[[nodiscard]] TextLoss loss_under(const reference::Llama& model, const HeadPlan<bfloat16>& plan,
                                  std::span<const RetrievalText> texts, std::size_t end = 128);

}  // namespace kvpolicy::tools
