// SPDX-License-Identifier: Apache-2.0
//
// The training of gates: compares its optimiser and schedule with PyTorch's numbers, and checks what a
// training of a tiny random model must achieve.
#include <reference_model/identify/duo_gates.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

#include "model/golden.hpp"

namespace kvpolicy::reference::duo_gates_test {
namespace {

LabelledText text_of(const std::string& name) {
  LabelledText text{.tokens = load_golden(name).tokens, .labels = {}, .passkeys = {}};
  for (std::size_t i = 100; i < 150; ++i) text.labels.push_back(i);
  return text;
}

TEST_CASE("steps are those of PyTorch's AdamW, rates those of the published schedule") {
  // Results of torch.optim.AdamW(lr=0.02, weight_decay=0) under LambdaLR with the published function: 12
  // steps in float64, with gates clipped before each step.
  struct Row {
    double rate, first, second;
  };
  const std::vector<Row> golden{
      {0.01, 1.009999985714306, 0.49000000039999997},  {0.02, 1.0190206928958778, 0.4861700398812561},
      {0.02, 1.0161650455832494, 0.4756026188186261},  {0.02, 1.0100746295298886, 0.47177265829988224},
      {0.02, 1.0017021459404076, 0.4633434623992057},  {0.02, 0.994500906477067, 0.45951350188046186},
      {0.02, 0.9842209060399798, 0.4520169978628863},  {0.02, 0.9709067098121726, 0.44818703734414245},
      {0.02, 0.9555749699593259, 0.44120366821884294}, {0.02, 0.9388099263416473, 0.4373737077000991},
      {0.02, 0.9209619103274082, 0.43070882553800305}, {0.01, 0.9116071640735478, 0.4287938452786311},
  };
  const std::size_t steps = golden.size();
  GateState state{.step = 0,
                  .gates = HeadGates{1, 2, {1.0, 0.5}},
                  .mean = HeadGates{1, 2, 0.0},
                  .square = HeadGates{1, 2, 0.0}};
  for (std::size_t step = 0; step < steps; ++step) {
    CAPTURE(step);
    for (double& gate : state.gates.values()) gate = std::clamp(gate, 0.0, 1.0);
    const double rate = 0.02 * rate_factor(step, steps);
    CHECK(std::abs(rate - golden[step].rate) <= 1e-15);
    const auto n = static_cast<double>(step);
    adam_step(state, HeadGates{1, 2, {0.003 * (n + 1) - 0.01, (step % 2 == 0 ? 0.2 : -0.2) + 0.05}}, rate);
    CHECK(std::abs(state.gates(0, 0) - golden[step].first) <= 1e-12);
    CHECK(std::abs(state.gates(0, 1) - golden[step].second) <= 1e-12);
    CHECK(state.step == step + 1);
  }
}

TEST_CASE("the rate rises over the first fifth, falls over the last, and is never below a tenth") {
  CHECK(rate_factor(0, 2000) == 0.1);
  CHECK(rate_factor(39, 2000) == 0.1);
  CHECK(rate_factor(199, 2000) == 0.5);
  CHECK(rate_factor(399, 2000) == 1.0);
  CHECK(rate_factor(1600, 2000) == 1.0);
  CHECK(rate_factor(1800, 2000) == 0.5);
  CHECK(rate_factor(1999, 2000) == 0.1);
  for (std::size_t steps = 1; steps < 12; ++steps) {  // also where a fifth is less than a step
    for (std::size_t step = 0; step < steps; ++step) {
      CHECK(rate_factor(step, steps) >= 0.1);
      CHECK(rate_factor(step, steps) <= 1.0);
    }
  }
}

TEST_CASE("training finds better gates than all open or all closed ones") {
  const std::string name = "gqa2_d80";
  const Llama model = Llama::load(golden_folder(name));
  const LabelledText text = text_of(name);
  for (const GateObjective objective : {GateObjective::distillation, GateObjective::language}) {
    for (const Mixing mixing : {Mixing::full_of_unmodified, Mixing::full_of_mixed}) {
      const GateTraining training{.steps = 50,
                                  .rate = 0.05,
                                  .penalty = 0.3,
                                  .streaming = {.sinks = 4, .recent = 24},
                                  .mixing = mixing,
                                  .objective = objective};
      GatedLlama gated{model, training.streaming, mixing};
      const std::vector<float> full = gated.read(text.tokens);
      const auto cost = [&](HeadGates gates) {
        double penalty = 0.0;
        for (double& gate : gates.values()) {
          gate = std::clamp(gate, 0.0, 1.0);
          penalty += 0.3 * gate / static_cast<double>(gates.values().size());
        }
        const std::vector<float>& mixed = gated.mix(gates);
        const Loss loss = objective == GateObjective::distillation
                              ? distillation_loss(mixed, full, text, Reduction::mean)
                              : language_loss(model, mixed, text, Reduction::mean);
        return loss.value + penalty;
      };
      GateTrainer trainer{model, training};
      const GateStep first = trainer.step(text);
      CHECK(first.penalty == doctest::Approx(0.3));  // all gates are open at first
      if (objective == GateObjective::distillation) CHECK(first.loss == 0.0);
      CHECK(first.rate == doctest::Approx(0.05 / 10));
      while (!trainer.done()) trainer.step(text);
      const double trained = cost(trainer.state().gates);
      CHECK(trained < cost(HeadGates{2, 2, 1.0}));
      CHECK(trained < cost(HeadGates{2, 2, 0.0}) + 1e-6);
      CHECK_THROWS_AS(trainer.step(text), ConfigError);
    }
  }
}

TEST_CASE("a training that continues from a state ends at the same numbers") {
  const std::string name = "all_biases";
  const Llama model = Llama::load(golden_folder(name));
  const LabelledText text = text_of(name);
  const GateTraining training{.steps = 12, .streaming = {.sinks = 2, .recent = 16}};
  GateTrainer straight{model, training};
  GateTrainer begun{model, training};
  while (!straight.done()) straight.step(text);
  for (int i = 0; i < 5; ++i) begun.step(text);
  GateTrainer resumed{model, training, begun.state()};
  while (!resumed.done()) resumed.step(text);
  CHECK(resumed.state() == straight.state());
  CHECK(begun.state().step == 5);
}

TEST_CASE("a failed step does not change the state; invalid settings are refused") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  GateTrainer trainer{model, {.steps = 3, .streaming = {.sinks = 1, .recent = 8}}};
  const GateState before = trainer.state();
  CHECK_THROWS_AS(trainer.step({.tokens = {1, 2}, .labels = {}, .passkeys = {}}), ShapeError);
  CHECK_THROWS_AS(trainer.step({.tokens = {1, 2}, .labels = {2}, .passkeys = {}}), ShapeError);
  CHECK_THROWS_AS(trainer.step({.tokens = {1, 99}, .labels = {1}, .passkeys = {}}), ShapeError);
  CHECK(trainer.state() == before);

  CHECK_THROWS_AS((GateTrainer{model, {.steps = 0}}), ConfigError);
  CHECK_THROWS_AS((GateTrainer{model, {.rate = 0.0}}), ConfigError);
  CHECK_THROWS_AS((GateTrainer{model, {.rate = NAN}}), ConfigError);
  CHECK_THROWS_AS((GateTrainer{model, {.penalty = -1.0}}), ConfigError);
  CHECK_THROWS_AS((GateTrainer{model, {.initial = 1.5}}), ConfigError);
  CHECK_THROWS_AS((GateTrainer{model, {.streaming = {.sinks = 0, .recent = 0}}}), ConfigError);
  GateState other = before;
  other.mean = HeadGates{2, 3, 0.0};
  CHECK_THROWS_AS((GateTrainer{model, {}, other}), ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::duo_gates_test
