// SPDX-License-Identifier: Apache-2.0
//
// Needles for HeadKV's head scores: a fact at a given depth of a text, a question about it, and
// where in the prompt its right answer stands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <reference_model/identify/headkv_scores.hpp>

namespace kvpolicy::tools {

struct NeedleConfig {
  std::size_t length = 1024;  ///< Bytes of text, question and answer together.
  double depth = 0.5;         ///< Where the fact stands: 0 at the text's beginning, 1 at its end.
  double tolerance = 0.05;    ///< How far from there it may stand, as a share of the text.
  /// Two facts lead to the answer: which of two is the older, and that one's key. The other's key,
  /// the wrong answer, stands in the text as well; the question names the two in either order.
  bool reasoning = false;
  std::uint64_t seed = 1;
  std::uint64_t number = 0;  ///< Which of a seed's needles.
};

/// The haystack is a text as the shipped model was trained on (retrieval_text.hpp), with as many
/// facts about other names as belong to its length: of its facts, the one nearest to the depth is
/// asked for. Texts without one are drawn again. The right answer is the whole sentence.
/// @throws ConfigError for a length that cannot be, or if no text has a fact there.
[[nodiscard]] reference::NeedleSample draw_needle(std::string_view plain,
                                                  const NeedleConfig& config);

}  // namespace kvpolicy::tools
