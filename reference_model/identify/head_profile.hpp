// SPDX-License-Identifier: Apache-2.0
//
// Which heads look far back, by looking at attention alone: the baseline of DuoAttention's ablation
// (arXiv:2410.10819, 3.4), which measures where a head looks and not what becomes of it. One run of
// the model for each text.
#pragma once

#include <cstdint>
#include <span>

#include <kvpolicy/plan/duo_gates.hpp>
#include <reference_model/gradient/attention.hpp>
#include <reference_model/identify/head_ablation.hpp>
#include <reference_model/identify/labelled_text.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

enum class ProfileOf : std::uint8_t {
  outside,  ///< attention to rows that a streaming head would not have
  passkey   ///< attention to the passkey that is being answered, where it is hidden
};

/// Attention mass, 0 to 1, for each KV head: mean over its query heads, over the tokens that foretell
/// a passkey's tokens (in text without passkeys, for `outside` alone, the labelled tokens) and over
/// texts. @throws ShapeError for no texts, ConfigError for `passkey` without any; as
/// LabelledText::check
[[nodiscard]] HeadGates profile_heads(const Llama& model, std::span<const LabelledText> texts,
                                      AttentionMask streaming, ProfileOf what,
                                      const RunReport& report = {});

}  // namespace kvpolicy::reference
