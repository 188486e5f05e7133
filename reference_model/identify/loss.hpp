// SPDX-License-Identifier: Apache-2.0
//
// What DuoAttention's gates are trained to keep small: how far the mixed model's last hidden rows are
// from the unmodified model's (distillation), or how badly they foretell the text (language
// modelling, the paper's ablation).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <reference_model/identify/labelled_text.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

enum class Reduction : std::uint8_t {
  mean,  ///< over labelled tokens and channels, over gates: the published code
  sum    ///< over both: the paper's formulas
};

struct Loss {
  double value = 0.0;
  std::vector<float> dhidden;  ///< how it changes with each hidden number, [tokens, hidden]
};

/// The squared distance of labelled rows, both [tokens, hidden] behind the final norm.
/// @throws ShapeError if sizes do not fit
[[nodiscard]] Loss distillation_loss(std::span<const float> mixed, std::span<const float> full,
                                     const LabelledText& text, Reduction reduction);

/// -log of the probability of each labelled token by the row before it, in nats; a label on the
/// first token counts nothing. @throws ShapeError if sizes do not fit or nothing counts
[[nodiscard]] Loss language_loss(const Llama& model, std::span<const float> hidden,
                                 const LabelledText& text, Reduction reduction);

}  // namespace kvpolicy::reference
