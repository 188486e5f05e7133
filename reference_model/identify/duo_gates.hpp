// SPDX-License-Identifier: Apache-2.0
//
// Trains DuoAttention's gates (Xiao et al., arXiv:2410.10819, 2.2): one for each KV head, open at
// first; each step makes the mixed model more like the unmodified one on the labelled tokens of a
// text, and closes every gate a little. What stays open retrieves.
//
// As the published code does it: full attention from the unmodified run, losses and the penalty as
// means, AdamW without decay, a rate that rises over a fifth of the steps and falls over the last,
// gates clipped to [0, 1] before each step. Different: arithmetic is float and double throughout
// (bfloat16 there), one text a step.
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
  language       ///< -log of the labelled tokens' probabilities: the paper's ablation
};

struct GateTraining {
  std::size_t steps = 400;  ///< The paper's 2,000 are for models of hundreds of heads.
  double rate = 0.02;
  double penalty = 0.05;  ///< on the mean (Reduction::sum: the sum) of the gates
  double initial = 1.0;
  AttentionMask streaming{.sinks = 128, .recent = 256};
  Mixing mixing = Mixing::full_of_unmodified;
  Reduction reduction = Reduction::mean;
  GateObjective objective = GateObjective::distillation;

  /// @throws ConfigError for no steps, a rate that is not positive, a negative penalty, an initial
  /// gate outside [0, 1], or a mask that shows a query nothing.
  void validate() const;
};

/// The share of the rate at a step, from 0: rises to 1 over the first fifth of the steps, falls over
/// the last, never below a tenth.
[[nodiscard]] double rate_factor(std::size_t step, std::size_t steps);

/// All that training carries from step to step: what a checkpoint keeps.
struct GateState {
  std::size_t step = 0;  ///< steps made
  HeadGates gates;       ///< a step may leave them a little outside [0, 1]
  HeadGates mean;        ///< AdamW's running mean of gradients
  HeadGates square;      ///< and of their squares

  friend bool operator==(const GateState&, const GateState&) = default;
};

/// AdamW's step (Loshchilov and Hutter, arXiv:1711.05101; betas 0.9 and 0.999, epsilon 1e-8) without
/// decay. Counts the step.
void adam_step(GateState& state, const HeadGates& gradient, double rate);

struct GateStep {
  double loss = 0.0;     ///< without the penalty
  double penalty = 0.0;  ///< as it is added: 0.05 · mean
  double rate = 0.0;
};

/// The model must outlive it. One thread at a time; works on several by itself.
class GateTrainer {
 public:
  /// @throws as GateTraining::validate; ShapeError for a state of another model.
  GateTrainer(const Llama& model, const GateTraining& training,
              std::optional<GateState> resumed = {});

  [[nodiscard]] const GateState& state() const { return state_; }
  [[nodiscard]] bool done() const { return state_.step >= training_.steps; }

  /// One step on a text. A text's number should be the step's, so that a resumed training meets the
  /// same texts. @throws ConfigError when done; as LabelledText::check and the model's runs. The
  /// state is then as before.
  GateStep step(const LabelledText& text);

 private:
  const Llama* model_;
  GateTraining training_;
  GatedLlama gated_;
  GateState state_;
};

}  // namespace kvpolicy::reference
