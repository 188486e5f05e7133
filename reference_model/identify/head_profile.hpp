// SPDX-License-Identifier: Apache-2.0
//
// Measures which heads attend to far rows. This is the baseline of DuoAttention's ablation
// (arXiv:2410.10819, 3.4): it measures attention and not its effect on the result. It takes one run
// of the model for each text.
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
  passkey   ///< attention to the hidden passkey while it is being answered
};

/// Attention mass from 0 to 1 for each KV head: the mean over its query heads, over the queries
/// before a passkey's tokens (in texts without passkeys, for `outside` only, before the labelled
/// tokens) and over texts.
/// @throws ShapeError for no texts, ConfigError for `passkey` without any; as LabelledText::check
[[nodiscard]] HeadGates profile_heads(const Llama& model, std::span<const LabelledText> texts,
                                      AttentionMask streaming, ProfileOf what, const RunReport& report = {});

}  // namespace kvpolicy::reference
