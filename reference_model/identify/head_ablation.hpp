// SPDX-License-Identifier: Apache-2.0
//
// Finds the heads that need the whole text by the increase of a loss when one KV head at a time is
// restricted to sinks and recent rows. The result is exact for each head by itself, but misses
// heads that can replace each other. It takes a run of the model for each head and text.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include <kvpolicy/plan/duo_gates.hpp>
#include <reference_model/gradient/attention.hpp>
#include <reference_model/identify/duo_gates.hpp>
#include <reference_model/identify/labelled_text.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// Is called with the number of runs done, and with the number in all.
using RunReport = std::function<void(std::size_t done, std::size_t total)>;

struct HeadAblation {
  double loss = 0.0;         ///< of the unmodified model, mean over texts; 0 for distillation
  HeadTable<double> losses;  ///< [layers, kv_heads], with that head restricted
};

/// The loss is that of the passkeys' tokens in their answers, or of the labelled tokens in texts
/// without passkeys. @throws ShapeError for no texts; as LabelledText::check and the losses
[[nodiscard]] HeadAblation ablate_heads(const Llama& model, std::span<const LabelledText> texts,
                                        AttentionMask streaming, GateObjective objective,
                                        const RunReport& report = {});

/// Converts increases of the loss to gates from 0 to 1. The scale is logarithmic between the least
/// and the greatest, because increases differ by powers of ten. Increases below 1e-5, negative ones
/// too, count as 1e-5.
[[nodiscard]] HeadGates gates_of_rises(const HeadAblation& ablation);

}  // namespace kvpolicy::reference
