// SPDX-License-Identifier: Apache-2.0
//
// The losses that DuoAttention's gates are trained on: the distance of the mixed model's last
// hidden rows from the unmodified model's (distillation), or how badly they predict the text
// (language modelling, the paper's ablation).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <reference_model/identify/labelled_text.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

enum class Reduction : std::uint8_t {
  mean,  ///< over labelled tokens and channels, and over gates, as in the published code
  sum    ///< over both, as in the paper's formulas
};

struct Loss {
  double value = 0.0;
  std::vector<float> dhidden;  ///< derivative with respect to each hidden number, [tokens, hidden]
};

/// The squared distance of labelled rows; both inputs are [tokens, hidden], after the final norm.
/// @throws ShapeError if sizes do not fit
[[nodiscard]] Loss distillation_loss(std::span<const float> mixed, std::span<const float> full,
                                     const LabelledText& text, Reduction reduction);

/// -log of the probability of each labelled token, in nats, by the row before it. A label on the
/// first token is ignored. @throws ShapeError if sizes do not fit or all labels are ignored
[[nodiscard]] Loss language_loss(const Llama& model, std::span<const float> hidden, const LabelledText& text,
                                 Reduction reduction);

}  // namespace kvpolicy::reference
