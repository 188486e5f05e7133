// SPDX-License-Identifier: Apache-2.0
//
// Trains DuoAttention's gates (Xiao et al., arXiv:2410.10819, 2.2), one for each KV head. All gates
// begin open. Each step makes the mixed model more like the unmodified one on the labelled tokens
// of a text, and closes every gate a little. Heads whose gates stay open are retrieval heads.
//
// As in the published code, full attention comes from the unmodified run, losses and the penalty
// are means, the optimiser is AdamW without decay, the rate rises over the first fifth of the steps
// and falls over the last, and gates are clipped to [0, 1] before each step. Unlike there, all
// arithmetic is float and double (bfloat16 there), and a step has one text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <kvpolicy/plan/duo_gates.hpp>
#include <reference_model/gradient/gated_llama.hpp>
#include <reference_model/identify/labelled_text.hpp>
#include <reference_model/identify/loss.hpp>

namespace kvpolicy::reference {

enum class GateObjective : std::uint8_t {
  distillation,  ///< the distance from the unmodified model's last hidden rows
  language       ///< -log of the labelled tokens' probabilities, as in the paper's ablation
};

struct GateTraining {
  std::size_t steps = 400;  ///< The paper's 2,000 are for models of hundreds of heads.
  double rate = 0.02;
  double penalty = 0.05;  ///< factor of the mean (Reduction::sum: the sum) of the gates
  double initial = 1.0;
  AttentionMask streaming{.sinks = 128, .recent = 256};
  Mixing mixing = Mixing::full_of_unmodified;
  Reduction reduction = Reduction::mean;
  GateObjective objective = GateObjective::distillation;

  /// @throws ConfigError for no steps, a rate that is not positive, a negative penalty, an initial
  /// gate outside [0, 1], or a mask under which a query sees no row
  void validate() const;
};

/// The factor of the rate at a step, counted from 0: it rises to 1 over the first fifth of the
/// steps and falls over the last, and is never below a tenth.
[[nodiscard]] double rate_factor(std::size_t step, std::size_t steps);

/// Everything that training carries from step to step; checkpoints store it.
struct GateState {
  std::size_t step = 0;  ///< steps made
  HeadGates gates;       ///< a step may leave them a little outside [0, 1]
  HeadGates mean;        ///< AdamW's running mean of gradients
  HeadGates square;      ///< AdamW's running mean of squared gradients

  friend bool operator==(const GateState&, const GateState&) = default;
};

/// Makes a step of AdamW (Loshchilov and Hutter, arXiv:1711.05101; betas 0.9 and 0.999, epsilon
/// 1e-8) without decay, and counts it.
void adam_step(GateState& state, const HeadGates& gradient, double rate);

struct GateStep {
  double loss = 0.0;     ///< without the penalty
  double penalty = 0.0;  ///< as added to the loss: 0.05 · mean
  double rate = 0.0;
};

/// The model must outlive it. Not thread-safe; it uses several threads itself.
class GateTrainer {
 public:
  /// @throws as GateTraining::validate; ShapeError for a state of another model
  GateTrainer(const Llama& model, const GateTraining& training, std::optional<GateState> resumed = {});

  [[nodiscard]] const GateState& state() const { return state_; }
  [[nodiscard]] bool done() const { return state_.step >= training_.steps; }

  /// Makes one step on a text. The number of the text should be that of the step, so that a resumed
  /// training gets the same texts. If a step throws, the state is as before.
  /// @throws ConfigError after the last step; as LabelledText::check and the model's runs
  GateStep step(const LabelledText& text);

 private:
  const Llama* model_;
  GateTraining training_;
  GatedLlama gated_;
  GateState state_;
};

}  // namespace kvpolicy::reference
