// SPDX-License-Identifier: Apache-2.0
//
// Measures what a model loses when a single head gets another policy. Plan search adds these
// numbers up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/search.hpp>
#include "../common/retrieval_text.hpp"
#include "../common/text_model.hpp"

namespace kvpolicy::tools {

/// What is counted of a token: how surprising it is, or how far the prediction before it diverges from the full
/// cache's. A divergence is never negative and shows changes that a few texts' surprise is too noisy for, such as
/// those of 4 bits; a surprise is what the model's answers depend on.
enum class DamageBy : std::uint8_t { surprise, divergence };

/// How damage is counted.
struct DamageConfig {
  std::size_t end = 128;  ///< tokens of a text's end that count, the first one but as context
  DamageBy by = DamageBy::surprise;
};

/// A model's loss on texts under a plan, in nats.
struct TextLoss {
  double answers = 0;  ///< of a whole answer, mean: a single wrong byte makes an answer wrong
  double text = 0;     ///< of a token of the text's own end, mean
  [[nodiscard]] double sum() const { return answers + text; }
};

/// Is called with the share of the work that is done.
using DamageReport = std::function<void(double share)>;

/// The damage of every choice on every head. It is the mean of two increases of the loss: with the
/// choice on this head alone, and with the choice on all heads compared to all but this one. Heads
/// that can replace one another hardly show in the first and show too much in the second. The two
/// are the first and the last term of a Shapley value (Shapley, 1953), which is the mean over all
/// orders. A negative damage counts as 0. Within one policy and storage, a choice of fewer bytes
/// never gets a smaller damage than one of more bytes.
///
/// Each text is read once with all rows kept and forked under each plan, so the effect of a window
/// on the reading of a prompt is not measured. Heads with a budget are compressed after the
/// question, and for the loss on the text's end after the text.
///
/// Texts are distributed over threads; their number changes the result only by rounding.
/// @throws ConfigError for no texts or a text of no more than `config.end` tokens
[[nodiscard]] std::vector<HeadChoice<bfloat16>> measure_damage(
    const TextModel& model, std::span<const HeadSettings<bfloat16>> choices,
    std::span<const RetrievalText> texts, const DamageReport& report = {}, const DamageConfig& config = {});

/// The loss under one plan, measured with the same texts and forks.
[[nodiscard]] TextLoss loss_under(const TextModel& model, const HeadPlan<bfloat16>& plan,
                                  std::span<const RetrievalText> texts, const DamageConfig& config = {});

}  // namespace kvpolicy::tools
