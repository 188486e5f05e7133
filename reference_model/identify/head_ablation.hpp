// SPDX-License-Identifier: Apache-2.0
//
// Which heads need the whole text, by taking it from one at a time: the rise of a loss when a KV head
// alone is restricted to sinks and recent rows. Exact about each head by itself and blind to heads
// that stand in for each other; a run of the model for each head and text.
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

/// Called with the runs done and the runs in all.
using RunReport = std::function<void(std::size_t done, std::size_t total)>;

struct HeadAblation {
  double loss = 0.0;         ///< of the unmodified model, mean over texts; 0 for distillation
  HeadTable<double> losses;  ///< [layers, kv_heads] with that head restricted
};

/// The loss is that of the passkeys' tokens where they are answered, of the labelled tokens in text
/// without passkeys. @throws ShapeError for no texts; as LabelledText::check and the losses
[[nodiscard]] HeadAblation ablate_heads(const Llama& model, std::span<const LabelledText> texts,
                                        AttentionMask streaming, GateObjective objective,
                                        const RunReport& report = {});

/// Rises as gates from 0 to 1: on a logarithmic scale between the least and the greatest, for they
/// differ by powers of ten. Rises below 1e-5, negative ones too, count as that.
[[nodiscard]] HeadGates gates_of_rises(const HeadAblation& ablation);

}  // namespace kvpolicy::reference
