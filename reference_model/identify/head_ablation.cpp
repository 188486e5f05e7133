// SPDX-License-Identifier: Apache-2.0
#include <reference_model/identify/head_ablation.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/gradient/gated_llama.hpp>
#include <reference_model/identify/loss.hpp>

namespace kvpolicy::reference {

HeadAblation ablate_heads(const Llama& model, std::span<const LabelledText> texts, AttentionMask streaming,
                          GateObjective objective, const RunReport& report) {
  const LlamaConfig& c = model.config();
  require<ShapeError>(!texts.empty(), "ablate_heads: no texts, expected at least 1");
  const std::size_t runs = texts.size() * (c.layers * c.kv_heads + 1);
  std::size_t done = 0;
  const auto count = [&] {
    ++done;
    if (report) report(done, runs);
  };
  HeadAblation result{.loss = 0.0, .losses = HeadTable<double>{c.layers, c.kv_heads, 0.0}};
  const double share = 1.0 / static_cast<double>(texts.size());
  for (const LabelledText& text : texts) {
    const LabelledText asked = text.passkeys.empty() ? text : answers_of(text);
    HeadTable<AttentionMask> masks{c.layers, c.kv_heads};
    const std::vector<float> full = model.hidden(asked.tokens, attend_masked(c, masks));
    const auto loss_of = [&](std::span<const float> hidden) {
      return objective == GateObjective::distillation
                 ? distillation_loss(hidden, full, asked, Reduction::mean).value
                 : language_loss(model, hidden, asked, Reduction::mean).value;
    };
    result.loss += share * loss_of(full);
    count();
    for (std::size_t layer = 0; layer < c.layers; ++layer) {
      for (std::size_t head = 0; head < c.kv_heads; ++head) {
        masks(layer, head) = streaming;
        const std::vector<float> hidden = model.hidden(asked.tokens, attend_masked(c, masks));
        result.losses(layer, head) += share * loss_of(hidden);
        masks(layer, head) = {};
        count();
      }
    }
  }
  return result;
}

HeadGates gates_of_rises(const HeadAblation& ablation) {
  constexpr double least = 1e-5;
  HeadGates gates = ablation.losses;
  for (double& gate : gates.values()) gate = std::log(std::max(gate - ablation.loss, least));
  const auto [low, high] = std::ranges::minmax(gates.values());
  const double range = high - low;
  for (double& gate : gates.values()) gate = range > 0.0 ? (gate - low) / range : 0.0;
  return gates;
}

}  // namespace kvpolicy::reference
