// SPDX-License-Identifier: Apache-2.0
#include <reference_model/identify/duo_gates.hpp>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {
namespace {

bool has_shape(const HeadGates& gates, const LlamaConfig& c) {
  return gates.layers() == c.layers && gates.heads() == c.kv_heads;
}

}  // namespace

void GateTraining::validate() const {
  // These conditions are written so that NaN fails.
  require(steps > 0, "GateTraining: steps is 0, must be at least 1");
  require(rate > 0.0 && std::isfinite(rate), "GateTraining: rate is ", rate, ", must be positive");
  require(penalty >= 0.0 && std::isfinite(penalty), "GateTraining: penalty is ", penalty,
          ", must be 0 or more");
  require(initial >= 0.0 && initial <= 1.0, "GateTraining: initial is ", initial, ", must be in [0, 1]");
  require(streaming.sinks > 0 || streaming.recent > 0,
          "GateTraining: streaming heads without sinks and recent rows see nothing");
}

double rate_factor(std::size_t step, std::size_t steps) {
  const auto fifth = static_cast<double>(std::max<std::size_t>(steps / 5, 1));
  const double rise = static_cast<double>(step + 1) / fifth;
  const double fall = static_cast<double>(steps - std::min(step, steps)) / fifth;
  return std::min({1.0, std::max(rise, 0.1), std::max(fall, 0.1)});
}

void adam_step(GateState& state, const HeadGates& gradient, double rate) {
  constexpr double keep_mean = 0.9;
  constexpr double keep_square = 0.999;
  constexpr double epsilon = 1e-8;
  ++state.step;
  const auto steps = static_cast<double>(state.step);
  const double mean_share = 1.0 - std::pow(keep_mean, steps);
  const double square_share = 1.0 - std::pow(keep_square, steps);
  for (std::size_t i = 0; i < gradient.values().size(); ++i) {
    const double change = gradient.values()[i];
    double& mean = state.mean.values()[i];
    double& square = state.square.values()[i];
    mean = keep_mean * mean + (1.0 - keep_mean) * change;
    square = keep_square * square + (1.0 - keep_square) * change * change;
    state.gates.values()[i] -= rate * (mean / mean_share) / (std::sqrt(square / square_share) + epsilon);
  }
}

GateTrainer::GateTrainer(const Llama& model, const GateTraining& training, std::optional<GateState> resumed)
    : model_{&model},
      training_{(training.validate(), training)},
      gated_{model, training.streaming, training.mixing} {
  const LlamaConfig& c = model.config();
  if (!resumed) {
    state_.gates = HeadGates{c.layers, c.kv_heads, training.initial};
    state_.mean = HeadGates{c.layers, c.kv_heads, 0.0};
    state_.square = state_.mean;
    return;
  }
  require<ShapeError>(
      has_shape(resumed->gates, c) && has_shape(resumed->mean, c) && has_shape(resumed->square, c),
      "GateTrainer: the state to go on from has gates for ", resumed->gates.layers(), " layers of ",
      resumed->gates.heads(), " KV heads, the model has ", c.layers, " of ", c.kv_heads);
  check_gates(resumed->gates);
  check_gates(resumed->mean);
  check_gates(resumed->square);
  state_ = std::move(*resumed);
}

GateStep GateTrainer::step(const LabelledText& text) {
  require(!done(), "GateTrainer: all ", training_.steps, " steps are made");
  text.check();
  HeadGates gates = state_.gates;
  for (double& gate : gates.values()) gate = std::clamp(gate, 0.0, 1.0);

  const std::vector<float>& full = gated_.read(text.tokens);
  const std::vector<float>& mixed = gated_.mix(gates);
  const Loss loss = training_.objective == GateObjective::distillation
                        ? distillation_loss(mixed, full, text, training_.reduction)
                        : language_loss(*model_, mixed, text, training_.reduction);
  HeadGates gradient = gated_.gradient(loss.dhidden);
  check_gates(gradient);  // an overflow must stop here, before it becomes part of the state
  const double share =
      training_.reduction == Reduction::sum ? 1.0 : 1.0 / static_cast<double>(gates.values().size());
  GateStep result{
      .loss = loss.value, .penalty = 0.0, .rate = training_.rate * rate_factor(state_.step, training_.steps)};
  for (std::size_t i = 0; i < gates.values().size(); ++i) {
    const double gate = gates.values()[i];
    result.penalty += training_.penalty * share * gate;
    // The slope of |a| is 0 at 0: a closed gate is not pushed below 0.
    if (gate > 0.0) gradient.values()[i] += training_.penalty * share;
  }
  state_.gates = std::move(gates);
  adam_step(state_, gradient, result.rate);
  return result;
}

}  // namespace kvpolicy::reference
